"""Memory against time of the planner's plans, beside other ways to save less for backward.

    python -m benchmarks.frontier [--case llama|bert|llama-8b|vit] [--check] [--json FILE]

Models are traced on fake tensors, in bf16: whole steps of full tuning with AdamW (fused), and LoRA for Llama-3-8B. For
the bytes of the device that each other way takes, the planner is asked for the fastest plan. The allocator's segments
are expandable, and a last one that is not full is left out of account.

Time is counted twice. `ms` is that of the cost model: FLOPs over the card's rate or bytes over its bandwidth, for each
traced operation. `products` is that of products and attention alone, as if everything else were fused away; the plan
beside it is the fastest by that count. Compiled blocks run operation by operation here, so `products` is the fair one.
`--check` exits 1 where another way is faster than the plan in as little memory, by either count; the stock model is
there to compare with, since a plan patches every block.

Selective checkpointing saves the results of products and attention (or of every second product, as torchtitan does) and
recomputes the rest. Compiled blocks are cut by PyTorch's partitioner at an activation_memory_budget. Both also get
memopt's loss where that is said, since the logits would hide everything else.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import transformers
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedConfig, PreTrainedModel

import memopt
from benchmarks.measure import EXIT_OK, EXIT_SHORT, document, write_json
from benchmarks.rivals import checkpoint_selectively, compile_blocks
from benchmarks.step import CASES as STEPS
from memopt.errors import NegativeVerdict
from memopt.plan.recipe import Recipe
from memopt.prediction.cards import find_card
from memopt.prediction.peak import combine
from memopt.prediction.planner.choice import Plan
from memopt.prediction.planner.levels import levels_of
from memopt.prediction.planner.plan import Task, choose
from memopt.prediction.setup import Setup
from memopt.trace.events import Trace
from memopt.trace.trace import subject, trace
from memopt.trace.tracer import Tracer
from memopt.trace.training import Step, Training
from memopt.walk.models.build import build_meta
from memopt.walk.observe import find_sites

CARD, GIB, STOCK = "a100-80gb", 1 << 30, "stock"
SETUP = Setup(expandable_segments=True)
#: What the allocator's two kinds of segments round up by, of a plan as of any other step.
ROUNDING = (20 + 2) << 20
#: Seconds; each part of a plan's time is rounded to nanoseconds, those of another way's as one sum.
TIES = 1e-7
EXACT, LOSS = memopt.load_recipe("exact-unfolded"), memopt.load_recipe(
    "exact-unfolded", ("norms.method=none", "gated_mlps.method=none", "activations.method=none")
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, by its config and the class that is built, and how it is trained."""

    name: str
    config: Callable[[], PreTrainedConfig]
    architecture: str
    training: Training


@dataclass(frozen=True)
class Way:
    """One way to save less."""

    name: str
    recipe: Recipe | None = None
    """None for the stock model."""
    switch: bool = False
    """Whether transformers' checkpointing is on."""
    prepare: Callable[[PreTrainedModel, Sequence[str]], None] = lambda model, blocks: None
    """What is done to the model, given the names of its blocks."""


@dataclass(frozen=True)
class Row:
    """One other way, and the fastest plans in as much memory."""

    case: str
    way: str
    total: int
    seconds: float
    products: float
    """Seconds of products and attention alone."""
    plan: str
    plan_total: int
    plan_seconds: float
    plan_products: float
    """The least of any plan in as much memory."""


def _every(n: int) -> Way:
    settings = ("checkpointing.method=every-n", f"checkpointing.n={n}")
    return Way(f"memopt, every {n} blocks checkpointed", memopt.load_recipe(EXACT, settings))


def _selective(model: PreTrainedModel, blocks: Sequence[str], *, every_second: bool = False) -> None:
    checkpoint_selectively(model, every_second)


WAYS = (
    Way(STOCK),
    Way("full checkpointing", switch=True),
    Way("full checkpointing, memopt inside", memopt.load_recipe(EXACT, ("checkpointing.method=full",))),
    *(_every(n) for n in (2, 4)),
    Way("selective checkpointing", prepare=_selective),
    Way("selective checkpointing, memopt's loss", LOSS, prepare=_selective),
    Way("selective, every 2nd product, memopt's loss", LOSS, prepare=partial(_selective, every_second=True)),
    *(
        Way(f"blocks compiled, budget {budget}, memopt's loss", LOSS, prepare=partial(compile_blocks, budget=budget))
        for budget in (0.8, 0.5, 0.0)
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=CASES, help="only this model")
    parser.add_argument("--check", action="store_true", help="exit 1 where another way is faster in as little memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers with versions to FILE")
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    chosen = [arguments.case] if arguments.case else list(CASES)
    found = [row for name in chosen for row in rows(CASES[name])]
    Console(width=None if sys.stdout.isatty() else 160).print(table(found))
    if arguments.json:
        given = list(sys.argv[1:] if argv is None else argv)
        # JSON knows no infinity, the time of a plan that does not fit.
        listed = [{name: None if each == math.inf else each for name, each in asdict(row).items()} for row in found]
        content = document(given, "benchmarks.frontier", dry_run=True, rows=listed)
        write_json(arguments.json, {**content, "dry_run": False})
    missed = misses(found)
    for line in missed:
        print(f"falls short: {line}", file=sys.stderr)
    return EXIT_SHORT if arguments.check and missed else EXIT_OK


def rows(case: Case) -> Iterator[Row]:
    """A row for each of `WAYS`."""
    config = case.config()
    config.architectures = [case.architecture]
    for dropout in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    sites, card = find_sites(build_meta(config)), find_card(CARD)
    fused = replace(card, bandwidth=math.inf)

    def traced(recipe: Recipe, batch: int) -> Trace:
        return Tracer(Step(config, case.training, sites, recipe)).at(replace(case.training, batch=batch))

    task = Task(case.name, case.training, SETUP, card, levels_of(sites, EXACT), traced, splits=False)
    for way in WAYS:
        step = replace(case.training, checkpointing="full" if way.switch else "none")
        of = Step(config, step, sites, way.recipe)
        model = subject(of)
        way.prepare(model.built.model, blocks=sites.blocks)
        other = combine(trace(of, model), SETUP)
        seconds, products = (each.nanoseconds(other.trace.operations) / 1e9 for each in (card, fused))
        plan, of_products = (fastest(replace(task, card=each), other.total + ROUNDING) for each in (card, fused))
        row = Row(
            case.name,
            way.name,
            other.total,
            seconds,
            products,
            "none fits" if plan is None else plan.words,
            0 if plan is None else plan.total,
            math.inf if plan is None else plan.seconds,
            math.inf if of_products is None else of_products.seconds,
        )
        print(row, file=sys.stderr, flush=True)
        yield row


def fastest(task: Task, budget: int) -> Plan | None:
    """The fastest plan that takes `budget` bytes of the device at most."""
    try:
        return choose(task, budget).plan
    except NegativeVerdict:
        return None


def misses(found: Sequence[Row]) -> list[str]:
    """What is not as promised, a sentence each."""
    missed = []
    for row in (row for row in found if row.way != STOCK):
        for what, other, plan in (
            ("time", row.seconds, row.plan_seconds),
            ("products", row.products, row.plan_products),
        ):
            if plan > other + TIES or row.plan_total > row.total + ROUNDING:
                missed.append(f"{row.case}: {row.way}, {what}: {other:.4f} s, the plan in as much memory {plan:.4f} s")
    return missed


def table(found: Sequence[Row]) -> Table:
    """A line for each row."""
    result = Table(title=f"Plans beside other ways, times by the rates of {CARD}", title_justify="left")
    for heading in ("case", "way"):
        result.add_column(heading)
    for heading in ("GiB", "ms", "products", "plan, GiB", "ms", "products"):
        result.add_column(heading, justify="right")
    result.add_column("plan")
    for row in found:
        sizes = (f"{row.total / GIB:.2f}", f"{row.seconds * 1e3:.0f}", f"{row.products * 1e3:.0f}")
        of_plan = (f"{row.plan_total / GIB:.2f}", f"{row.plan_seconds * 1e3:.0f}", f"{row.plan_products * 1e3:.0f}")
        result.add_row(row.case, row.way, *sizes, *of_plan, row.plan)
    return result


def _config_of(name: str) -> Callable[[], PreTrainedConfig]:
    return next(case.config for case in STEPS if case.name.startswith(name))


def _vit_large() -> PreTrainedConfig:
    return transformers.ViTConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, num_labels=1000
    )


CASES = {
    "llama": Case("Llama-1B, 4 x 4096", _config_of("Llama-1B"), "LlamaForCausalLM", Training(4, 4096)),
    "bert": Case("BERT-large, 32 x 512", _config_of("BERT-large"), "BertForMaskedLM", Training(32, 512)),
    "llama-8b": Case(
        "Llama-3-8B, LoRA, 1 x 8192", _config_of("Llama-3-8B"), "LlamaForCausalLM", Training(1, 8192, train="lora")
    ),
    "vit": Case("ViT-L/16, 64 images", _vit_large, "ViTForImageClassification", Training(64, None)),
}


if __name__ == "__main__":
    raise SystemExit(main())
