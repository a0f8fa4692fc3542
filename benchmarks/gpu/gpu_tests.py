"""A plugin of pytest that writes what tests found into a JSON file while they run: ``-p benchmarks.gpu_tests``.

With ``--results FILE`` the file holds device and versions, how many tests passed, failed and were skipped so far, every
failure with its last line, and the reasons of skips. `complete` is true once the run has ended by itself.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measure import EXIT_CANNOT_RUN, document, write_json

_SECONDS_BETWEEN_WRITES = 2.0
_SLOWEST = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, metavar="FILE", help="write what tests found into this JSON as they run")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--results")
    if path is None or hasattr(config, "workerinput"):  # pytest-xdist: the process that collects results writes them
        return
    if not torch.cuda.is_available():
        pytest.exit(f"These tests need a GPU; torch {torch.__version__} finds none.", EXIT_CANNOT_RUN)
    config.pluginmanager.register(Results(path), "memopt-results")


class Results:
    """What was found so far, and its file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content = document(sys.argv[1:], "pytest", dry_run=False)
        self._counts: Counter[str] = Counter()
        self._failures: list[dict[str, str]] = []
        self._skips: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._written = 0.0
        self._write(complete=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            # A test whose teardown fails too counts twice, like pytest's own summary.
            self._counts["failed" if report.when == "call" else "error"] += 1
            self._failures.append({"test": report.nodeid, "when": report.when or "", "message": _message(report)})
        elif report.skipped:
            self._counts["skipped"] += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._skips[reason.removeprefix("Skipped: ")] += 1
        elif report.when == "call":
            self._counts["passed"] += 1
        if time.monotonic() - self._written > _SECONDS_BETWEEN_WRITES:
            self._write(complete=False)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._counts["error"] += 1
            self._failures.append({"test": report.nodeid, "when": "collect", "message": _message(report)})

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._write(complete=exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED))

    def _write(self, *, complete: bool) -> None:
        slowest = sorted(self._seconds.items(), key=lambda item: -item[1])[:_SLOWEST]
        found: dict[str, Any] = {
            "complete": complete,
            "counts": dict(self._counts),
            "failures": self._failures,
            "skips": dict(self._skips),
            "slowest_seconds": {name: round(seconds, 2) for name, seconds in slowest},
        }
        write_json(self._path, self._content | found)
        self._written = time.monotonic()


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The line that says what went wrong: that of the exception, else the last one."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext.strip()
    lines = text.splitlines() or [""]
    return (lines[0] if crash is not None else lines[-1])[:500]
