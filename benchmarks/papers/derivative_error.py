"""Error of the coded derivatives of activations, under z ~ N(0, 1), through the real encoding and decoding.

    python -m benchmarks.derivative_error            print the table
    python -m benchmarks.derivative_error --check    and exit 1 where a number falls short of its target

`error` is RMS(coded - f') / RMS(f'), `cosine` that of the angle between the two, `max` the largest difference for
|z| <= 10. The means are integrals: z runs over a grid in fp32, weighted by the normal density; f' is in fp64. A step
from 0 to 1 at 0, which is what one bit can say, stands beside the codes.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from memopt.kernels.derivative_codes.codes import apply_code, derivative_code, encode
from memopt.kernels.derivative_codes.fit import KINDS
from memopt.kernels.derivative_codes.schemes import PUBLISHED, SCHEMES
from memopt.torch_compat.activations import ACTIVATIONS

RELU_STEP, PUBLISHED_SCHEME = "ReLU step", "published"
RANGE, POINTS = 10.0, 2**20 + 1

#: (kind, scheme) -> least and largest error, in percent.
TARGETS = {
    ("gelu_erf", PUBLISHED_SCHEME): (35.6, 35.8),
    ("gelu_erf", "2bit"): (0.0, 14.2),
    ("gelu_erf", "3bit"): (0.0, 8.7),
    ("gelu_erf", "4bit"): (0.0, 3.5),
    ("gelu_erf", "8bit"): (0.0, 0.22),
    ("silu", PUBLISHED_SCHEME): (47.0, 47.2),
    ("silu", "2bit"): (0.0, 14.9),
    ("silu", "3bit"): (0.0, 10.4),
    ("silu", "4bit"): (0.0, 3.8),
    ("silu", "8bit"): (0.0, 0.23),
}


@dataclass(frozen=True)
class Row:
    kind: str
    scheme: str
    bits: int
    error: float
    cosine: float
    largest: float


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit 1 where a number falls short of its target")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers with versions to FILE")
    arguments = parser.parse_args(argv)
    rows = [measure(kind, scheme) for kind in KINDS for scheme in (RELU_STEP, *schemes_of(kind))]
    lines = shortfalls(rows)
    Console(width=100 if not sys.stdout.isatty() else None).print(table(rows))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document(rows), indent=2) + "\n")
    for line in lines:
        print(f"falls short: {line}", file=sys.stderr)
    return 1 if arguments.check and lines else 0


def schemes_of(kind: str) -> tuple[str, ...]:
    return tuple(scheme for scheme in SCHEMES if scheme != PUBLISHED_SCHEME or kind in PUBLISHED)


def measure(kind: str, scheme: str) -> Row:
    z = torch.linspace(-RANGE, RANGE, POINTS, dtype=torch.float32)
    if scheme == RELU_STEP:
        return compare(kind, scheme, 1, z, (z > 0).double())
    code = derivative_code(kind, scheme)
    slope = apply_code(torch.ones_like(z), encode(z, code), code)
    return compare(kind, scheme, code.bits, z, slope.double())


def compare(kind: str, scheme: str, bits: int, z: Tensor, slope: Tensor) -> Row:
    """The row of a derivative that is `slope` at the points z."""
    z = z.double()
    truth = ACTIVATIONS[kind].gradient(torch.ones_like(z), z)
    weight = (-0.5 * z.square()).exp()
    difference, norm = slope - truth, (weight @ truth.square()).sqrt()
    error = (weight @ difference.square()).sqrt() / norm
    cosine = (weight @ (slope * truth)) / (norm * (weight @ slope.square()).sqrt())
    return Row(kind, scheme, bits, error.item(), cosine.item(), difference.abs().max().item())


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """One sentence for every number that is not within its target, and for every fit that the published code beats."""
    errors = {(row.kind, row.scheme): row.error for row in rows}
    lines = [f"{kind}, {scheme} was not measured" for kind, scheme in TARGETS if (kind, scheme) not in errors]
    for (kind, scheme), error in errors.items():
        least, most = TARGETS.get((kind, scheme), (0.0, 100.0))
        if not least <= 100 * error <= most:
            lines.append(f"{kind}, {scheme}: error {error:.2%}, target {least:g} to {most:g} %")
    for row in rows:
        published = errors.get((row.kind, PUBLISHED_SCHEME))
        fitted = row.scheme not in (PUBLISHED_SCHEME, RELU_STEP)
        if fitted and published is not None and not row.error < published:
            lines.append(f"{row.kind}, {row.scheme}: error {row.error:.2%}, the published code has {published:.2%}")
    return lines


def table(rows: Sequence[Row]) -> Table:
    """The rows as a table for people."""
    result = Table(title="Coded derivatives f'(z), z ~ N(0, 1)", title_justify="left")
    for column in ("activation", "code"):
        result.add_column(column, no_wrap=True)
    for column in ("bits", "error", "target", "cosine", "max"):
        result.add_column(column, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        result.add_row(
            row.kind,
            row.scheme,
            str(row.bits),
            f"{row.error:.2%}",
            _target(row),
            f"{row.cosine:.5f}",
            f"{row.largest:.4f}",
            style="bold red" if shortfalls_of(row, rows) else None,
            end_section=i + 1 < len(rows) and rows[i + 1].kind != row.kind,
        )
    return result


def shortfalls_of(row: Row, rows: Sequence[Row]) -> list[str]:
    return [line for line in shortfalls(rows) if line.startswith(f"{row.kind}, {row.scheme}:")]


def document(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows with what is needed to repeat them."""
    return {
        "command": "python -m benchmarks.derivative_error --check",
        "device": "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "setting": {"z": "N(0, 1)", "range": RANGE, "points": POINTS},
        "rows": [asdict(row) | {"passed": not shortfalls_of(row, rows)} for row in rows],
    }


def _target(row: Row) -> str:
    if (row.kind, row.scheme) not in TARGETS:
        return "-"
    least, most = TARGETS[row.kind, row.scheme]
    return f"{least:g} to {most:g} %" if least else f"<= {most:g} %"


if __name__ == "__main__":
    raise SystemExit(main())
