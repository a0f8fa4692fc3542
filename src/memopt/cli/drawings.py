"""`memopt report --html` and `--snapshot`: files that show the report. Options and writing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memopt.cli import common
from memopt.errors import ModelError, UsageError

if TYPE_CHECKING:
    from memopt.prediction.setup import Setup
    from memopt.reporting.compare import Comparison

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


def checked(html: Path | None, snapshot: Path | None, *, without: str | None = None) -> tuple[Path | None, Path | None]:
    """The two files, resolved, before any work is done; `without` is an option whose result is not drawn.

    Raises:
        OutputError: one cannot be written.
        UsageError: they are the same, or stand beside `without`.
    """
    given = "--html" if html is not None else "--snapshot" if snapshot is not None else None
    if without and given:
        raise UsageError(f"{without} and {given} cannot go together: its result is not drawn.", f"Leave out {given}.")
    files = common.output_file(html, "--html"), common.output_file(snapshot, "--snapshot")
    if files[0] is not None and files[0] == files[1]:
        raise UsageError(f"--html and --snapshot name the same file, '{html}'.", "Name two.")
    return files


def write(comparison: Comparison, setup: Setup, html: Path | None, snapshot: Path | None) -> None:
    """Predict the step and write the files that are asked for.

    Raises:
        ModelError: the step cannot be predicted, and a snapshot is asked for.
    """
    if html is None and snapshot is None:
        return
    from memopt.files import write_output
    from memopt.prediction.charts import chart, predictions
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
        scope = "All that the process allocates on the device is in it, weights and optimizer states included."
        text = page(comparison, charts=charts, scope=scope, notes=notes)
        write_output(html, text.encode())
        common.note(f"Wrote {html}")
    if snapshot is not None:
        write_output(snapshot, as_snapshot(*found))
        common.note(f"Wrote {snapshot}: open it at https://pytorch.org/memory_viz")
