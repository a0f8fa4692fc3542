"""`memopt report --budget` and `--frontier`: the fastest plan that fits, and plans by memory and time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from memopt.cli import common, drawings
from memopt.errors import UsageError

Allowed = Literal["approximate"]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="SIZE|CARD",
        help="Memory of the device, e.g. 24GiB: print the fastest exact plan that fits.",
        show_default=False,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write the plan of --budget as a recipe.", show_default=False),
]
AllowOption = Annotated[
    Allowed | None,
    typer.Option("--allow", help="Let --budget take recipes whose gradients have an error.", show_default=False),
]
FrontierOption = Annotated[bool, typer.Option("--frontier", help="Print plans by memory and time.")]


def asked(budget: str | None, frontier: bool, out: Path | None, allow: Allowed | None) -> bool:
    """Whether a plan or a frontier is asked for.

    Raises:
        UsageError: an option is given that needs another one.
    """
    if (out is not None or allow) and (budget is None or frontier):
        raise UsageError("--out and --allow are about the one plan of --budget.", "Give one, e.g. --budget 24GiB.")
    return budget is not None or frontier


def show(
    model: str,
    budget: str | None,
    frontier: bool,
    out: Path | None,
    allow: Allowed | None,
    step: dict[str, Any],
    html: Path | None = None,
    snapshot: Path | None = None,
    *,
    json_output: bool,
) -> int:
    """Print the plan for `budget`, or the frontier with its rates; `step` are arguments of `plan_training`."""
    file = common.output_file(out, "--out")
    allowed = () if allow is None else (allow,)
    with common.only_results_on_stdout(), common.waiting("Tracing levels of the blocks"):
        from memopt.prediction.planner.choice import Choice
        from memopt.prediction.planner.training import plan_training

        chosen = plan_training(
            model,
            None if frontier else budget,
            card=budget if frontier else None,
            allow=allowed,
            **step,
        )
        drawings.write_plan(chosen, model, step, html, snapshot)
    if file is not None and isinstance(chosen, Choice):
        from memopt.files import write_output
        from memopt.plan.recipe import dump_recipe

        write_output(file, dump_recipe(chosen.plan.recipe).encode())
        common.note(f"Wrote {file}; use it with memopt.patch(model, '{file}')")
    if json_output:
        key = "plan" if isinstance(chosen, Choice) else "frontier"
        common.print_json(common.document("report", "pass", **{key: chosen.to_dict()}))
    else:
        print(chosen)
    return common.EXIT_OK
