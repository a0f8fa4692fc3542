"""Registers, spilled registers and shared memory of every kernel, from binaries compiled ahead of time; needs no GPU.

    python -m benchmarks.kernel_resources            write benchmarks/results/kernel_resources.json
    python -m benchmarks.kernel_resources --check    exit 1 where that file is not what the kernels take now

Each line of the file is one kernel function as its launcher launches it for one size and dtype. The numbers depend on
the version of Triton, which stands in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton

from tests.aot.cases import Case, binaries, cases, named
from tools.kernels.aot import TARGETS
from tools.kernels.launches import VARIANTS

RESULTS = Path(__file__).parents[1] / "results" / "kernel_resources.json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernel_resources", description="Record what the compiled kernels take."
    )
    parser.add_argument("--check", action="store_true", help="compare with the recorded file instead of writing it")
    options = parser.parse_args(arguments)
    if not options.check:
        RESULTS.write_text(_render(_rows()))
        return 0
    recorded = json.loads(RESULTS.read_text())
    if recorded["triton"] != triton.__version__:
        print(f"{RESULTS.name} was recorded with Triton {recorded['triton']}, this is {triton.__version__}.")
        return 1
    return _compare(recorded["kernels"], _rows())


def _rows() -> list[dict[str, Any]]:
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        return [row for rows in pool.map(_rows_of_variant, range(len(VARIANTS))) for row in rows]


def _rows_of_variant(index: int) -> list[dict[str, Any]]:
    return [row for case in cases(VARIANTS[index]) for row in _rows_of_case(case)]


def _rows_of_case(case: Case) -> list[dict[str, Any]]:
    by_target = {target: binaries(case, target) for target in TARGETS}
    rows = []
    for launches in zip(*map(named, by_target.values()), strict=True):
        numbers = {
            binary.target: {
                "warps": binary.num_warps,
                "registers": binary.registers,
                "spilled": binary.spilled,
                "shared": binary.shared,
            }
            for _, binary in launches
        }
        rows.append({"case": str(case), "function": launches[0][0], **numbers})
    return rows


def _render(rows: list[dict[str, Any]]) -> str:
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    command = json.dumps("python -m benchmarks.kernel_resources")
    return f'{{\n  "command": {command},\n  "triton": "{triton.__version__}",\n  "kernels": [\n{lines}\n  ]\n}}\n'


def _compare(recorded: list[dict[str, Any]], now: list[dict[str, Any]]) -> int:
    before, after = ({(row["case"], row["function"]): row for row in rows} for rows in (recorded, now))
    different = [key for key in before | after if before.get(key) != after.get(key)]
    for case, function in different:
        print(
            f"{case}: {function}\n  recorded {before.get((case, function))}\n  now      {after.get((case, function))}"
        )
    print(f"{len(after)} kernels, {len(different)} differ from {RESULTS.name}.")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
