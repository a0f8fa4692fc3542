"""The model card of a patched folder: the source's README.md, with a section on what `memopt patch` did.

Lines are inserted and none is changed: a section at the end between two HTML comments, and in the YAML head lines that
end with ``# memopt``. Removing both gives the source's bytes, which is checked before a card is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from memopt.checkpoint.manifest import Manifest
from memopt.patches.registry import rows

CARD = "README.md"
#: Limits for a card that is extended, and for its YAML head, whose parser needs seconds for a megabyte.
MAX_BYTES, _MAX_HEAD = 1 << 20, 128 << 10
_BEGIN = "\n<!-- memopt begin: written by `memopt patch`, removed by `memopt unpatch` -->\n"
_END = "<!-- memopt end -->\n"
_MARK = " # memopt"
_OWN_HEAD, _OWN_CARD = "---\n# memopt wrote this head\n", "---\n# memopt wrote this card\n"
_TAGS = re.compile(r"^tags:[ \t]*\r?\n(?=( *)- )", re.MULTILINE)

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


def patched_card(root: Path, manifest: Manifest) -> tuple[bytes | None, str]:
    """(the card for the model in the folder `root`, a note for the user). The card is None if the source's file is kept
    as it is, because it is no text that can be extended and restored."""
    path = root / CARD
    if not path.exists():
        return f"{_OWN_CARD}{_additions(manifest)}---\n{_section(manifest)}".encode(), ""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is no file of at most {MAX_BYTES >> 20} MiB")
        before = path.read_bytes()
        for text in _extended(before.decode("utf-8"), manifest):
            if source_card(after := text.encode()) == before:
                return after, ""
        raise ValueError("it has lines that only memopt writes")
    except UnicodeDecodeError:
        why = "it is not UTF-8"
    except ValueError as error:
        why = str(error)
    return None, f"{CARD} is the source's, without a section on the patch: {why}."


def source_card(card: bytes) -> bytes | None:
    """`card` without the additions of :func:`patched_card`; None if memopt wrote all of the card."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    try:
        text = card.decode("utf-8")
    except UnicodeDecodeError:
        return card
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        return card
    text = before + after
    found = REGEX_YAML_BLOCK.search(text)
    if found is not None and text.startswith((_OWN_HEAD, _OWN_CARD)):
        rest = text[found.end() :]
        return rest.encode() if rest or text.startswith(_OWN_HEAD) else None
    if found is not None:
        lines = found[2].splitlines(keepends=True)
        kept = "".join(line for line in lines if not line.rstrip("\r\n").endswith(_MARK))
        text = text[: found.start(2)] + kept + text[found.end(2) :]
    return text.encode()


def _extended(text: str, manifest: Manifest) -> Iterator[str]:
    """Versions of the card `text` to try: with all additions, then without lines in the head, which may take none."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    section = _section(manifest)
    if text.startswith("\ufeff"):
        raise ValueError("it starts with a byte order mark")
    found = REGEX_YAML_BLOCK.search(text)
    if found is None:
        yield f"{_OWN_HEAD}{_additions(manifest)}---\n{text}{section}"
        return
    head = found[2]
    data = _parse(head)
    for tag in (True, False):
        edited, expected = _edited(head, data, manifest, tag)
        with suppress(ValueError):  # no line can be inserted into a head in braces
            if _parse(edited) == expected:
                yield text[: found.start(2)] + edited + text[found.end(2) :] + section
    yield text + section


def _edited(head: str, data: dict[str, Any], manifest: Manifest, tag: bool) -> tuple[str, dict[str, Any]]:
    """(the YAML head with memopt's lines, the mapping that it must parse to); an existing base_model is kept."""
    expected = dict(data)
    if tag and "tags" not in data:
        head, expected["tags"] = f"tags:{_MARK}\n- memopt{_MARK}\n{head}", ["memopt"]
    elif tag and isinstance(data["tags"], list) and "memopt" not in data["tags"]:
        head = _TAGS.sub(lambda found: f"{found[0]}{found[1]}- memopt{_MARK}\n", head, count=1)
        expected["tags"] = ["memopt", *data["tags"]]
    if (hub_id := _hub_id(manifest)) and "base_model" not in data:
        head, expected["base_model"] = f"base_model: {hub_id}{_MARK}\n{head}", hub_id
    return head, expected


def _parse(head: str) -> dict[str, Any]:
    if len(head) > _MAX_HEAD:
        raise ValueError(f"its YAML head is larger than {_MAX_HEAD >> 10} KiB")
    try:
        # YAML aliases can expand without bounds when values are compared.
        if "*" in head and any(isinstance(token, yaml.AliasToken) for token in yaml.scan(head)):
            raise ValueError("its YAML head has aliases")
        data = yaml.safe_load(head)
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError):
        raise ValueError("its YAML head cannot be read") from None
    if not isinstance(data, dict | None):
        raise ValueError("its YAML head is no mapping")
    return data or {}


def _additions(manifest: Manifest) -> str:
    hub_id = _hub_id(manifest)
    return (f"base_model: {hub_id}\n" if hub_id else "") + "tags:\n- memopt\n"


def _hub_id(manifest: Manifest) -> str | None:
    """The source's hub id; None for a local folder, also one inside the hub's cache, whose path is the user's own."""
    source = manifest.source
    return source.model if source.commit and _HUB_ID.fullmatch(source.model) else None


def _section(manifest: Manifest) -> str:
    source, folded = manifest.source, manifest.folded_norms()
    kinds = {kind for kind, its in rows().items() if its.fold}
    rest = sum(entry.kind in kinds and entry.site not in folded for entry in manifest.entries)
    hub_id = _hub_id(manifest)
    model = f"{_code(hub_id)} at commit {_code(str(source.commit))}" if hub_id else _code(Path(source.path).name)
    return f"""{_BEGIN}
## Patched by memopt

Made from {model} by memopt {manifest.memopt_version} with recipe {_code(manifest.recipe.name)}, so that fine-tuning
saves fewer bytes for backward.

- Norms folded into the layers that read them: {len(folded)}. Each stored weight that a fold changes is rounded once.
- Norms not folded: {rest}. All other tensors are byte for byte those of the source. `memopt.json` gives the reasons.

| to | run |
|---|---|
| load it with stock transformers | `from_pretrained("DIR")`, as any checkpoint |
| load it for fine-tuning with fewer saved bytes | `memopt.load("DIR")` in Python |
| verify it against the source | `memopt verify DIR` |
| get the stock form back, trained since or not | `memopt unpatch DIR` |

{_END}"""


def _code(text: str) -> str:
    """`text` as Markdown code of one line."""
    return f"`{''.join(c if c.isprintable() else '?' for c in text.replace('`', chr(39)))}`"
