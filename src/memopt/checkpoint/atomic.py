"""Publishing a folder in one step: it is written next to its target and renamed when it is complete.

An error, a full disk, a signal or a power cut before the rename leaves the target unchanged. What happens beside the
target is in `stage`, which targets may be replaced in `replaced`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from memopt.checkpoint.replaced import Files, list_files, remove_files, replaceable
from memopt.checkpoint.sources.hub import cache_folder
from memopt.checkpoint.stage import Stage, clear_leftovers, make_stage
from memopt.errors import OutputError

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_MARGIN = 16 << 20
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def staged(out: Path, *, force: bool | None, note: Callable[[str], None]) -> Iterator[Path]:
    """A temporary folder that becomes `out` when the block ends, and is removed when it fails.

    Args:
        out: target folder; see :func:`check_target`.
        force: replace a non-empty target; None where the command has no --force.
        note: called with a sentence where leftovers of an interrupted run were restored or removed, where something
            could not be removed, and where an interrupt ends the block.

    Raises:
        OutputError: the folder cannot be created, filled or renamed, or holds what memopt did not write.
    """
    stage: Stage | None = None
    written, clean = False, True
    try:
        with _terminable():
            with _shielded():
                clear_leftovers(out, note)
            files = _to_replace(out, force)
            with _shielded():
                stage = make_stage(out)
            yield stage.new
            _sync_tree(stage.new)
            with _shielded():
                _publish(stage, out, files, note)
                written = True
                clean = _release(stage, note, written=True)
                stage = None
    except BaseException as error:
        if stage is not None:
            clean = _release(stage, note, written=written)
        if isinstance(error, OSError):
            raise _explain(error, out, clean) from error
        if isinstance(error, KeyboardInterrupt | SystemExit):
            note(f"'{out}' was {'' if written else 'not '}written{'; nothing was left behind' if clean else ''}.")
        raise


def check_target(out: Path, source: Path, *, force: bool | None) -> Path:
    """The resolved target, if `source` may be rewritten into it.

    Raises:
        OutputError: it is or contains the source, lies inside it or inside the hub's cache, is a file, or is a
            non-empty folder (with `force`: one in which not all is as memopt wrote it).
    """
    out, source = out.expanduser().resolve(), source.resolve()
    for path in (out, source):
        try:
            str(path).encode()
        except UnicodeEncodeError:
            message = f"The name of '{path}' is no valid Unicode, so memopt.json cannot hold it."
            raise OutputError(message, "Rename the folder.") from None
    if out == source or source in out.parents:
        raise OutputError(f"--out '{out}' is the source folder or lies inside it.", "Choose another --out.")
    if out in (source, *source.parents):
        raise OutputError(f"--out '{out}' contains the source '{source}'.", "Choose another --out.")
    cache = cache_folder()
    if out == cache or cache in out.parents or out in cache.parents:
        raise OutputError(f"--out '{out}' would change the hub's cache.", "Choose another --out.")
    if out in (Path.cwd(), *Path.cwd().parents):
        raise OutputError(f"--out '{out}' is or contains the current folder.", "Choose another --out.")
    if out.exists() and not out.is_dir():
        raise OutputError(f"--out '{out}' is a file.", "Choose another --out.")
    if out.is_dir() and any(out.iterdir()):
        if not force:
            raise OutputError(f"'{out}' exists and is not empty.", _another(force))
        replaceable(out, all_digests=False)
    return out


def check_space(out: Path, needed: int) -> None:
    """Check that the disk of `out` has room for `needed` bytes.

    Raises:
        OutputError: it has not.
    """
    folder = next(parent for parent in out.parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < needed + _MARGIN:
        raise OutputError(
            f"'{out}' needs {_size(needed + _MARGIN)} and the disk has {_size(free)} free.",
            "Free some space, or choose an --out on another disk.",
        )


def restrict(path: Path, origin: Path) -> None:
    """Take from `path` what group and others may not do with `origin`."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~(0o077 & ~origin.stat().st_mode))


def _another(force: bool | None) -> str:
    return "Choose another --out, or " + ("remove it first." if force is None else "replace it with --force.")


def _to_replace(out: Path, force: bool | None) -> Files | None:
    """The files of `out` that may be replaced; None where there are none."""
    if not (out.is_dir() and any(out.iterdir())):
        return None
    if not force:
        raise OutputError(f"'{out}' was filled meanwhile.", _another(force))
    return replaceable(out, all_digests=True)


def _publish(stage: Stage, out: Path, files: Files | None, note: Callable[[str], None]) -> None:
    present = list_files(out) if out.is_dir() else {}
    if present != (files or {}):
        raise OutputError(f"'{out}' was changed while its replacement was written.", "Look at it, and try again.")
    if out.is_dir():  # a folder that was private is private again
        restrict(stage.new, out)
    if files is None:
        os.rename(stage.new, out)  # also replaces an empty folder
    elif not _exchange(stage.new, out):
        os.rename(out, stage.old)
        try:
            os.rename(stage.new, out)
        except OSError:
            os.rename(stage.old, out)
            raise
    try:
        _sync_folder(out.parent)
    except OSError as error:
        note(f"'{out}' was written, but a power cut may undo it: {error.strerror}.")
    if files is not None:
        old = stage.old if stage.old.exists() else stage.new
        try:
            remove_files(old, files)
        except OSError as error:
            stage.abandon()
            note(f"'{out}' was written; what was in it before is left in '{old}': {error.strerror}.")


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _sync_tree(folder: Path) -> None:
    for path, _, files in os.walk(folder):
        for name in files:
            _sync_folder(Path(path, name))
        _sync_folder(Path(path))


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _release(stage: Stage, note: Callable[[str], None], *, written: bool) -> bool:
    """Remove the stage; False, with a note, where that failed."""
    with _shielded():
        left = stage.release(written=written)
    if left is not None:
        note(left)
    return left is None


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP, so that cleanup runs; Ctrl-C raises already."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # what a shell reports for it

    ours = [number for number in _ENDING if signal.getsignal(number) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        ours = []
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _shielded() -> Iterator[None]:
    """Defer SIGINT, SIGTERM and SIGHUP until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    signals = (signal.SIGINT, *_ENDING)
    before = [signal.signal(number, lambda n, frame: pending.append(n)) for number in signals]
    try:
        yield
    finally:
        for kind, handler in zip(signals, before, strict=True):
            signal.signal(kind, handler)
        for number in pending:
            signal.raise_signal(number)


def _explain(error: OSError, out: Path, clean: bool) -> OutputError:
    hint = "Nothing was left behind." if clean else None
    if error.errno in _FULL:
        return OutputError(f"The disk became full while '{out}' was written. Free some space.", hint)
    at = f" ('{error.filename}')" if error.filename else ""
    return OutputError(f"'{out}' could not be written: {error.strerror or error}{at}.", hint)


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
