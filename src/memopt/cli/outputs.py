"""Files that `memopt report` writes: `--html`, `--snapshot`, and the plans of `--budget`, `--frontier`.

Options, and code that writes. The planner returns the fastest plan that fits, or plans by memory and time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from memopt.cli import common
from memopt.environment.forks import forking
from memopt.errors import ModelError, OutputError, UsageError
from memopt.prediction.cards import find_card

if TYPE_CHECKING:
    from memopt.plan.recipe import Recipe
    from memopt.prediction.headline import Headline
    from memopt.prediction.planner.choice import Choice, Frontier
    from memopt.prediction.setup import Setup
    from memopt.reporting.compare import Comparison
    from memopt.trace.training import Request

HtmlOption = Annotated[Path | None, common.optional("Write one HTML page with charts as well.", "FILE")]
SnapshotOption = Annotated[
    Path | None,
    common.optional(
        "Write the step as a snapshot for pytorch.org/memory_viz: stock as device 0, patched as device 1.", "FILE"
    ),
]
Allowed = Literal["approximate"]
BudgetOption = Annotated[
    str | None,
    common.optional("Memory of the device, e.g. 24GiB: print the fastest exact plan that fits.", "SIZE|CARD"),
]
OutOption = Annotated[
    Path | None, common.optional("Write the plan of --budget as a recipe; with --emit a folder.", "FILE")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace files that --out, --html and --snapshot name.")
]  # fmt: skip
AllowOption = Annotated[Allowed | None, common.optional("Let --budget take recipes whose gradients have an error.")]
FrontierOption = Annotated[bool, typer.Option("--frontier", help="Print plans by memory and time.")]


@dataclass(frozen=True)
class Outputs:
    """Options of `memopt report`: files to write, a budget for the planner, or the frontier."""

    html: Path | None
    snapshot: Path | None
    out: Path | None
    emit: Sequence[str]
    force: bool
    """Whether to replace existing files."""
    budget: str | None
    frontier: bool
    allow: Allowed | None

    @property
    def planner(self) -> str | None:
        """The given option that needs the planner; None if neither is given."""
        return "--budget" if self.budget is not None else "--frontier" if self.frontier else None

    def check_options(self, gpu: str | None) -> None:
        """Raise a UsageError if an option needs another one, or --emit names no engine; `gpu`: the card of --gpu."""
        is_plan = self.budget is not None and not self.frontier
        if self.emit:
            from memopt.emit import check_kinds

            check_kinds(self.emit)
            if self.out is None or not is_plan:
                hint = "Give both, e.g. --budget 24GiB --out plan."
                raise UsageError("--emit writes the plan of --budget into the folder --out.", hint)
        if self.frontier and self.budget is not None and gpu is not None:
            raise UsageError("--frontier needs one card, and --gpu and --budget both name one.", "Leave out --budget.")
        if self.frontier and self.budget is not None and not find_card(self.budget).is_named:
            hint = "Leave out one of them, or name a card, whose rates count."
            raise UsageError("--frontier has plans of every size, so a size in --budget has no effect.", hint)
        if (self.out is not None or self.allow) and not is_plan:
            raise UsageError("--out and --allow need the plan of --budget.", "Give one, e.g. --budget 24GiB.")

    def checked(self) -> Outputs:
        """These options with the paths of --html and --snapshot resolved, and checked before any work."""
        html = common.output_file(self.html, "--html", force=self.force)
        snapshot = common.output_file(self.snapshot, "--snapshot", force=self.force)
        if html is not None and html == snapshot:
            raise UsageError(f"--html and --snapshot name the same file, '{self.html}'.", "Name two.")
        return replace(self, html=html, snapshot=snapshot)

    @property
    def drawn(self) -> bool:
        """Whether --html or --snapshot is given."""
        return self.html is not None or self.snapshot is not None


def draw(
    comparison: Comparison,
    setup: Setup,
    files: Outputs,
    *,
    lines: Sequence[str] = (),
    headline: Headline | None = None,
    frontier: Frontier | None = None,
) -> None:
    """Predict the step and write the files of --html and --snapshot. The page begins with `lines`, or in their place
    with the lines and the table of `headline`, and has a chart of `frontier`. Raises a ModelError if the step cannot be
    predicted and --snapshot is given."""
    if not files.drawn:
        return
    from memopt.environment.files import write_output
    from memopt.reporting.charts import chart, drawn_frontier, predictions, ways_table
    from memopt.reporting.html.page import page
    from memopt.reporting.snapshot import snapshot

    found, notes = [], []
    try:
        found = predictions(comparison, setup)
        notes = [sentence for each in found for sentence in each.assumptions]
    except ModelError as error:
        if files.snapshot is not None:
            raise
        notes = [f"Memory over the step: unknown. {error.message}"]
    if files.html is not None:
        charts = [chart(name, each) for name, each in zip(("stock", "patched"), found, strict=False)]
        plans = None if frontier is None else drawn_frontier(frontier)
        tables = []
        if headline is not None:
            lines = [f"{what}: {answer}" for what, answer in headline.lines()]
            tables = [ways_table(headline)]
            notes = [*headline.notes, *notes]
        text = page(comparison, charts=charts, notes=notes, lines=lines, tables=tables, frontier=plans)
        write_output(files.html, text.encode())
        common.note(f"Wrote {files.html}")
    if files.snapshot is not None:
        write_output(files.snapshot, snapshot(*found))
        common.note(f"Wrote {files.snapshot}: open it at https://pytorch.org/memory_viz")


def show_plan(request: Request, setup: Setup, asked: Outputs, *, card: str | None = None, json_output: bool) -> int:
    """Run the planner, print its result, and write the files."""
    file: Path | None
    if asked.emit and asked.out is not None:
        from memopt.emit import files_named
        from memopt.environment.files import check_output_folder

        _check_expressible(request, setup, asked.emit)
        file = check_output_folder(asked.out, files_named(asked.emit), force=asked.force)
    else:
        file = common.output_file(asked.out, "--out", force=asked.force)
    with common.only_results_on_stdout(), common.waiting("Tracing levels of the blocks"), forking():
        with common.importing():
            from memopt.prediction.planner.choice import Choice
            from memopt.prediction.planner.training import plan_training

        # With --frontier, the budget only names the card whose rates are used.
        budget, card = (None, asked.budget if card is None else card) if asked.frontier else (asked.budget, card)
        allowed = () if asked.allow is None else (asked.allow,)
        chosen = plan_training(request, budget, card=card, setup=setup, allow=allowed)
        _draw_plan(chosen, request, setup, asked)
    if isinstance(chosen, Choice):
        _say_overridden(request, chosen.plan.recipe)
    written: list[str] = []
    if file is not None and isinstance(chosen, Choice):
        written = _write_plan(str(request.model), chosen, file, asked.emit)
    if json_output:
        key = "plan" if isinstance(chosen, Choice) else "frontier"
        common.print_json(common.document("report", "pass", **{key: chosen.to_dict()}, written=written))
    else:
        common.say(*chosen.lines())
    return common.EXIT_OK


def _check_expressible(request: Request, setup: Setup, emit: Sequence[str]) -> None:
    """Refuse, before minutes of tracing, a request that a file of `emit` cannot express with any plan."""
    from memopt.emit import files_of, planned_step
    from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, load_recipe
    from memopt.prediction.planner.choice import Choice, Plan

    model = str(request.model)
    plan = Plan(load_recipe(request.recipe or DEFAULT_MEMORY_RECIPE), "", 1, 1, 0, 0.0, 0.0)
    choice = Choice(model, "", "", 0, plan, step=request.training, setup=setup)
    files_of(planned_step(model, "", choice), emit)


def _say_overridden(request: Request, planned: Recipe) -> None:
    """Print a note for each key of --set to which the plan gives another value."""
    from memopt.prediction.subject import chosen_recipe

    given, changed = (recipe.model_dump(mode="json") for recipe in (chosen_recipe(request), planned))
    for key in dict.fromkeys(each.partition("=")[0] for each in request.overrides):
        section, _, name = key.partition(".")
        before, after = (recipe[section][name] if name else recipe[section] for recipe in (given, changed))
        if before != after:
            common.note(f"note: the plan has {key}={after}, in place of {before} from --set.")


def _write_plan(model: str, chosen: Choice, out: Path, emit: Sequence[str]) -> list[str]:
    """Write the plan as the recipe `out`, or with the engines' files into the folder `out`; returns the paths."""
    from memopt.environment.files import write_output
    from memopt.plan.recipe import dump_recipe

    plan, planned = chosen.plan, chosen.plan.recipe
    if plan.accumulation > 1:
        words = f"{planned.description}; {plan.accumulation} micro-batches of {plan.batch}"
        planned = planned.model_copy(update={"description": words})
    recipe, files = out, {out.name: dump_recipe(planned).encode()}
    if emit:
        from memopt.emit import RECIPE_FILE, files_of, planned_step

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


def _draw_plan(planned: Choice | Frontier, request: Request, setup: Setup, files: Outputs) -> None:
    """Write the files of --html and --snapshot for a plan compared with the stock model, or for the frontier."""
    if not files.drawn:
        return
    from memopt.pipeline import report_on
    from memopt.prediction.planner.choice import Choice

    if isinstance(planned, Choice):
        plan = planned.plan
        # The plan's recipe has the overrides already, except where the plan needs other values.
        comparison = report_on(replace(request, recipe=plan.recipe, overrides=(), batch=plan.batch), setup=setup)
        setup = replace(setup, accumulation=plan.accumulation)
        draw(comparison, setup, files, lines=list(planned.lines())[1:])
    else:
        draw(report_on(request, setup=setup), setup, files, frontier=planned)
