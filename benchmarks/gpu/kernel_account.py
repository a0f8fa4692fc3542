"""The account of every kernel, by arithmetic: bytes an element, registers, and warps on a multiprocessor. Needs no GPU.

    python -m benchmarks.kernel_account

prints the table of docs/kernels.md, from what `benchmarks.kernel_bytes` and `benchmarks.kernel_resources` recorded.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.kernel_bytes import RESULTS as BYTES
from tests.aot.cases import resident, rows
from tools.kernels.occupancy import LIMITS


def table() -> str:
    """Markdown: a line for each call whose bytes are counted."""
    launches: dict[str, list[dict[str, Any]]] = {}
    for row in rows():
        launches.setdefault(row["case"], []).append(row)
    columns = "call", "floor", "memory", "cache", "registers", "spilled", "warps"
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    for row in json.loads(BYTES.read_text())["kernels"]:
        taken = launches[row["case"]]
        bytes_moved = (f"{row[key]:g}" if row[key] else "" for key in ("floor", "memory", "cached"))
        registers, spilled = (
            _by_target(each[target][key] for each in taken for target in LIMITS) for key in ("registers", "spilled")
        )
        warps = _by_target(resident(each, target) for each in taken for target in LIMITS)
        lines.append("| " + " | ".join((row["case"], *bytes_moved, registers, spilled, warps)) + " |")
    return "\n".join(lines) + "\n"


def _by_target(numbers: Any) -> str:
    """Of each launch, the numbers of the targets."""
    every = list(numbers)
    parts = [every[start : start + len(LIMITS)] for start in range(0, len(every), len(LIMITS))]
    return "; ".join(str(part[0]) if len(set(part)) == 1 else ", ".join(map(str, part)) for part in parts)


if __name__ == "__main__":
    print(table(), end="")
