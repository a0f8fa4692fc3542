"""`memopt report --budget` and `--frontier`: the fastest plan that fits, and plans by memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from memopt.cli import common, drawings
from memopt.errors import OutputError, UsageError
from memopt.forks import forking

if TYPE_CHECKING:
    from memopt.prediction.planner.choice import Choice
    from memopt.prediction.setup import Setup
    from memopt.trace.training import Request

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
    typer.Option(
        "--out",
        metavar="FILE",
        help="Write the plan of --budget as a recipe; with --emit a folder.",
        show_default=False,
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace files that --out, --html and --snapshot name.")
]  # fmt: skip
AllowOption = Annotated[
    Allowed | None,
    typer.Option("--allow", help="Let --budget take recipes whose gradients have an error.", show_default=False),
]
FrontierOption = Annotated[bool, typer.Option("--frontier", help="Print plans by memory and time.")]


@dataclass(frozen=True)
class Question:
    """What the planner is asked: a plan for `budget`, or the frontier with its rates."""

    budget: str | None
    frontier: bool
    allow: Allowed | None

    @property
    def option(self) -> str | None:
        """The option that asks it; None where neither is given."""
        return "--budget" if self.budget is not None else "--frontier" if self.frontier else None

    def check(self, files: drawings.Files) -> None:
        """
        Raises:
            UsageError: an option is given that needs another one, or --emit names no engine.
        """
        is_plan = self.budget is not None and not self.frontier
        if files.emit:
            from memopt.emit.engines import check_kinds

            check_kinds(files.emit)
            if files.out is None or not is_plan:
                hint = "Give both, e.g. --budget 24GiB --out plan."
                raise UsageError("--emit writes the plan of --budget into the folder --out.", hint)
        if (files.out is not None or self.allow) and not is_plan:
            raise UsageError("--out and --allow are about the one plan of --budget.", "Give one, e.g. --budget 24GiB.")


def show(request: Request, setup: Setup, asked: Question, files: drawings.Files, *, json_output: bool) -> int:
    """Print and write what the planner answers."""
    file: Path | None
    if files.emit and files.out is not None:
        from memopt.emit.engines import files_named
        from memopt.files import check_output_folder

        _check_expressible(request, setup, files.emit)
        file = check_output_folder(files.out, files_named(files.emit), force=files.force)
    else:
        file = common.output_file(files.out, "--out", force=files.force)
    with common.only_results_on_stdout(), common.waiting("Tracing levels of the blocks"), forking():
        with common.importing():
            from memopt.prediction.planner.choice import Choice
            from memopt.prediction.planner.training import plan_training

        # Beside a frontier a budget is the card whose rates are taken.
        budget, card = (None, asked.budget) if asked.frontier else (asked.budget, None)
        allowed = () if asked.allow is None else (asked.allow,)
        chosen = plan_training(request, budget, card=card, setup=setup, allow=allowed)
        drawings.write_plan(chosen, request, setup, files)
    written: list[str] = []
    if file is not None and isinstance(chosen, Choice):
        written = _write(str(request.model), chosen, file, files.emit)
    if json_output:
        key = "plan" if isinstance(chosen, Choice) else "frontier"
        common.print_json(common.document("report", "pass", **{key: chosen.to_dict()}, written=written))
    else:
        common.say(*chosen.lines())
    return common.EXIT_OK


def _check_expressible(request: Request, setup: Setup, emit: Sequence[str]) -> None:
    """Refuse, before minutes of tracing, what a file of `emit` cannot express whatever the plan will be."""
    from memopt.emit.engines import files_of
    from memopt.emit.planned import planned_step
    from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, load_recipe
    from memopt.prediction.planner.choice import Choice, Plan

    model = str(request.model)
    plan = Plan(load_recipe(request.recipe or DEFAULT_MEMORY_RECIPE), "", 1, 1, 0, 0.0, 0.0)
    choice = Choice(model, "", "", 0, plan, step=request.training, setup=setup)
    files_of(planned_step(model, "", choice), emit)


def _write(model: str, chosen: Choice, out: Path, emit: Sequence[str]) -> list[str]:
    """Write the plan as the recipe `out`, or into the folder `out` with the files of the engines; the files."""
    from memopt.files import write_output
    from memopt.plan.recipe import dump_recipe

    recipe, files = out, {out.name: dump_recipe(chosen.plan.recipe).encode()}
    if emit:
        from memopt.emit.engines import RECIPE_FILE, files_of
        from memopt.emit.planned import planned_step

        recipe = out / RECIPE_FILE
        files, notes = files_of(planned_step(model, str(recipe), chosen), emit)
        for text in notes:
            common.note(f"note: {text}")
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"--out '{out}' cannot be made: {error.strerror}.", "Name another folder.") from error
    for name, content in files.items():
        write_output(recipe.with_name(name), content)
    written = [str(recipe.with_name(name)) for name in files]
    common.note(f"Wrote {', '.join(written)}")
    common.note(f"Use it with memopt.patch(model, '{recipe}')")
    return written
