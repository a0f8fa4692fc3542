"""The private folder beside a target in which a run works: made, locked, recognised later, and removed.

    .NAME.memopt-XXXXXXXX/        mode 0700, locked as long as its run lives
        .memopt-stage             marks it as memopt's
        new/                      what is written; after an exchange, what was replaced
        old/                      what is to be replaced, where the system cannot exchange two folders in one step

Whether its run lives is told by the lock alone: process ids are used again, and mean nothing on another host.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_MARK, _NEW, _OLD = ".memopt-stage", "new", "old"
_ATTEMPTS = 5


@dataclass(frozen=True)
class Stage:
    """A stage that this run has made and locked."""

    root: Path
    lock: int
    """Descriptor of the folder."""
    parents: tuple[Path, ...]
    """Folders that were made around the target, innermost first."""

    @property
    def new(self) -> Path:
        return self.root / _NEW

    @property
    def old(self) -> Path:
        return self.root / _OLD

    def release(self, *, written: bool) -> str | None:
        """Remove the stage and, if nothing was written, the parents made for it.

        Returns:
            A sentence on what could not be removed, or None.
        """
        try:
            if (self.root / _MARK).exists():
                _remove(self.root)
            for parent in () if written else self.parents:
                parent.rmdir()
        except OSError as error:
            return f"'{error.filename or self.root}' was left behind, since it cannot be removed: {error.strerror}."
        finally:
            os.close(self.lock)
        return None

    def abandon(self) -> None:
        """Leave the stage where it is, and let no later run take it for a leftover."""
        (self.root / _MARK).unlink()


def make_stage(out: Path) -> Stage:
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
            return Stage(root, os.dup(lock), parents)
    raise FileNotFoundError(2, "temporary folders are removed while they are made", str(out.parent))


def clear_leftovers(out: Path, note: Callable[[str], None]) -> None:
    """Remove the stages that killed runs left beside `out`; what one of them had moved aside is moved back."""
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
    """A locked descriptor of a folder; None where it is none, is gone, or another run has locked it."""
    try:
        lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # no folder: a link, a pipe
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
    """Whether memopt made the folder; one that is empty may be removed in any case."""
    entries = {entry.name: entry for entry in os.scandir(root)}
    if not entries:
        return True
    mark = entries.pop(_MARK, None)
    if mark is None or not mark.is_file(follow_symlinks=False) or mark.stat(follow_symlinks=False).st_size:
        return False
    return all(name in (_NEW, _OLD) and entry.is_dir(follow_symlinks=False) for name, entry in entries.items())


def _remove(root: Path) -> None:
    """Remove a stage, its mark last: what a kill leaves of it is still recognised."""
    for name in (_NEW, _OLD):
        if (root / name).exists():
            shutil.rmtree(root / name)
    (root / _MARK).unlink(missing_ok=True)
    root.rmdir()
