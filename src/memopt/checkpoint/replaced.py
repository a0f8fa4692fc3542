"""What `--force` may replace: a folder that holds what its memopt.json lists, unchanged, and nothing else."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from memopt.checkpoint.sources.source import MANIFEST, sha256
from memopt.errors import ModelError, OutputError, first_of
from memopt.files import MAX_JSON_BYTES, parse_json, read_small

#: File -> device, inode, size and times: what shows without reading that it is another one, or was changed.
Files = dict[str, tuple[int, ...]]
_SMALL = 1 << 20
_MOVE = "Move that away first, or choose another --out."


def replaceable(folder: Path, *, all_digests: bool) -> Files:
    """The files of a folder that memopt wrote.

    Args:
        all_digests: compare the digests of all files, and not of small ones only.

    Raises:
        OutputError: memopt did not write the folder, or something in it is not in its list or was changed.
    """
    records = _records(folder)
    if records is None:
        raise OutputError(
            f"'{folder}' was not written by memopt, so --force does not replace it.", "Remove it yourself first."
        )
    found = list_files(folder)
    foreign = sorted({_top(name) for name in found if name not in records and name != MANIFEST})
    if foreign:
        raise OutputError(f"'{folder}' holds what memopt did not write there: {first_of(foreign)}.", _MOVE)

    def changed(name: str) -> bool:
        record, path = records[name], folder / name
        size = path.lstat().st_size
        if not stat.S_ISREG(path.lstat().st_mode) or size != record["size"]:
            return True
        return (all_digests or size <= _SMALL) and sha256(path) != record["sha256"]

    names = sorted(found.keys() - {MANIFEST})
    with ThreadPoolExecutor(2) as pool:
        edited = [name for name, differs in zip(names, pool.map(changed, names), strict=True) if differs]
    if edited:
        raise OutputError(f"'{folder}' was changed since memopt wrote it: {first_of(edited)}.", _MOVE)
    return found


def list_files(folder: Path) -> Files:
    """All that is below a folder, but for folders themselves; links are listed and not followed."""
    found: Files = {}
    for path in _walk(folder):
        state = path.lstat()
        times = (state.st_mtime_ns, state.st_ctime_ns)
        found[path.relative_to(folder).as_posix()] = (state.st_dev, state.st_ino, state.st_size, *times)
    return found


def remove_files(folder: Path, files: Files) -> None:
    """Remove a folder with these files; OSError where anything else is in it."""
    for name in files:
        (folder / name).unlink(missing_ok=True)
    for path, _, _ in os.walk(folder, topdown=False):
        os.rmdir(path)


def _records(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    try:
        if path.is_symlink():
            return None
        records = parse_json(read_small(path, MAX_JSON_BYTES))["files"]
        valid = all({"size", "sha256"} <= record.keys() for record in records.values())
    except (ModelError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return dict(records) if valid else None


def _walk(folder: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(folder):
        for name in (*files, *(name for name in folders if os.path.islink(os.path.join(path, name)))):
            yield Path(path, name)


def _top(name: str) -> str:
    first, slash, _ = name.partition("/")
    return first + slash
