"""`memopt report --html` and `--snapshot`: files that show the report. Options and writing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memopt.cli import common
from memopt.errors import ModelError, UsageError

if TYPE_CHECKING:
    from memopt.prediction.planner.choice import Choice, Frontier
    from memopt.prediction.setup import Setup
    from memopt.reporting.compare import Comparison
    from memopt.reporting.headline import Headline
    from memopt.reporting.training import Request

HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write one HTML page with charts as well.", show_default=False),
]
SnapshotOption = Annotated[
    Path | None,
    typer.Option(
        "--snapshot",
        metavar="FILE",
        help="Write the step as a snapshot for pytorch.org/memory_viz: stock as device 0, patched as device 1.",
        show_default=False,
    ),
]


def checked(html: Path | None, snapshot: Path | None, *, force: bool) -> tuple[Path | None, Path | None]:
    """The two files, resolved, before any work is done.

    Raises:
        OutputError: one cannot be written, or is there and `force` is false.
        UsageError: they are the same.
    """
    named = (html, "--html"), (snapshot, "--snapshot")
    files = tuple(common.output_file(path, option, force=force) for path, option in named)
    if files[0] is not None and files[0] == files[1]:
        raise UsageError(f"--html and --snapshot name the same file, '{html}'.", "Name two.")
    return files[0], files[1]


def write_plan(
    planned: Choice | Frontier, request: Request, setup: Setup, html: Path | None, snapshot: Path | None
) -> None:
    """The files for what the planner answered: a plan beside the stock model, or plans by memory and time."""
    if html is None and snapshot is None:
        return
    from memopt.pipeline import report_on
    from memopt.prediction.planner.choice import Choice

    if isinstance(planned, Choice):
        plan = planned.plan
        comparison = report_on(dataclasses.replace(request, recipe=plan.recipe, batch=plan.batch))
        setup = dataclasses.replace(setup, accumulation=plan.accumulation)
        write(comparison, setup, html, snapshot, lines=list(planned.lines())[1:])
    else:
        write(report_on(request), setup, html, snapshot, frontier=planned)


def write(
    comparison: Comparison,
    setup: Setup,
    html: Path | None,
    snapshot: Path | None,
    *,
    lines: Sequence[str] = (),
    headline: Headline | None = None,
    frontier: Frontier | None = None,
) -> None:
    """Predict the step and write the files that are asked for.

    Args:
        lines: sentences to put first on the page.
        headline: its lines and its table are put first.
        frontier: plans to draw there.

    Raises:
        ModelError: the step cannot be predicted, and a snapshot is asked for.
    """
    if html is None and snapshot is None:
        return
    from memopt.files import write_output
    from memopt.prediction.charts import chart, drawn_frontier, predictions, ways_table
    from memopt.prediction.snapshot import snapshot as as_snapshot
    from memopt.reporting.html.page import page

    found, notes = [], []
    try:
        found = predictions(comparison, setup)
        notes = [sentence for each in found for sentence in each.assumptions]
    except ModelError as error:
        if snapshot is not None:
            raise
        notes = [f"Memory over the step: unknown. {error.message}"]
    if html is not None:
        charts = [chart(name, each) for name, each in zip(("stock", "patched"), found, strict=False)]
        plans = None if frontier is None else drawn_frontier(frontier)
        tables = []
        if headline is not None:
            lines = [f"{what}: {answer}" for what, answer in headline.lines()]
            tables = [ways_table(headline)]
            notes = [*headline.notes, *notes]
        text = page(comparison, charts=charts, notes=notes, lines=lines, tables=tables, frontier=plans)
        write_output(html, text.encode())
        common.note(f"Wrote {html}")
    if snapshot is not None:
        write_output(snapshot, as_snapshot(*found))
        common.note(f"Wrote {snapshot}: open it at https://pytorch.org/memory_viz")
