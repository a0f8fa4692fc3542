"""Levels of blocks: what a step peaks at, and what it computes again for that, from exact rewrites to checkpointing.

    python -m benchmarks.levels [--case llama|bert] [--check] [--json FILE]

A plan is how many blocks have which level. From one point to the next, a quarter of the blocks more recompute the
output of one linear more (up, then gate; fc1), and then a quarter more are checkpointed: the first ones, whose backward
comes last. The setting is that of `python -m benchmarks.step`: bf16, full tuning, fake tensors, the kernels of a CUDA
device. Kept is what lives between forward and backward. Work is the FLOPs of a step beyond the stock model's, as a part
of its forward. `--check` exits 1 where a model has fewer than 12 points, or memory or work is not monotone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import flop_registry

import memopt
from benchmarks.measure import EXIT_OK, EXIT_SHORT, document, write_json
from benchmarks.step import CASES, MIB, Case, faked, trained_model
from memopt.patches.linear.decide import output_levels
from memopt.torch_compat import FakeTensorMode, TorchDispatchMode, run_backward
from memopt.trace.fake import make_fake
from memopt.trace.timeline import record
from memopt.trace.trace import activations

RECIPE = "exact-unfolded"
CHOSEN = {"llama": "Llama-1B shape, 1 x 4096", "bert": "BERT-large shape, masked LM, 8 x 512"}
LEAST_POINTS, PARTS = 12, 4
#: Names of a block whose output is recomputed: the levels between exact and checkpointed.
LINEARS = 2


@dataclass(frozen=True)
class Level:
    """One plan: how many blocks recompute so many outputs of linears, and how many are checkpointed."""

    linears: tuple[int, ...]
    """Blocks that recompute at least one output, at least two, ..."""
    checkpointed: int

    def settings(self, blocks: Sequence[str], names: dict[str, list[str]]) -> tuple[str, ...]:
        """Keys of a recipe. A checkpointed block runs again as a whole, so none of its linears is named."""
        chosen = [
            block_names[place]
            for place, count in enumerate(self.linears)
            for block in blocks[self.checkpointed : max(count, self.checkpointed)]
            for block_names in [names.get(block, [])]
            if place < len(block_names)
        ]
        outputs = (f"linears.recompute=[{','.join(chosen)}]",) if chosen else ()
        return (*outputs, "checkpointing.method=count", f"checkpointing.count={self.checkpointed}")


@dataclass(frozen=True)
class Point:
    """A plan and what it costs, in bytes and FLOPs."""

    level: Level
    kept: int
    peak: int
    again: float
    """FLOPs beyond the stock step's, over those of its forward."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=CHOSEN, help="only this model")
    parser.add_argument("--check", action="store_true", help="exit 1 where the points are too few or not monotone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers with versions to FILE")
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    found: dict[str, list[Point]] = {}
    for case in CASES:
        if case.name in CHOSEN.values() and case.name == CHOSEN.get(arguments.case, case.name):
            found[case.name] = list(points(case))
            Console(width=None if sys.stdout.isatty() else 100).print(table(case.name, found[case.name]))
    if arguments.json:
        rows = [{"case": name, **asdict(point)} for name, its in found.items() for point in its]
        write_json(arguments.json, document([], "benchmarks.levels", dry_run=True, rows=rows))
    missed = [f"{name}: {line}" for name, its in found.items() for line in misses(its)]
    for line in missed:
        print(f"falls short: {line}", file=sys.stderr)
    return EXIT_SHORT if arguments.check and missed else EXIT_OK


def levels(blocks: int, linears: int, parts: int = PARTS) -> list[Level]:
    """Plans for a model of so many blocks, each in less memory and with more work than the one before."""
    counts = sorted({round(blocks * part / parts) for part in range(1, parts + 1)})
    path = [Level((0,) * linears, 0)]
    for place in range(linears):
        path += [Level((blocks,) * place + (count,) + (0,) * (linears - place - 1), 0) for count in counts]
    return path + [Level((blocks,) * linears, count) for count in counts]


def points(case: Case) -> Iterator[Point]:
    """Every plan of :func:`levels` for the model of `case`, measured."""
    recipe = memopt.load_recipe(RECIPE)
    with torch.device("meta"):
        model = case.model.from_config(case.config(), dtype=torch.bfloat16)
    plan = memopt.plan_for(model, memopt.load_recipe(RECIPE, ["linears.recompute=auto"]))
    names = {block: found[:LINEARS] for block, found in output_levels(plan).items()}
    forward, stock, _, _ = _measured(case, recipe, stock=True)
    for level in levels(len(plan.sites.blocks), max(map(len, names.values()), default=0)):
        chosen = memopt.load_recipe(RECIPE, level.settings(plan.sites.blocks, names))
        _, total, kept, peak = _measured(case, chosen)
        point = Point(level, kept, peak, (total - stock) / forward)
        print(f"{case.name}: {point}", file=sys.stderr, flush=True)
        yield point


def _measured(case: Case, recipe: memopt.Recipe, *, stock: bool = False) -> tuple[int, int, int, int]:
    """FLOPs of the forward and of the step, bytes kept, bytes at the peak."""
    torch.manual_seed(0)
    model = trained_model(case, "full", () if stock else ("memopt",), recipe=recipe, fake=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    make_fake(model, mode)
    flops, forward = _Flops(), [0]
    with faked(mode), flops:
        ids = torch.zeros(case.batch, case.seq, dtype=torch.long)

        def run() -> Any:
            output = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
            forward[0] = flops.total
            return output

        if stock:  # only its work is asked for
            run_backward(run().loss)
            return forward[0], flops.total, 0, 0
        found = activations(record(model, run))
    return forward[0], flops.total, found.kept, found.peak.nbytes


class _Flops(TorchDispatchMode):
    """Counts the FLOPs of products and attention. PyTorch's `FlopCounterMode` hooks every module, and hooked modules
    are called where patched ones are not."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result


def misses(found: Sequence[Point]) -> list[str]:
    """What is not as promised, a sentence each."""
    missed = [] if len(found) >= LEAST_POINTS else [f"{len(found)} points, at least {LEAST_POINTS} are promised"]
    for before, after in itertools.pairwise(found):
        for name in ("kept", "peak"):
            if getattr(after, name) > getattr(before, name):
                missed.append(f"{name} rises from {before} to {after}")
        if after.again < before.again:
            missed.append(f"work falls from {before} to {after}")
    return missed


def table(name: str, found: Sequence[Point]) -> Table:
    """A line for each plan."""
    result = Table(title=name, title_justify="left")
    for heading in ("outputs of linears recomputed, blocks", "checkpointed", "kept, MiB", "peak, MiB", "forward again"):
        result.add_column(heading, justify="right")
    for point in found:
        linears = " + ".join(str(max(0, count - point.level.checkpointed)) for count in point.level.linears)
        row = (linears, str(point.level.checkpointed), f"{point.kept / MIB:.0f}", f"{point.peak / MIB:.0f}")
        result.add_row(*row, f"{point.again:.0%}")
    return result


if __name__ == "__main__":
    raise SystemExit(main())
