"""Patches many right checkpoints and verifies each: no check may fail or be skipped, and nothing may crash.

python -m tests.mutation.clean                 every checkpoint, and a summary; exit 1 where one is not clean
python -m tests.mutation.clean --slice 2/20    every twentieth from the second on
python -m tests.mutation.clean --only llama    those whose name contains this
python -m tests.mutation.clean --list          what they are; nothing is run
python -m tests.mutation.clean --json FILE     writes the results, for `python -m tests.mutation.table`
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from memopt.patches.checks import Check
from memopt.plan.shipped import shipped
from memopt.verification.run import verify
from tests.mutation.folders import Workshop, workshop
from tests.mutation.models import ARCHITECTURES, DTYPES, FAMILIES, KINDS, PRETRAINED, Checkpoint
from tests.mutation.options import add_options, choose, summary, write_json

SEEDS = (0, 1, 2)
#: Of the runs of every recipe.
WIDTHS = ("fp32", "bf16")


#: Outcomes that are as they should be: a check may warn, which is a pass with a reason.
GOOD = ("clean", "warned")


@dataclass(frozen=True)
class Case:
    """One right checkpoint, and the recipe that it is patched with."""

    checkpoint: Checkpoint
    recipe: str = "exact"

    def __str__(self) -> str:
        return f"{self.checkpoint} {self.recipe}"


@dataclass(frozen=True)
class Run:
    """What became of one case."""

    checkpoint: str
    recipe: str
    outcome: str
    """``clean``; ``warned``: a check did; ``ALARM``: a check failed; ``SKIPPED``: one was; ``NOISE``: a Python warning;
    ``CRASH``."""
    detail: str = ""
    seconds: float = 0.0
    """Of the processor."""


def cases() -> list[Case]:
    """All that is run: many checkpoints with the default recipe, then one of each family with every other one."""
    random = itertools.product(ARCHITECTURES, KINDS, SEEDS, DTYPES)
    pretrained = itertools.product(PRETRAINED, SEEDS, DTYPES)
    families = [Checkpoint(name, dtype) for name, dtype in itertools.product(FAMILIES, WIDTHS)]
    new = [each for each in families if each.architecture not in ARCHITECTURES]
    others = [recipe for recipe in shipped() if recipe != "exact"]
    return [
        *(Case(Checkpoint(name, dtype, kind, seed)) for name, kind, seed, dtype in random),
        *(Case(Checkpoint(name, dtype, "pretrained", seed)) for name, seed, dtype in pretrained),
        *map(Case, new),
        *itertools.starmap(Case, itertools.product(families, others)),
    ]


def run(case: Case, place: Workshop) -> Run:
    """Patch and verify one."""
    started = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        try:
            outcome, detail = _judged(verify(place.patched(case.checkpoint, case.recipe)).checks)
        except Exception as error:  # whatever it is, it is a finding
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
            outcome, detail = "CRASH", f"{type(error).__name__} at {where}: {error}".splitlines()[0]
        finally:
            place.forget()
    if caught and outcome in GOOD:
        outcome = "NOISE"
        detail = "; ".join(dict.fromkeys(str(warning.message).splitlines()[0] for warning in caught))
    return Run(str(case.checkpoint), case.recipe, outcome, detail, round(time.process_time() - started, 2))


def _judged(checks: Sequence[Check]) -> tuple[str, str]:
    for status, outcome in (("fail", "ALARM"), ("skip", "SKIPPED"), ("warn", "warned")):
        found = [check for check in checks if check.status == status]
        if found:
            return outcome, "; ".join(map(_said, found))
    return "clean", ""


def _said(check: Check) -> str:
    beyond = "" if check.value is None or check.threshold is None else f" {check.value:.3g} > {check.threshold:.3g}"
    return f"{check.id} of {check.subject}{beyond or ': ' + check.detail}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation.clean", description=(__doc__ or "").partition("\n")[0]
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    chosen = choose(cases(), options)
    if options.list:
        print(*chosen, sep="\n")
        return 0
    done = []
    with workshop() as place:
        for case in chosen:
            found = run(case, place)
            done.append(found)
            print(f"{found.outcome:8} {found.seconds:5.1f} s  {case}  {found.detail}".rstrip(), flush=True)
    families = len({each.checkpoint.architecture for each in chosen})
    recipes = len({each.recipe for each in chosen})
    print(f"{len(done)} runs over {families} architectures and {recipes} recipes: {summary(done)}")
    write_json(options, done)
    return 0 if {each.outcome for each in done} <= {*GOOD} else 1


if __name__ == "__main__":
    sys.exit(main())
