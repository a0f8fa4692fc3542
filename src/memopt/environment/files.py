"""Reads small files of an untrusted model folder (plain files, with limits on size and JSON), and writes results.

Folders that hold no model are refused.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from memopt.errors import InputsError, ModelError, OutputError, UsageError

#: How inputs are saved to a file, and the hint where such a file is missing or wrong.
SAVE_INPUTS = 'torch.save(dict(processor(..., return_tensors="pt")), "batch.pt")'
MAKE_INPUTS = f"Make it with: {SAVE_INPUTS}"
#: File that shows that a folder holds a PEFT adapter.
ADAPTER_CONFIG = "adapter_config.json"
#: Most bytes of a header, index or manifest. 92,000 tensors have an index of 9 MB.
MAX_JSON_BYTES = 16 << 20
#: Most bytes of another JSON file that this file or transformers reads, except tokenizers (the largest have 35 MB).
MAX_CONFIG_BYTES = 8 << 20
#: Most lists and objects in one document: each takes a few bytes of text and a hundred bytes of memory.
MAX_NESTS, MAX_CONFIG_NESTS = 800_000, 50_000
_MAX_DEPTH, _MAX_YAML_ITEMS = 64, 10_000
_JSON = (str, int, float, list, dict, type(None))
_MAX_TOKENIZER_BYTES = 128 << 20
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read_small(path: Path, limit: int = MAX_CONFIG_BYTES) -> bytes:
    """Content of a plain file (or a link to one) of at most `limit` bytes. Raises a ModelError if it is larger, or a
    pipe, a device or the like, and an OSError if it is missing or not readable."""
    # Without O_NONBLOCK, opening a named pipe waits for a writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _check(path, os.fstat(file.fileno()), limit)
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ModelError(f"'{path}' grew while it was read.")
    return content


def user_path(path: str | Path) -> Path:
    """`path` with the home folder in the place of ``~``; unlike `Path.expanduser`, one of an unknown user as it is.
    Raises a UsageError as :func:`path_text` does."""
    return Path(os.path.expanduser(path_text(path)))


def path_text(path: object) -> str:
    """`path` as text. Raises a UsageError if it is neither a string nor a path: a model in memory, for example."""
    if not isinstance(path, str | Path):
        known = f": {name}" if (name := getattr(path, "name_or_path", "")) else ""
        hint = f"Give the folder or hub id that it was loaded from{known}." if hasattr(path, "parameters") else None
        raise UsageError(f"{type(path).__name__} was given for a path or hub id, which is a string.", hint)
    return str(path)


def check_output(path: Path, option: str, *, force: bool = False) -> Path:
    """The resolved `path`, if a result can be written there, with `force` over a file with content; errors name
    `option`. Raises an OutputError if it is a folder or a device, has content, or its folder is missing or not
    writable."""
    path = Path(os.path.realpath(user_path(path)))
    what = f"{option} '{path}'"
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "no plain file"
        raise OutputError(f"{what} is {kind}, so the result cannot be written there.", "Name a file.")
    if not path.parent.is_dir():
        raise OutputError(f"{what} lies in a folder that does not exist.", f"Create '{path.parent}', or name another.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(
            f"{what} cannot be written: you have no permission to write in its folder.", "Name another folder."
        )
    if not force and path.exists() and path.stat().st_size:
        raise OutputError(f"{what} exists already.", "Choose another name, or replace it with --force.")
    return path


def check_output_folder(path: Path, names: Iterable[str], *, force: bool = False) -> Path:
    """`path`, if files of `names` can be written in this folder, which may be missing and is not created. Raises an
    OutputError if it is a file or not writable, or one of the files fails `check_output`."""
    path = user_path(path)
    real = Path(os.path.realpath(path))
    nearest = next(each for each in (real, *real.parents) if each.exists())
    if not nearest.is_dir():
        raise OutputError(f"--out '{path}' is no folder: '{nearest}' is a file.", "With --emit, name a folder.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OutputError(f"--out '{path}' cannot be written: '{nearest}' is read-only.", "Name another folder.")
    for name in names if nearest == real else ():
        check_output(real / name, "--out", force=force)
    return path


def write_output(path: Path, content: bytes) -> None:
    """Write a file completely or not at all (an OutputError): write it next to its target, then rename it."""
    new = path.with_name(f".{path.name[:200]}.{os.urandom(4).hex()}")
    try:
        with open(new, "xb") as file:
            if path.exists():
                os.chmod(new, stat.S_IMODE(path.stat().st_mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError as error:
        raise OutputError(f"'{path}' could not be written: {error.strerror}.", "It was not changed.") from error
    finally:
        new.unlink(missing_ok=True)


def parse_json(
    content: bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None, nests: int = MAX_NESTS
) -> Any:
    """The value of a JSON document; `pairs` makes its objects. Raises a ValueError if it is not JSON in UTF-8, is too
    deep, has too many lists and objects, or text that is no Unicode."""
    if content.count(b"[") + content.count(b"{") > nests:
        raise ValueError(f"it has over {nests:,} lists and objects")
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=pairs)
        if b"\\u" in content:  # json.loads accepts half of a surrogate pair, which cannot be encoded again
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg.removesuffix(' at')} at line {error.lineno}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeError:
        raise ValueError("it has text that is not valid Unicode") from None
    level = [value]
    for _ in range(_MAX_DEPTH):  # a limit, since functions that copy or compare a value recurse for each level
        level = [item for each in level for item in _items(each) if isinstance(item, dict | list)]
    if level:
        raise ValueError("it is nested too deeply")
    return value


def read_object(path: Path, hint: str | None, limit: int = MAX_JSON_BYTES, nests: int = MAX_NESTS) -> dict[str, Any]:
    """The object in a JSON file of at most `limit` bytes. Raises a FileNotFoundError, and a ModelError with `hint` if
    the file is no such object or cannot be read."""
    try:
        value = parse_json(read_small(path, limit), nests=nests)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise ModelError(f"'{path}' is not readable JSON: {error}.", hint) from None
    if not isinstance(value, dict):
        raise ModelError(f"'{path}' is not a JSON object.", hint)
    return value


def parse_yaml(text: str) -> Any:
    """The value of a YAML document that has only types of JSON. Raises a ValueError if it is no YAML, has a key twice
    or a value of another type, or expands too deep or too large."""
    import yaml

    class Loader(yaml.SafeLoader):
        def flatten_mapping(self, node: Any) -> None:  # called before the keys of `<<` join the mapping's own
            once([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            super().flatten_mapping(node)

    try:
        value = yaml.load(text, Loader)
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError((str(error) or type(error).__name__).splitlines()[0]) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(_MAX_DEPTH):  # an anchor's value may contain itself, or double with each level
        keys = [key for each in level if isinstance(each, dict) for key in each]
        for one in (*(each for each in level if not isinstance(each, _JSON)), *(k for k in keys if type(k) is not str)):
            raise ValueError(f"a {type(one).__name__} ({str(one)[:80]}) cannot be written as JSON")
        if any(isinstance(each, int) and each.bit_length() > 64 for each in level):
            raise ValueError("a number in it is too large")
        level = [item for each in level for item in _items(each)]
        if len(level) > _MAX_YAML_ITEMS:
            break
    if level:
        raise ValueError("it is nested too deeply, or repeats an anchor too often")
    return value


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping with these pairs of a document; a ValueError if a key occurs twice: parsers read that differently."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return found


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def model_folder(source: str | Path, revision: str | None = None) -> Path | None:
    """The folder that `source` names; None if it is a hub id. Raises a ModelError if `source` is neither, or a folder
    is there and a `revision` is given."""
    name = path_text(source)
    if not name:
        raise ModelError("The name of the model is empty.", "Give a folder or a hub id.")
    folder = user_path(source)
    if folder.is_dir():
        if revision is not None:
            raise ModelError(f"--revision is for hub ids, and '{name}' is a local folder.")
        return folder
    if folder.exists():
        raise ModelError(f"'{source}' is a file, not a model folder.", "Give the folder that holds its config.json.")
    if isinstance(source, Path) or name.startswith((".", "/", "~")):
        raise ModelError(f"The folder '{source}' does not exist.", "Check the path.")
    _check_hub_id(name)
    return None


def _check_hub_id(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        message = f"'{name}' is neither an existing folder nor a hub id."
        raise ModelError(message, "A hub id is 'name' or 'organisation/name'.") from None


def patched_folder_at(directory: str | Path) -> Path:
    """The folder `directory`; a ModelError if it does not exist."""
    folder = Path(path_text(directory))
    if not folder.is_dir():
        raise ModelError(f"Folder '{directory}' does not exist.", "Give a folder that `memopt patch` wrote.")
    return folder


def inputs_file(path: str | Path) -> Path:
    """The file of inputs at `path`; an InputsError if it does not exist."""
    path = user_path(path)
    if not path.is_file():
        raise InputsError(f"The file of inputs '{path}' does not exist.", MAKE_INPUTS)
    return path


def refuse_adapter(folder: Path) -> None:
    """Raise a ModelError if `folder` holds a PEFT adapter: transformers would load its base model, which is named."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return
    try:
        base = parse_json(read_small(path))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str) or not base:
        raise ModelError(f"'{folder}' holds a PEFT adapter, not a model.", "Give the base model that it belongs to.")
    raise ModelError(f"'{folder}' holds a PEFT adapter of '{base}', not a model.", f"Give the base model: {base}")


def check_folder(root: Path) -> None:
    """Check the files in `root`, but not in folders below it, before a library opens one by its name. Raises a
    ModelError if a file is a pipe, a device, a socket or a broken link, or a JSON file larger than any model's."""
    with os.scandir(root) as entries:
        for entry in entries:
            check_side_file(Path(entry.path))


def check_side_file(path: Path) -> None:
    """Check one file as `check_folder` does, and that its name is printable; a folder passes."""
    if not path.name.isprintable():
        raise ModelError(f"A file in {str(path.parent)!a} has the unprintable name {path.name!a}.")
    try:
        found = path.stat()
    except OSError:
        raise ModelError(f"'{path}' is a broken link or not a plain file.", "Remove it or copy it again.") from None
    if not stat.S_ISDIR(found.st_mode):
        _check(path, found, _limit(path.name))


def _limit(name: str) -> int | None:
    if not name.endswith(".json"):
        return None
    if name.endswith(".index.json") or name == "memopt.json":
        return MAX_JSON_BYTES
    return MAX_CONFIG_BYTES if name.endswith("config.json") else _MAX_TOKENIZER_BYTES


def format_bytes(nbytes: float) -> str:
    """1.23 GiB, 45.6 MiB, 7.8 KiB, 9 B."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{nbytes:.0f} B"


def _check(path: Path, found: os.stat_result, limit: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = next((kind for is_kind, kind in _KINDS if is_kind(found.st_mode)), "something else")
        raise ModelError(f"'{path}' is {kind}, not a plain file.", "Replace it with the model's own file.")
    if limit is not None and found.st_size > limit:
        raise ModelError(
            f"'{path}' has {found.st_size:,} bytes; memopt reads at most {limit:,} of such a file.",
            "Download or copy it again.",
        )
