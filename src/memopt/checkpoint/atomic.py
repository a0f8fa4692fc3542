"""Publish a folder in one step: write it next to its target, and rename it when it is complete.

An error, a full disk, a signal or a power cut before the rename leaves the target unchanged. A run works in a private
folder beside the target, its stage:

    .NAME.memopt-XXXXXXXX/        mode 0700, locked as long as its run lives
        .memopt-stage             marks it as memopt's
        new/                      the folder being written; after an exchange, the folder that was replaced
        old/                      the folder to replace, if the system cannot exchange two folders in one step

Only the lock shows whether the run of a stage is alive: process ids are reused, and mean nothing on another host.
`target` decides which folders may be replaced.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from memopt.checkpoint.target import Files, files_to_replace, list_files, remove_files, restrict
from memopt.errors import OutputError

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MARK, _NEW, _OLD = ".memopt-stage", "new", "old"
_ATTEMPTS = 5
Note = Callable[[str], None]


class Notes(list[str]):
    """The sentences that a user should read; each is also given to `note` as soon as it is known."""

    def __init__(self, note: Note | None) -> None:
        super().__init__()
        self._note = note

    def tell(self, text: str) -> None:
        """Add a sentence."""
        self.append(text)
        if self._note is not None:
            self._note(text)


@contextmanager
def staged(out: Path, *, force: bool | None, note: Note) -> Iterator[Path]:
    """A temporary folder that becomes `out` when the block ends, and is removed when it fails.

    Args:
        out: target folder; see :func:`memopt.checkpoint.target.check_target`.
        force: replace a non-empty target; None if the command has no --force.
        note: called with a sentence when leftovers of an interrupted run are restored or removed, when something
            cannot be removed, and when an interrupt ends the block.

    Raises:
        OutputError: the folder cannot be created, filled or renamed, or holds files that memopt did not write.
    """
    stage: _Stage | None = None
    written, clean = False, True
    try:
        with _terminable():
            with _shielded():
                _clear_leftovers(out, note)
            files = files_to_replace(out, force, "was filled meanwhile", all_digests=True)
            with _shielded():
                stage = _make_stage(out)
            yield stage.new
            _sync_tree(stage.new)
            with _shielded():
                _publish(stage, out, files, note)
                written = True
                clean = stage.release(note, written=True)
                stage = None
    except BaseException as error:
        if stage is not None:
            with _shielded():
                clean = stage.release(note, written=written)
        if isinstance(error, OSError):
            raise _explain(error, out, clean) from error
        if isinstance(error, KeyboardInterrupt | SystemExit):
            note(f"'{out}' was {'' if written else 'not '}written{'; nothing was left behind' if clean else ''}.")
        raise


@dataclass(frozen=True)
class _Stage:
    """A stage that this run has made and locked."""

    root: Path
    lock: int
    """Descriptor of the folder."""
    parents: tuple[Path, ...]
    """Parent folders of the target that were made, innermost first."""

    @property
    def new(self) -> Path:
        return self.root / _NEW

    @property
    def old(self) -> Path:
        return self.root / _OLD

    def release(self, note: Note, *, written: bool) -> bool:
        """Remove the stage and, if nothing was written, the parents made for it; False, with a note, on failure."""
        try:
            if (self.root / _MARK).exists():
                _remove(self.root)
            for parent in () if written else self.parents:
                parent.rmdir()
        except OSError as error:
            note(f"'{error.filename or self.root}' was left behind, because it cannot be removed: {error.strerror}.")
            return False
        finally:
            os.close(self.lock)
        return True


def _make_stage(out: Path) -> _Stage:
    """A stage beside `out`, whose missing parents are made."""
    parents = tuple(path for path in (out.parent, *out.parent.parents) if not path.exists())
    out.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(_ATTEMPTS):
        root = Path(tempfile.mkdtemp(prefix=_prefix(out), dir=out.parent))
        with _locked(root) as lock:
            if lock is None:  # another run found it before it was locked, and removes it as an empty leftover
                continue
            try:
                (root / _MARK).touch()
                (root / _NEW).mkdir()
            except FileNotFoundError:
                continue
            except OSError:
                _remove(root)
                raise
            return _Stage(root, os.dup(lock), parents)
    raise FileNotFoundError(2, "temporary folders are removed while they are made", str(out.parent))


def _clear_leftovers(out: Path, note: Note) -> None:
    """Remove stages that killed runs left beside `out`; a folder that a run had moved aside is moved back."""
    pattern = re.compile(re.escape(_prefix(out)) + r"\w{8}")
    found = sorted(out.parent.iterdir()) if out.parent.is_dir() else []
    for root in (path for path in found if pattern.fullmatch(path.name)):
        with _locked(root) as lock:
            if lock is None:
                continue
            if not _is_stage(root):
                note(f"'{root}' has the name of a temporary folder, but memopt did not make it: it was left alone.")
                continue
            if (root / _OLD).is_dir() and not (out.is_dir() and any(out.iterdir())):
                os.rename(root / _OLD, out)
                note(f"Restored '{out}', which an interrupted run had moved aside.")
            try:
                _remove(root)
                note(f"Removed '{root}', left by an interrupted run.")
            except OSError as error:
                note(f"'{root}' was left by an interrupted run and cannot be removed: {error.strerror}.")


def _prefix(out: Path) -> str:
    return f".{out.name}.memopt-"


@contextmanager
def _locked(root: Path) -> Iterator[int | None]:
    """A locked descriptor of a folder; None if `root` is no folder, is gone, or is locked by another run."""
    try:
        lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # not a folder, but a link or a pipe
        yield None
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield lock
    finally:
        os.close(lock)


def _is_stage(root: Path) -> bool:
    """Whether memopt made the folder, or it is empty and may be removed in any case."""
    entries = {entry.name: entry for entry in os.scandir(root)}
    if not entries:
        return True
    mark = entries.pop(_MARK, None)
    if mark is None or not mark.is_file(follow_symlinks=False) or mark.stat(follow_symlinks=False).st_size:
        return False
    return all(name in (_NEW, _OLD) and entry.is_dir(follow_symlinks=False) for name, entry in entries.items())


def _remove(root: Path) -> None:
    """Remove a stage, its mark last, so that a stage whose removal is interrupted is still recognised."""
    for name in (_NEW, _OLD):
        if (root / name).exists():
            shutil.rmtree(root / name)
    (root / _MARK).unlink(missing_ok=True)
    root.rmdir()


def _publish(stage: _Stage, out: Path, files: Files | None, note: Note) -> None:
    present = list_files(out) if out.is_dir() else {}
    if present != (files or {}):
        raise OutputError(
            f"'{out}' was changed while its replacement was written.", "Check it and run the command again."
        )
    if out.is_dir():  # keep the permissions of a private folder
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
            (stage.root / _MARK).unlink()  # so that no later run takes it for a leftover
            note(f"'{out}' was written; its old content is in '{old}': {error.strerror}.")


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False if the system cannot."""
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


@contextmanager
def _terminable() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP, so that cleanup runs; Ctrl-C raises already."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # the exit status that a shell reports for the signal

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
        return OutputError(f"The disk is full, so '{out}' was not written. Free some space.", hint)
    at = f" ('{error.filename}')" if error.filename else ""
    return OutputError(f"'{out}' could not be written: {error.strerror or error}{at}.", hint)
