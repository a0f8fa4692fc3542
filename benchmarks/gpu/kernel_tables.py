"""What the rows of benchmarks/gpu/kernels.py say: tables for people, and which kernels fall short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

from benchmarks.kernel_cases import OPS

KERNEL, COPY = "kernel", "copy"
PROVIDERS = ("memopt", "eager", "compile", "liger")
#: tokens, hidden, dtype
CHECKED = (16384, 4096, "bfloat16")
REQUIRED_SHARE = 0.85


def shortfalls(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence for each kernel that fails at the checked shape."""
    lines = []
    medians = _medians(rows)
    for op in OPS.values():
        for direction in op.passes:
            key = (op.name, direction, *CHECKED)
            ours, copy = medians.get((*key, KERNEL)), medians.get((*key, COPY))
            if ours is None or copy is None:
                lines.append(f"{op.name} {direction} has no valid time")
            elif copy / ours < REQUIRED_SHARE:
                lines.append(
                    f"{op.name} {direction} reaches {100 * copy / ours:.0f} % of a copy's bandwidth, "
                    f"{100 * REQUIRED_SHARE:.0f} % are required"
                )
    return lines


def comparison(rows: Sequence[dict[str, Any]], size: tuple[int, int, str]) -> Table:
    """Every kernel at one size, and every provider's time relative to memopt's operator."""
    tokens, hidden, dtype = size
    result = Table(
        title=f"{tokens} tokens x {hidden}, {dtype}; eager, compile and liger: their time / memopt's",
        title_justify="left",
    )
    for column in ("operator", "direction"):
        result.add_column(column, no_wrap=True)
    for column in ("floor MB", "kernel us", "GB/s", "of copy", "memopt us", "eager", "compile", "liger"):
        result.add_column(column, justify="right", no_wrap=True)
    medians = _medians(rows)
    for op in OPS.values():
        for direction in op.passes:
            key = (op.name, direction, *size)
            times = {name: medians.get((*key, name)) for name in (KERNEL, COPY, *PROVIDERS)}
            nbytes = op.floor(direction, tokens, hidden, getattr(torch, dtype).itemsize)
            kernel, ours = times[KERNEL], times["memopt"]
            result.add_row(
                op.name,
                direction,
                f"{nbytes / 1e6:.1f}",
                _number(kernel and 1e3 * kernel, ".1f"),
                _number(kernel and nbytes / kernel / 1e6, ".0f"),
                _share(times[COPY], kernel),
                _number(ours and 1e3 * ours, ".1f"),
                *(_quotient(times[name], ours) for name in PROVIDERS[1:]),
            )
    return result


def sweep(rows: Sequence[dict[str, Any]]) -> Table:
    """Share of a copy's bandwidth of every kernel at every size."""
    medians = _medians(rows)
    sizes = sorted({key[2:5] for key in medians}, key=lambda size: (size[2], size[0], size[1]))
    result = Table(title="Share of a copy's bandwidth, by tokens x hidden (bf16; * fp32)", title_justify="left")
    result.add_column("operator", no_wrap=True)
    result.add_column("direction", no_wrap=True)
    for tokens, hidden, dtype in sizes:
        result.add_column(f"{tokens}\n{hidden}{'*' * (dtype == 'float32')}", justify="right", no_wrap=True)
    for op in OPS.values():
        for direction in op.passes:
            keys = [(op.name, direction, *size) for size in sizes]
            shares = [_share(medians.get((*key, COPY)), medians.get((*key, KERNEL))) for key in keys]
            result.add_row(op.name, direction, *shares)
    return result


def _medians(rows: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], float]:
    return {
        (row["op"], row["direction"], row["tokens"], row["hidden"], row["dtype"], row["provider"]): row["median"]
        for row in rows
        if "median" in row
    }


def _share(copy: float | None, kernel: float | None) -> str:
    return "-" if copy is None or kernel is None else f"{100 * copy / kernel:.0f}%"


def _quotient(theirs: float | None, ours: float | None) -> str:
    return "-" if theirs is None or ours is None else f"{theirs / ours:.2f}"


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
