"""Time of the steps of a sampled linear's backward on a GPU, as ratios to the exact weight gradient.

    python -m benchmarks.sampled_kernels              print the table (a GPU is needed; about a minute)
    python -m benchmarks.sampled_kernels --dry-run    every step on a tiny shape; the numbers mean nothing
    python -m benchmarks.sampled_kernels --json FILE  also write the numbers with device and versions

`exact` is dy^T x over all rows, as the vendor's library computes it; everything else is a ratio to it, bf16, 30 % of
the rows. `norms`, `sample` and `gather` happen once a storage when its block is done; `dW` in backward. `dW, copied`
is the same estimate from a gathered and scaled copy of dy's rows with the vendor's matmul. `all` adds up the first
four.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measure import (
    DRY_RUN,
    EXIT_CANNOT_RUN,
    EXIT_OK,
    NO_GPU,
    Result,
    Stopwatch,
    Timing,
    device_of,
    document,
)
from memopt.kernels.sampled_linear.function import gather_rows, row_norms, sampled_weight_gradient
from memopt.kernels.sampled_linear.sampling import rows_kept, sample_rows

MODULE = "benchmarks.sampled_kernels"
BUDGET = 0.3
#: Tokens, inputs and outputs of the second linear of an MLP: ViT-B, BERT-large, T5-large, OPT-6.7B.
SHAPES = ((12608, 3072, 768), (16384, 4096, 1024), (12800, 4096, 1024), (4096, 16384, 4096))
TINY = ((96, 64, 32),)
STEPS = ("norms", "sample", "gather", "dW")


@dataclass(frozen=True)
class Row:
    """One shape: milliseconds of the exact gradient, and every step as a ratio to it."""

    tokens: int
    inputs: int
    outputs: int
    exact_ms: float
    ratios: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to FILE")
    arguments = parser.parse_args(argv)
    if not arguments.dry_run and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return EXIT_CANNOT_RUN
    device = device_of(arguments.dry_run)
    given = sys.argv[1:] if argv is None else argv
    result, rows = Result(arguments.json, document(given, MODULE, dry_run=arguments.dry_run)), []
    for shape in TINY if arguments.dry_run else SHAPES:
        rows.append(measure(*shape, device=device))
        result.add(asdict(rows[-1]))
    Console(width=None if sys.stdout.isatty() else 110).print(table(rows))
    result.done()
    if arguments.dry_run:
        print(DRY_RUN)
    return EXIT_OK


def measure(tokens: int, inputs: int, outputs: int, *, device: str) -> Row:
    """Every step of one shape."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(width: int) -> Tensor:
        return torch.randn(tokens, width, generator=generator, device=device).bfloat16()

    x, dy, k = draw(inputs), draw(outputs), rows_kept(tokens, BUDGET)
    scores = row_norms(x)
    rows, weights = sample_rows(scores, k, "systematic")
    kept = gather_rows(x, rows)
    calls: dict[str, Callable[[], object]] = {
        "norms": lambda: row_norms(x),
        "sample": lambda: sample_rows(scores, k, "systematic"),
        "gather": lambda: gather_rows(x, rows),
        "dW": lambda: sampled_weight_gradient(dy, kept, rows, weights),
        "dW, copied": lambda: (dy[rows.long()].float() * weights[:, None]).bfloat16().t() @ kept,
    }
    watch = Stopwatch(device)
    exact = Timing.of(watch.samples(lambda: dy.t() @ x)).median
    ratios = {name: Timing.of(watch.samples(call)).median / exact for name, call in calls.items()}
    return Row(tokens, inputs, outputs, exact, ratios | {"all": sum(ratios[step] for step in STEPS)})


def table(rows: Sequence[Row]) -> Table:
    """The rows for people."""
    result = Table(
        title=f"Steps of a sampled linear, {BUDGET:.0%} of the rows, over the exact dW", title_justify="left"
    )
    result.add_column("tokens x in x out", no_wrap=True)
    for name in ("exact ms", *rows[0].ratios):
        result.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ratios = (f"{ratio:.2f}" for ratio in row.ratios.values())
        result.add_row(f"{row.tokens} x {row.inputs} x {row.outputs}", f"{row.exact_ms:.3f}", *ratios)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
