"""Every candidate of the table of launch configurations, timed on the GPU at hand beside the shipped one.

    python -m benchmarks.tuning --json FILE   print what is faster; FILE is continued where an earlier run stopped
    python -m benchmarks.tuning --minutes 7   start no further entry after so many minutes (default 7.5)
    python -m benchmarks.tuning --dry-run     a few entries on tiny tensors; the numbers mean nothing

An entry is a kernel, the bits of an element and a length of rows (`tools.kernels.tune`), the most important
first: 16 bits, long rows. Times are medians with a cold cache, of the kernel's heaviest variants added up. A table made
from timings is written by ``python -m tools.kernels.tune --measure --out FILE`` (about fifteen minutes).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import (
    DRY_RUN,
    EXIT_CANNOT_RUN,
    EXIT_OK,
    NO_GPU,
    Result,
    Stopwatch,
    Timing,
    breaks_the_device,
    device_of,
    document,
    sentence,
)
from memopt.kernels.base.device import INTERPRETED
from memopt.kernels.base.launch import LaunchConfig, launch_config, override

if TYPE_CHECKING:
    from tools.kernels.tune import TuningCase

MODULE = "benchmarks.tuning"
#: Bytes of one tensor: larger than any cache.
_BYTES = 2**28
_DRY_BYTES = 2**10
_DRY_ENTRIES, _DRY_LONGEST, _DRY_CANDIDATES = 6, 64, 2

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every entry, as it is measured")
    parser.add_argument("--minutes", type=float, default=7.5, help="start no further entry after so many (7.5)")
    parser.add_argument("--dry-run", action="store_true", help="a few entries on tiny tensors")
    arguments = parser.parse_args(argv)
    device = device_of(arguments.dry_run)
    if device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return EXIT_CANNOT_RUN
    if device == "cpu" and not INTERPRETED:
        print("Kernels run on a CPU in Triton's interpreter alone: TRITON_INTERPRET=1", file=sys.stderr)
        return EXIT_CANNOT_RUN
    content = document(sys.argv[1:] if argv is None else argv, MODULE, dry_run=arguments.dry_run)
    earlier = _earlier(arguments.json, content)
    result = Result(arguments.json, content)
    result.add(*earlier)
    left_out = _run(result, arguments.minutes, Stopwatch(device), device, dry_run=arguments.dry_run)
    rows = result.done(entries_left_out=left_out)["rows"]
    Console(width=None if sys.stdout.isatty() else 120).print(table(rows))
    if left_out:
        print(f"{left_out} entries were left out: --minutes {arguments.minutes:g} were over. Run it again to go on.")
    if arguments.dry_run:
        print(DRY_RUN)
    return EXIT_OK


def entries(*, dry_run: bool) -> list[TuningCase]:
    """What is timed, the most important first."""
    from tools.kernels.tune import cases

    found = sorted(cases(), key=lambda case: (case.bits != "16", -case.hidden))
    return [case for case in found if case.hidden <= _DRY_LONGEST][:_DRY_ENTRIES] if dry_run else found


def _run(result: Result, minutes: float, watch: Stopwatch, device: str, *, dry_run: bool) -> int:
    """Adds a row for each entry that has none; returns for how many there was no time."""
    done = {(row["kernel"], row["bits"], row["hidden"]) for row in result.content["rows"]}
    todo = [case for case in entries(dry_run=dry_run) if (case.kernel, case.bits, case.hidden) not in done]
    deadline = time.monotonic() + 60 * minutes
    for place, case in enumerate(todo):
        if time.monotonic() > deadline:
            return len(todo) - place
        print(f"{place + 1}/{len(todo)} {case.kernel}, {case.bits} bits, {case.hidden}", file=sys.stderr)
        row = measure(case, watch, device, dry_run=dry_run)
        result.add(row)
        if row.get("device_is_broken"):
            return len(todo) - place - 1
    return 0


def measure(case: TuningCase, watch: Stopwatch, device: str, *, dry_run: bool) -> Row:
    """Milliseconds of the shipped configuration and of every candidate; one that fails says why."""
    from tools.kernels.tune import candidates

    shipped = launch_config(case.kernel, case.hidden, case.dtype)
    configs = [shipped, *(each for each in candidates(case) if each != shipped)]
    row: Row = {"kernel": case.kernel, "bits": case.bits, "hidden": case.hidden, "shipped": astuple(shipped)}
    tried: list[Row] = []
    for config in configs[: _DRY_CANDIDATES if dry_run else None]:
        one: Row = asdict(config)
        try:
            one["ms"] = _milliseconds(case, config, watch, device, _DRY_BYTES if dry_run else _BYTES)
        except Exception as failure:  # a candidate that cannot be launched leaves the others
            one["error"] = sentence(failure)
            if breaks_the_device(failure):
                row["device_is_broken"] = True
                tried.append(one)
                break
        tried.append(one)
    timed = [one for one in tried if "ms" in one]
    if timed:
        best = min(timed, key=lambda one: one["ms"])
        row |= {"best": [best["rows"], best["block"], best["num_warps"]], "best_ms": best["ms"]}
        if "ms" in tried[0]:
            row |= {"shipped_ms": tried[0]["ms"], "gain": tried[0]["ms"] / best["ms"]}
    return {**row, "tried": tried}


def _milliseconds(case: TuningCase, config: LaunchConfig, watch: Stopwatch, device: str, nbytes: int) -> float:
    from tools.kernels.launches import VARIANTS, CallShape

    rows = max(1, nbytes // (case.hidden * case.dtype.itemsize))
    total = 0.0
    for variant in VARIANTS:
        if variant.kernel == case.kernel and variant.heaviest:
            call = variant.prepare(CallShape(rows, case.hidden, case.dtype, device))
            with override(case.kernel, config):
                total += Timing.of(watch.samples(call)).median
    return total


def _earlier(path: Path | None, content: dict[str, Any]) -> list[Row]:
    """Entries that an earlier run on the same device and versions has measured."""
    if path is None or not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return []
    same = all(found.get(key) == content[key] for key in ("device", "versions", "dry_run"))
    going_on = same and (not found.get("complete") or found.get("entries_left_out"))
    return [row for row in found["rows"] if not row.get("device_is_broken")] if going_on else []


def table(rows: Sequence[Row]) -> Table:
    """A line for each entry; configurations are rows x block, warps."""
    result = Table(title="Launch configurations, shipped and fastest", title_justify="left")
    for name in ("kernel", "bits", "row", "shipped", "ms", "fastest", "ms", "gain"):
        result.add_column(name, justify="left" if name == "kernel" else "right", no_wrap=True)
    for row in rows:
        shipped, best = (_words(row.get(key)) for key in ("shipped", "best"))
        times = (f"{row[key]:.4f}" if key in row else "-" for key in ("shipped_ms", "best_ms"))
        gain = f"{row['gain']:.2f}" if "gain" in row else "-"
        shipped_ms, best_ms = times
        result.add_row(row["kernel"], row["bits"], str(row["hidden"]), shipped, shipped_ms, best, best_ms, gain)
    return result


def _words(config: Sequence[int] | None) -> str:
    return "-" if config is None else f"{config[0]} x {config[1]}, {config[2]}"


if __name__ == "__main__":
    raise SystemExit(main())
