"""Publishing a folder in one step: it is written next to its target and renamed when it is complete.

An error, a full disk, a signal or a power cut before the rename leaves the target unchanged.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from memopt.checkpoint.patched import is_patched
from memopt.checkpoint.sources.hub import cache_folder
from memopt.errors import OutputError

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_MARGIN = 16 << 20
_TERMINATED = 143  # what a shell reports for SIGTERM


@contextmanager
def staged(out: Path, *, force: bool, note: Callable[[str], None]) -> Iterator[Path]:
    """A temporary folder that becomes `out` when the block ends, and is removed when it fails.

    Args:
        out: target folder; see :func:`check_target`.
        force: replace a non-empty target.
        note: called with a sentence where leftovers of an interrupted run were restored or removed.

    Raises:
        OutputError: the folder cannot be created, filled or renamed.
    """
    stage = out.parent / f"{_prefix(out)}{os.getpid()}"
    made = False
    try:
        _clear_leftovers(out, note)
        with _terminable():
            try:
                stage.mkdir(parents=True)
                made = True
                descriptor = os.open(stage, os.O_RDONLY)
            except OSError as error:
                raise OutputError(
                    f"'{out.parent}' cannot be written: {error.strerror}.", "Choose another --out."
                ) from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield stage
                _sync_tree(stage)
                with _shielded():
                    _publish(stage, out, force)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise _explain(error, out) from error
    finally:
        if made:  # else it belongs to a run with the same process id on another host or in another container
            with _shielded():
                shutil.rmtree(stage, ignore_errors=True)


def check_target(out: Path, source: Path, *, force: bool) -> Path:
    """The resolved target, if `source` may be rewritten into it.

    Raises:
        OutputError: it is or contains the source, lies inside it or inside the hub's cache, is a file, or is a
            non-empty folder (with `force`: one that memopt did not write).
    """
    out, source = out.expanduser().resolve(), source.resolve()
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
            raise OutputError(f"'{out}' exists and is not empty.", "Choose another --out, or replace it with --force.")
        if not is_patched(out):
            raise OutputError(
                f"'{out}' was not written by memopt, so --force does not replace it.", "Remove it yourself first."
            )
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


def _prefix(out: Path) -> str:
    return f".{out.name}.memopt-"


def _publish(stage: Path, out: Path, force: bool) -> None:
    if not (out.is_dir() and any(out.iterdir())):
        os.rename(stage, out)  # also replaces an empty folder
        _sync_folder(out.parent)
        return
    if not force:
        raise OutputError(f"'{out}' was filled meanwhile.", "Choose another --out, or replace it with --force.")
    if _exchange(stage, out):
        old = stage
    else:
        old = stage.with_name(stage.name + ".old")
        os.rename(out, old)
        try:
            os.rename(stage, out)
        except OSError:
            os.rename(old, out)
            raise
    _sync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)


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


def _clear_leftovers(out: Path, note: Callable[[str], None]) -> None:
    """Remove temporary folders that a killed run left beside `out`."""
    pattern = re.compile(re.escape(_prefix(out)) + r"(\d+)(\.old)?")
    if not out.parent.is_dir():
        return
    for path in sorted(out.parent.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None or _in_use(path, int(match[1])):
            continue
        if match[2] and not out.exists():
            os.rename(path, out)
            note(f"Restored '{out}', which an interrupted run had moved aside.")
        else:
            shutil.rmtree(path, ignore_errors=True)
            note(f"Removed '{path}', left by an interrupted run.")


def _in_use(path: Path, pid: int) -> bool:
    """Whether the run that made `path` may still be alive, by its lock (from another host or container) or its pid."""
    if pid != os.getpid():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            pass
        except PermissionError:
            return True
        else:
            return True
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


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


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that cleanup runs; Ctrl-C raises already."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(_TERMINATED)

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _shielded() -> Iterator[None]:
    """Defer SIGINT and SIGTERM until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda n, frame: pending.append(n)) for number in signals]
    try:
        yield
    finally:
        for kind, handler in zip(signals, before, strict=True):
            signal.signal(kind, handler)
        for number in pending:
            signal.raise_signal(number)


def _explain(error: OSError, out: Path) -> OutputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(
            f"The disk became full while '{out}' was written; nothing was left behind.", "Free some space."
        )
    at = f" ('{error.filename}')" if error.filename else ""
    return OutputError(f"'{out}' could not be written: {error.strerror or error}{at}.", "Nothing was left behind.")


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
