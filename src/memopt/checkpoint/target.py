"""Check whether a folder may be written. `--force` replaces only a folder that has exactly the files in its
memopt.json, unchanged.
"""

from __future__ import annotations

import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from memopt.checkpoint.sources.hub import cache_folder
from memopt.checkpoint.sources.source import MANIFEST, sha256
from memopt.environment.files import MAX_JSON_BYTES, format_bytes, parse_json, read_small, user_path
from memopt.errors import ModelError, OutputError, first_of

#: File -> (device, inode, size, times), which show, without a read, whether the file was replaced or changed.
Files = dict[str, tuple[int, ...]]
_SMALL = 1 << 20
_MARGIN = 16 << 20
_MOVE = "Move that away first, or choose another --out."


def check_target(out: Path, source: Path, *, force: bool | None) -> Path:
    """The resolved target, if `source` may be rewritten into it. Raises an OutputError if `out` is or contains the
    source, lies inside it or inside the hub's cache, is a file, or is a non-empty folder (with `force`: a folder that
    differs from what memopt wrote)."""
    out, source = user_path(out).resolve(), source.resolve()
    for path in (out, source):
        try:
            str(path).encode()
        except UnicodeEncodeError:
            message = f"The name of '{path}' is no valid Unicode, so memopt.json cannot hold it."
            raise OutputError(message, "Rename the folder.") from None
    cache = cache_folder()
    unfit = {
        "is the source folder or lies inside it": source in (out, *out.parents),
        f"contains the source '{source}'": out in source.parents,
        "would change the hub's cache": cache in (out, *out.parents) or out in cache.parents,
        "is or contains the current folder": out in (Path.cwd(), *Path.cwd().parents),
        "is a file, or lies below one": any(each.exists() and not each.is_dir() for each in (out, *out.parents)),
    }
    for why in (why for why, holds in unfit.items() if holds):
        raise OutputError(f"--out '{out}' {why}.", "Choose another --out.")
    files_to_replace(out, force, "exists and is not empty", all_digests=False)
    return out


def check_space(out: Path, needed: int) -> None:
    """Raise an OutputError if the disk of `out` has no room for `needed` bytes."""
    folder = next(parent for parent in out.parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < needed + _MARGIN:
        raise OutputError(
            f"'{out}' needs {format_bytes(needed + _MARGIN)} and the disk has {format_bytes(free)} free.",
            "Free some space, or choose an --out on another disk.",
        )


def default_folder(model: str) -> Path:
    """NAME-memopt in the current folder, for a local folder or a hub id."""
    path = user_path(model)
    name = path.resolve().name if path.exists() else Path(model).name
    return Path(f"{name or 'model'}-memopt")


def restrict(path: Path, origin: Path) -> None:
    """Remove from `path` the permissions of group and others that `origin` does not give."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~(0o077 & ~origin.stat().st_mode))


def files_to_replace(out: Path, force: bool | None, state: str, *, all_digests: bool) -> Files | None:
    """The files of `out` that memopt wrote and that may be replaced; None if there are none.

    Args:
        force: whether they may be replaced; None if the command has no --force.
        state: words for a folder that is not empty, in the error message.
        all_digests: compare the digests of all files, and not of small ones only.

    Raises:
        OutputError: the files may not be replaced, memopt did not write the folder, or a file in it is not in its
            memopt.json or was changed.
    """
    if not (out.is_dir() and any(out.iterdir())):
        return None
    if not force:
        way_out = "remove it first." if force is None else "replace it with --force."
        raise OutputError(f"'{out}' {state}.", f"Choose another --out, or {way_out}")
    records = _records(out)
    if records is None:
        raise OutputError(
            f"'{out}' was not written by memopt, so --force does not replace it.", "Remove it yourself first."
        )
    found = list_files(out)
    foreign = sorted({"".join(name.partition("/")[:2]) for name in found if name not in records and name != MANIFEST})
    if foreign:
        raise OutputError(f"'{out}' has files that memopt did not write: {first_of(foreign)}.", _MOVE)

    def changed(name: str) -> bool:
        record, path = records[name], out / name
        size = path.lstat().st_size
        if not stat.S_ISREG(path.lstat().st_mode) or size != record["size"]:
            return True
        return (all_digests or size <= _SMALL) and sha256(path) != record["sha256"]

    names = sorted(found.keys() - {MANIFEST})
    with ThreadPoolExecutor(2) as pool:
        edited = [name for name, differs in zip(names, pool.map(changed, names), strict=True) if differs]
    if edited:
        raise OutputError(f"'{out}' was changed since memopt wrote it: {first_of(edited)}.", _MOVE)
    return found


def list_files(folder: Path) -> Files:
    """All files and links below a folder; links are not followed."""
    found: Files = {}
    for path, folders, files in os.walk(folder):
        for name in (*files, *(name for name in folders if os.path.islink(os.path.join(path, name)))):
            state = Path(path, name).lstat()
            times = (state.st_mtime_ns, state.st_ctime_ns)
            place = Path(path, name).relative_to(folder).as_posix()
            found[place] = (state.st_dev, state.st_ino, state.st_size, *times)
    return found


def remove_files(folder: Path, files: Files) -> None:
    """Remove these files and the folder; raises OSError if anything else is in it."""
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
