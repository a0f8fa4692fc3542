"""Kills the writer, or makes a call of the system fail, at random moments, and looks at what is there afterwards.

    python -m tests.checkpoint.faults --kills 200 --errors 100 [--seed N]     exit 1 where something is wrong

One process imports the writer once, without torch, and forks for each trial, so a trial takes some hundredths of a
second. A third of the kills happen before or after any call of the system, a third at a rename, and a third at a random
time. No pytest here; `test_faults` runs this.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from memopt.checkpoint import atomic
from memopt.checkpoint.sources.header import build_header
from memopt.checkpoint.sources.source import open_source
from memopt.checkpoint.writer import write_checkpoint
from memopt.errors import MemoptError
from memopt.plan.plan import Plan, make_plan
from memopt.plan.recipe import load_recipe
from memopt.walk.sites import Consumer, NormSite, Sites

_CALLS: tuple[tuple[Any, str], ...] = (
    *((os, name) for name in ("mkdir", "rename", "fsync", "pwrite", "preadv", "unlink", "rmdir", "chmod", "open")),
    (fcntl, "flock"),
    (atomic, "_exchange"),
)
#: (call, what it fails with); the source is read with preadv alone.
_ERRORS = (
    ("pwrite", errno.ENOSPC),
    ("pwrite", errno.EDQUOT),
    ("preadv", errno.EIO),
    ("fsync", errno.EIO),
    ("mkdir", errno.ENOSPC),
    ("rename", errno.EIO),
    ("chmod", errno.EPERM),
)
_RENAMES = ("rename", "_exchange")
_HIDDEN = 24
#: Signals that a kill sends and a process can block.
_SENT = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Trial:
    """One run of the writer and what happens to it."""

    force: bool
    exchange: bool
    number: int
    """Signal, or errno with `fails`."""
    at: float
    """Part of the run's calls (of its time, with `timed`) that goes before."""
    calls: tuple[str, ...] = tuple(name for _, name in _CALLS)
    """Calls of the system that count."""
    fails: bool = False
    """The call fails, and nothing is killed."""
    after: bool = False
    """After the call instead of before it."""
    timed: bool = False

    def __str__(self) -> str:
        where = "the time" if self.timed else ", ".join(self.calls)
        how = f"force={self.force}, exchange={self.exchange}, after={self.after}"
        return f"{self.kind} at {self.at:.3f} of {where}; {how}"

    @property
    def kind(self) -> str:
        if self.fails:
            return f"{errno.errorcode[self.number]} in {self.calls[0]}"
        return signal.Signals(self.number).name + (" at a rename" if self.calls == _RENAMES else "")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--errors", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    assert "torch" not in sys.modules, "the writer imports torch"
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        place = _Place(Path(folder))
        counts: Counter[str] = Counter()
        wrong = []
        for trial in (*_kills(chance, arguments.kills), *_errors(chance, arguments.errors)):
            for problem in place.run(trial, counts):
                wrong.append(f"{trial}: {problem}")
    print(json.dumps({"seed": arguments.seed, **dict(sorted(counts.items())), "wrong": wrong}, indent=1))
    return 1 if wrong else 0


def _kills(chance: random.Random, count: int) -> Iterator[Trial]:
    for i in range(count):
        number = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT)[i % 4]
        force, exchange, after = (chance.random() < part for part in (0.7, 0.5, 0.5))
        where = Trial(force, exchange, number, chance.random(), after=after)
        if i % 3 == 0:
            where = replace(where, timed=True)
        elif i % 3 == 1:
            where = replace(where, calls=_RENAMES)
        yield where


def _errors(chance: random.Random, count: int) -> Iterator[Trial]:
    for i in range(count):
        call, number = _ERRORS[i % len(_ERRORS)]
        force, exchange = chance.random() < 0.7, chance.random() < 0.5
        yield Trial(force, exchange, number, chance.random(), calls=(call,), fails=True)


class _Place:
    """A folder with a source, an older result, and the results of undisturbed runs."""

    def __init__(self, root: Path) -> None:
        self.root, self.work = root, root / "work"
        self.source = root / "model"
        _make_source(self.source)
        self.source_state = _state(self.source)
        self.old = root / "old"
        write_checkpoint(open_source(str(self.source)), _plan("norms.fold=none"), self.old)
        self.plan = _plan()
        self.lengths: dict[tuple[bool, bool], tuple[Counter[str], float]] = {}
        for force in (True, False):
            for exchange in (True, False):
                self._reset(force)
                self.lengths[force, exchange] = self._dry_run(force, exchange)

    def run(self, trial: Trial, counts: Counter[str]) -> Iterator[str]:
        """What is wrong after the trial, and after an undisturbed run that follows it."""
        self._reset(trial.force)
        code = self._disturbed(trial)
        out = self.work / "out"
        yield from self._problems(out, trial)
        left = len(list(self.work.glob(".out.memopt-*")))
        counts[f"{trial.kind}, {'written' if _is_new(out) else 'missing' if not out.exists() else 'as before'}"] += 1
        if left:
            counts[f"{trial.kind}, leftover until the next run"] += 1
        if trial.fails:
            # An error after the rename is a note only: the folder is there and complete.
            if code != 2 and not (code == 0 and _is_new(out)):
                yield f"exit code {code}"
            if left:
                yield "a leftover after an error"
        elif code not in (0, -trial.number, 128 + trial.number):
            yield f"exit code {code}"
        force = trial.force or _is_new(out)
        if (code := self._fork(lambda: self._write(force, trial.exchange))) != 0:
            yield f"the next run ended with {code}"
        if [path.name for path in self.work.iterdir()] != ["out"]:
            yield f"left after the next run: {sorted(path.name for path in self.work.iterdir())}"
        if not _is_new(out):
            yield "the next run wrote no complete folder"

    def _problems(self, out: Path, trial: Trial) -> Iterator[str]:
        if _state(self.source) != self.source_state:
            yield "the source was touched"
        if not out.exists():
            if trial.force and trial.exchange:
                yield "the old folder is gone"
        elif not _is_new(out) and not (trial.force and _contents(out) == _contents(self.old)):
            yield f"an incomplete folder: {sorted(_contents(out))}"

    def _reset(self, force: bool) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        if force:
            shutil.copytree(self.old, self.work / "out")

    def _write(self, force: bool, exchange: bool) -> None:
        if not exchange:
            atomic._exchange = lambda one, other: False
        write_checkpoint(open_source(str(self.source)), self.plan, self.work / "out", force=force)

    def _dry_run(self, force: bool, exchange: bool) -> tuple[Counter[str], float]:
        """How many calls an undisturbed run makes, by name, and its seconds."""
        reader, writer = os.pipe()

        def count() -> None:
            calls: Counter[str] = Counter()
            _watch(lambda name: calls.update([name]), lambda name: None)
            self._write(force, exchange)
            os.write(writer, json.dumps(calls).encode())

        started = time.perf_counter()
        assert self._fork(count) == 0
        seconds = time.perf_counter() - started
        calls = Counter(json.loads(os.read(reader, 1 << 16)))
        os.close(reader)
        os.close(writer)
        return calls, seconds

    def _disturbed(self, trial: Trial) -> int:
        calls, seconds = self.lengths[trial.force, trial.exchange]
        chosen = int(trial.at * max(sum(calls[name] for name in trial.calls), 1))
        done = 0

        def strike() -> None:
            if trial.fails:
                raise OSError(trial.number, os.strerror(trial.number))
            os.kill(os.getpid(), trial.number)

        def count(name: str) -> None:
            nonlocal done
            if name in trial.calls:
                done += 1
                if done == chosen + 1 and not trial.after:
                    strike()

        def counted(name: str) -> None:
            if name in trial.calls and done == chosen + 1 and trial.after:
                strike()

        def run() -> None:
            if not trial.timed:
                _watch(count, counted)
            self._write(trial.force, trial.exchange)

        after = trial.at * seconds if trial.timed else None
        return self._fork(run, kill_after=after, number=trial.number)

    def _fork(self, run: Callable[[], None], *, kill_after: float | None = None, number: int = 0) -> int:
        # A signal that comes before the child is ready for it waits.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SENT)
        pid = os.fork()
        if pid == 0:
            _in_the_child(run)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SENT)
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(pid, number)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _in_the_child(run: Callable[[], None]) -> None:
    """Run and end this process with the exit code that the command would have."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 70
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SENT)
        run()
        code = 0
    except MemoptError as error:
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _watch(before: Callable[[str], None], after: Callable[[str], None]) -> None:
    """Tell of every call of the system, in this process, for good."""
    for module, name in _CALLS:
        _wrap(module, name, before, after)


def _wrap(module: Any, name: str, before: Callable[[str], None], after: Callable[[str], None]) -> None:
    original = getattr(module, name)

    def watched(*arguments: Any, **options: Any) -> Any:
        before(name)
        try:
            return original(*arguments, **options)
        finally:
            after(name)

    setattr(module, name, watched)


def _make_source(folder: Path) -> None:
    shapes = {"model.embed.weight": (50, _HIDDEN)}
    for i in range(2):
        block = f"model.layers.{i}."
        shapes |= {f"{block}norm.weight": (_HIDDEN,), f"{block}q.weight": (_HIDDEN, _HIDDEN)}
    weight_map = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(shapes)}
    folder.mkdir()
    for file in set(weight_map.values()):
        part = {name: ("BF16", shape) for name, shape in shapes.items() if weight_map[name] == file}
        header = build_header(file, part)
        values = np.random.default_rng(0).standard_normal(header.file_size, dtype=np.float32).view(np.uint16)[1::2]
        (folder / file).write_bytes((header.raw + values.tobytes())[: header.file_size])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "made-up"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "sub").mkdir()
    (folder / "sub" / "vocab.txt").write_text("a b c")


def _plan(*overrides: str) -> Plan:
    norms = []
    for i in range(2):
        block = f"model.layers.{i}."
        reader = Consumer(f"{block}q.weight", f"{block}q", axis=1)
        norms.append(
            NormSite(
                f"{block}norm", kind="rms", hidden_size=_HIDDEN, eps=1e-6, weight=f"{block}norm.weight",
                consumers=(reader,),
            )
        )  # fmt: skip
    sites = Sites(model_class="MadeUp", model_type="made-up", norms=tuple(norms))
    return make_plan(sites, load_recipe("exact", overrides))


def _contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _state(folder: Path) -> dict[str, tuple[int, ...]]:
    states = ((path, path.lstat()) for path in (folder, *folder.rglob("*")))
    return {str(path): (stat.S_IMODE(s.st_mode), s.st_ino, s.st_size, s.st_mtime_ns) for path, s in states}


def _is_new(folder: Path) -> bool:
    """Whether it is a complete folder of the trial's plan: the digests of its list, and nothing else."""
    if not (folder / "memopt.json").is_file():
        return False
    manifest = json.loads((folder / "memopt.json").read_text())
    found = _contents(folder)
    del found["memopt.json"]
    return len(manifest["folds"]) == 2 and found == {n: record["sha256"] for n, record in manifest["files"].items()}


if __name__ == "__main__":
    raise SystemExit(main())
