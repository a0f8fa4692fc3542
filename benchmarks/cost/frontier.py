"""Memory against time of the planner's plans, beside checkpointing as it is switched on for a whole model.

    python -m benchmarks.frontier [--case llama|bert] [--check] [--json FILE]

The setting is that of `python -m benchmarks.step`: bf16, full tuning with AdamW, by traces on fake tensors. For the
bytes of the device that each way of checkpointing takes, by its traced step, the planner is asked for the fastest plan.
The allocator's segments are expandable, and a last one that is not full is left out of account. Seconds are those of
the cost model: FLOPs over the card's rate or bytes over its bandwidth, for each traced operation.
`--check` exits 1 where checkpointing is faster than the plan in as little memory.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import transformers
from rich.console import Console
from rich.table import Table

import memopt
from benchmarks.measure import EXIT_OK, EXIT_SHORT, document, write_json
from benchmarks.step import CASES, Case
from memopt.plan.recipe import Recipe
from memopt.prediction.cards import find_card
from memopt.prediction.peak import predict
from memopt.prediction.planner.cost import nanoseconds
from memopt.prediction.planner.levels import levels_of
from memopt.prediction.planner.plan import Task, choose
from memopt.prediction.setup import Setup
from memopt.prediction.trace import Trace, trace
from memopt.reporting.training import Training
from memopt.walk.models.build import build_meta
from memopt.walk.observe import find_sites

CHOSEN = {"llama": "Llama-1B shape, 1 x 4096", "bert": "BERT-large shape, masked LM, 8 x 512"}
CARD, GIB = "rtx4090", 1 << 30
SETUP = Setup(expandable_segments=True)
#: What the allocator's two kinds of segments round up by, of a plan as of any other step.
ROUNDING = (20 + 2) << 20
#: Name -> (recipe, or None for the stock model; settings; whether transformers' switch is on).
WAYS: dict[str, tuple[str | None, tuple[str, ...], bool]] = {
    "stock": (None, (), False),
    "stock, full checkpointing": (None, (), True),
    "memopt, full checkpointing": ("exact-unfolded", ("checkpointing.method=full",), False),
    "memopt, every 2nd block": ("exact-unfolded", ("checkpointing.method=every-n", "checkpointing.n=2"), False),
    "memopt, every 3rd block": ("exact-unfolded", ("checkpointing.method=every-n", "checkpointing.n=3"), False),
    "memopt, every 4th block": ("exact-unfolded", ("checkpointing.method=every-n", "checkpointing.n=4"), False),
}


@dataclass(frozen=True)
class Row:
    """One way to checkpoint, and the fastest plan in as much memory."""

    case: str
    way: str
    total: int
    seconds: float
    plan: str
    plan_total: int
    plan_seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=CHOSEN, help="only this model")
    parser.add_argument("--check", action="store_true", help="exit 1 where checkpointing is faster in as little memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers with versions to FILE")
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    found: list[Row] = []
    for case in CASES:
        if case.name in CHOSEN.values() and case.name == CHOSEN.get(arguments.case, case.name):
            found += rows(case)
    Console(width=None if sys.stdout.isatty() else 140).print(table(found))
    if arguments.json:
        content = document([], "benchmarks.frontier", dry_run=True, rows=[asdict(row) for row in found])
        write_json(arguments.json, content)
    missed = misses(found)
    for line in missed:
        print(f"falls short: {line}", file=sys.stderr)
    return EXIT_SHORT if arguments.check and missed else EXIT_OK


def rows(case: Case) -> Iterator[Row]:
    """A row for each of `WAYS`."""
    config = case.config()
    config.architectures = [case.model._model_mapping[type(config)].__name__]
    for dropout in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    training, card = Training(case.batch, case.seq), find_card(CARD)
    sites = find_sites(build_meta(config))

    def traced(recipe: Recipe, batch: int) -> Trace:
        return trace(config, replace(training, batch=batch), sites=sites, recipe=recipe)

    task = Task(case.name, training, SETUP, card, levels_of(sites, memopt.load_recipe("exact-unfolded")), traced)
    for way, (name, settings, switch) in WAYS.items():
        step = replace(training, checkpointing="full" if switch else "none")
        recipe = None if name is None else memopt.load_recipe(name, settings)
        other = predict(config, step, SETUP, sites=sites, recipe=recipe)
        plan = choose(task, other.total + ROUNDING).plan
        seconds = nanoseconds(other.trace.operations, card) / 1e9
        row = Row(case.name, way, other.total, seconds, plan.words, plan.total, plan.seconds)
        print(row, file=sys.stderr, flush=True)
        yield row


def misses(found: Sequence[Row]) -> list[str]:
    """What is not as promised, a sentence each."""
    return [
        f"{row.case}: {row.way} takes {row.seconds:.4f} s, the plan in as much memory {row.plan_seconds:.4f} s"
        for row in found
        if row.plan_seconds > row.seconds or row.plan_total > row.total + ROUNDING
    ]


def table(found: Sequence[Row]) -> Table:
    """A line for each row."""
    result = Table(title=f"Plans beside checkpointing, times by the rates of a {CARD}", title_justify="left")
    for heading in ("case", "way"):
        result.add_column(heading)
    for heading in ("GiB", "ms", "plan, GiB", "plan, ms"):
        result.add_column(heading, justify="right")
    result.add_column("plan")
    for row in found:
        sizes = (f"{row.total / GIB:.2f}", f"{row.seconds * 1e3:.0f}")
        of_plan = (f"{row.plan_total / GIB:.2f}", f"{row.plan_seconds * 1e3:.0f}")
        result.add_row(row.case.split(",")[0], row.way, *sizes, *of_plan, row.plan)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
