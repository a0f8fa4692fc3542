"""Plants faults in a copy of the sources, one at a time, and shows that the named tests fail for each.

    python -m tests.mutations               every fault, and a table; exit 1 where one is not caught
    python -m tests.mutations --list        their numbers and names; nothing is run
    python -m tests.mutations --only 3 17   these ones
    python -m tests.mutations --baseline    the named tests without a fault: they have to pass

A fault (`tests/mutation/faults.py`) is found by its text, which stands once in src, so a module may be moved. A fault
whose text is gone, or stands twice, is an error and not a fault that was caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.mutation.fault import Fault
from tests.mutation.faults import FAULTS

ROOT = Path(__file__).resolve().parents[1]
#: Exit codes of pytest.
_PASSED, _FAILED = 0, 1
_SECONDS = 600
#: Folders of tests that need Triton's interpreter, and the emulated device.
_INTERPRETED = ("tests/triton", "tests/device/numeric")
_EMULATED = ("tests/device", "tests/gpu")


@dataclass(frozen=True)
class Result:
    """What became of one fault."""

    outcome: str
    """``caught``, ``NOT CAUGHT``, or ``ERROR``: the text or the tests are not there, or do not run."""
    seconds: float
    detail: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of faults")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--baseline", action="store_true", help="run the tests of the faults without a fault")
    options = parser.parse_args(arguments)
    chosen = [(number, fault) for number, fault in enumerate(FAULTS) if not options.only or number in options.only]
    if options.list:
        for number, fault in chosen:
            print(f"{number:3} {fault.name}: {place(fault, ROOT)}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder) / "memopt")
        results = []
        for number, fault in chosen:
            result = _without(fault, copy) if options.baseline else _with(fault, copy)
            print(f"{number:3} {result.outcome:10} {result.seconds:5.0f} s  {fault.name}", flush=True)
            results.append((number, fault, result))
    _print(results)
    wanted = "passes" if options.baseline else "caught"
    return 0 if all(result.outcome == wanted for _, _, result in results) else 1


def copied(target: Path) -> Path:
    """The files of this tree that git tracks or would, as they are now, in the new folder `target`."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        source = ROOT / name
        if source.is_file() and not source.is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / name)
    if (ROOT / "models").exists():
        (target / "models").symlink_to((ROOT / "models").resolve())
    return target


def place(fault: Fault, root: Path) -> Path:
    """The file below `root` in which the text of `fault` stands.

    Raises:
        LookupError: the text stands nowhere in src, or more than once.
    """
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((root / "src").rglob("*.py"))}
    counts = {path: text.count(fault.old) for path, text in texts.items() if fault.old in text}
    if sum(counts.values()) != 1:
        where = ", ".join(f"{path.relative_to(root)} ({count})" for path, count in counts.items()) or "nowhere"
        raise LookupError(f"the text must stand once in src, and stands: {where}")
    return next(iter(counts))


@contextmanager
def planted(fault: Fault, root: Path) -> Iterator[None]:
    """The fault stands in the sources below `root` inside the `with`."""
    path = place(fault, root)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def _with(fault: Fault, copy: Path) -> Result:
    started = time.monotonic()
    try:
        with planted(fault, copy):
            code, report = _run(fault, copy)
    except LookupError as error:
        return Result("ERROR", 0.0, str(error))
    seconds = time.monotonic() - started
    if code == _FAILED and "error during collection" not in report:
        return Result("caught", seconds, report)
    return Result("NOT CAUGHT" if code == _PASSED else "ERROR", seconds, report)


def _without(fault: Fault, copy: Path) -> Result:
    started = time.monotonic()
    code, report = _run(fault, copy)
    return Result("passes" if code == _PASSED else "FAILS", time.monotonic() - started, report)


def _run(fault: Fault, copy: Path) -> tuple[int, str]:
    """Exit code of pytest on the tests of `fault`, and its last line."""
    environment = os.environ | {
        "PYTHONPATH": str(copy / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",  # a fault of the same length in the same second would leave stale bytecode
        "OMP_NUM_THREADS": "1",
        "MEMOPT_AOT_CACHE": os.environ.get("MEMOPT_AOT_CACHE", str(ROOT / "build" / "aot")),
        "MEMOPT_DEVICE_CACHE": os.environ.get("MEMOPT_DEVICE_CACHE", str(ROOT / "build" / "device")),
    }
    if any(test.startswith(_INTERPRETED) for test in fault.tests):
        environment["TRITON_INTERPRET"] = "1"
    plugin = ["-p", "tests.device.emulator.plugin"] if any(t.startswith(_EMULATED) for t in fault.tests) else []
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-n", "0", *plugin, *fault.tests]
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return _FAILED, f"stopped after {_SECONDS} seconds"
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or [""]
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])
    return done.returncode, failed.partition(" - ")[0].removeprefix("FAILED ")


def _print(results: Sequence[tuple[int, Fault, Result]]) -> None:
    table = Table("", "fault", "outcome", "by", show_lines=False)
    for number, fault, result in results:
        table.add_row(str(number), fault.name, result.outcome, result.detail)
    Console(width=200).print(table)
    counts = {
        outcome: sum(result.outcome == outcome for _, _, result in results)
        for _, _, result in results
        for outcome in [result.outcome]
    }
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))


if __name__ == "__main__":
    sys.exit(main())
