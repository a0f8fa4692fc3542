"""`memopt report --html` and `--snapshot`: files that show the report. Options and writing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memopt.cli import common
from memopt.errors import ModelError, UsageError

if TYPE_CHECKING:
    from memopt.prediction.headline import Headline
    from memopt.prediction.planner.choice import Choice, Frontier
    from memopt.prediction.setup import Setup
    from memopt.reporting.compare import Comparison
    from memopt.trace.training import Request

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


@dataclass(frozen=True)
class Files:
    """What the options ask to be written beside what is printed."""

    html: Path | None = None
    snapshot: Path | None = None
    out: Path | None = None
    emit: Sequence[str] = ()
    force: bool = False
    """Whether files that are there are replaced."""

    def checked(self) -> Files:
        """With the drawings' paths resolved, before any work is done.

        Raises:
            OutputError: one cannot be written, or is there and `force` is false.
            UsageError: they are the same.
        """
        html = common.output_file(self.html, "--html", force=self.force)
        snapshot = common.output_file(self.snapshot, "--snapshot", force=self.force)
        if html is not None and html == snapshot:
            raise UsageError(f"--html and --snapshot name the same file, '{self.html}'.", "Name two.")
        return replace(self, html=html, snapshot=snapshot)

    @property
    def drawn(self) -> bool:
        """Whether there is a drawing among them."""
        return self.html is not None or self.snapshot is not None


def write_plan(planned: Choice | Frontier, request: Request, setup: Setup, files: Files) -> None:
    """The drawings of what the planner answered: a plan beside the stock model, or plans by memory and time."""
    if not files.drawn:
        return
    from memopt.pipeline import report_on
    from memopt.prediction.planner.choice import Choice

    if isinstance(planned, Choice):
        plan = planned.plan
        comparison = report_on(replace(request, recipe=plan.recipe, batch=plan.batch))
        setup = replace(setup, accumulation=plan.accumulation)
        write(comparison, setup, files, lines=list(planned.lines())[1:])
    else:
        write(report_on(request), setup, files, frontier=planned)


def write(
    comparison: Comparison,
    setup: Setup,
    files: Files,
    *,
    lines: Sequence[str] = (),
    headline: Headline | None = None,
    frontier: Frontier | None = None,
) -> None:
    """Predict the step and write the drawings that are asked for.

    Args:
        lines: sentences to put first on the page.
        headline: its lines and its table are put first.
        frontier: plans to draw there.

    Raises:
        ModelError: the step cannot be predicted, and a snapshot is asked for.
    """
    if not files.drawn:
        return
    from memopt.files import write_output
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
