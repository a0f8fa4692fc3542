"""Write the stock form of a patched folder: undo the folds, and remove memopt.json, the key in config.json and
memopt's section in README.md."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from memopt.checkpoint.atomic import Note, staged
from memopt.checkpoint.card import CARD, MAX_BYTES, source_card
from memopt.checkpoint.fold import Fold
from memopt.checkpoint.manifest import CONFIG_KEY
from memopt.checkpoint.shards import write_at
from memopt.checkpoint.sources.source import CheckpointSource
from memopt.checkpoint.target import check_space, check_target
from memopt.checkpoint.unfold import Unfolded, unfold
from memopt.checkpoint.writer import copy_side_files, keep_private


def write_unpatched(
    patched: CheckpointSource,
    original: CheckpointSource | None,
    folds: tuple[Fold, ...],
    out: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    note: Note | None = None,
) -> Unfolded:
    """Write the stock form of `patched` to the folder `out`; all of it or nothing.

    Args:
        original: the model that `patched` was made from; needed if there are folds.
        folds: all folds of `patched`, with the names of the original's tensors.
        progress: called with (bytes done, bytes to do).
        note: called with each sentence that a user should read.

    Raises:
        OutputError: `out` cannot be used or written.
    """
    out = check_target(out, patched.root, force=None)
    if original is not None:
        check_target(out, original.root, force=None)
    check_space(out, patched.space_needed)
    tell = note or (lambda text: None)
    done = Unfolded()
    written = total = 0
    with staged(out, force=None, note=tell) as stage:
        for shard in patched.shards:
            shutil.copyfile(shard.origin, stage / shard.name)

        def put(name: str, start: int, content: memoryview) -> None:
            nonlocal written
            info = patched.tensors[name]
            with open(stage / info.shard, "r+b", buffering=0) as file:
                write_at(file.fileno(), content, info.offset + start)
            written += len(content)
            if progress is not None:
                progress(written, total)

        if original is not None:
            touched = frozenset[str]().union(*(fold.touched for fold in folds))
            total = sum(info.nbytes for name, info in original.tensors.items() if name in touched)
            done = unfold(patched, original, folds, put)
        copy_side_files(patched, stage, tell)
        if missing := _missing_code(patched):
            files = ", ".join(missing)
            tell(f"config.json names code that the folder lacks ({files}): copy it from the model that was patched.")
        _restore_card(stage / CARD)
        (stage / "config.json").write_bytes(_stock_config(patched, original))
        keep_private(patched, stage)
    return done


def _missing_code(patched: CheckpointSource) -> list[str]:
    """The Python files that ``auto_map`` names, and that are not in the folder."""
    references = patched.config.get("auto_map")
    values = references.values() if isinstance(references, dict) else ()
    named = [each for value in values for each in (value if isinstance(value, list) else [value])]
    # "OWNER/NAME--MODULE.CLASS" is code of another repository.
    local = (each for each in named if isinstance(each, str) and "." in each and "--" not in each)
    files = dict.fromkeys(f"{each.partition('.')[0]}.py" for each in local)
    return [name for name in files if name not in patched.side_files]


def _restore_card(path: Path) -> None:
    """Replace the model card that `memopt patch` wrote by the source's, or remove it if the source had none."""
    if not path.is_file() or path.stat().st_size > 2 * MAX_BYTES:  # memopt extends no card of that size
        return
    card = source_card(path.read_bytes())
    if card is None:
        path.unlink()
    else:
        path.write_bytes(card)


def _stock_config(patched: CheckpointSource, original: CheckpointSource | None) -> bytes:
    """config.json without the key; the bytes of the original's if nothing else differs."""
    config = {key: value for key, value in patched.config.items() if key != CONFIG_KEY}
    if original is not None and config == original.config:
        return (original.root / "config.json").read_bytes()
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
