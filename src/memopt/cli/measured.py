"""`memopt report --measure`: real steps beside what is predicted of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memopt.cli import common

if TYPE_CHECKING:
    from memopt.prediction.measure import Comparison
    from memopt.prediction.setup import Setup
    from memopt.trace.training import Request


def show(request: Request, setup: Setup, *, json_output: bool) -> int:
    """Predict and run a step of the stock and of the patched model, and print both."""
    with common.only_results_on_stdout(), common.waiting("Running real steps"):
        from memopt.prediction.measure import check_measurable, compare
        from memopt.trace.subject import step_of

        check_measurable(setup)
        of = step_of(request)
        found = {"stock": compare(of.stock, setup), of.rules.name: compare(of, setup)}
    if json_output:
        from dataclasses import asdict

        rows = {name: asdict(each) for name, each in found.items()}
        words, name = f"{of.training}, {setup}", str(request.model)
        common.print_json(common.document("report", "pass", model={"id": name}, training=words, measured=rows))
    else:
        common.print_rich(f"{request.model}: {of.training}, {setup}")
        _print(found)
    return common.EXIT_OK


def _print(found: dict[str, Comparison]) -> None:
    from rich.table import Table

    device = next(iter(found.values())).measured.device
    table = Table(title=f"The second step on {device}, MiB", title_justify="left")
    for heading in ("", "peak in", "predicted", "measured", "off by"):
        table.add_column(heading, justify="left" if heading in ("", "peak in") else "right")
    for name, each in found.items():
        real = each.measured
        rows = [(name, each.moment, each.predicted, real.allocated)]
        if real.reserved is not None:
            rows.append(("  reserved", "", each.predicted_reserved, real.reserved))
        for title, moment, predicted, measured in rows:
            numbers = (f"{nbytes / 2**20:,.1f}" for nbytes in (predicted, measured))
            table.add_row(title, moment, *numbers, f"{predicted / measured - 1:+.2%}")
        table.add_row("  RSS", "", "", f"{real.rss / 2**20:,.1f}", "")
    what = "live storages" if device == "cpu" else "what its allocator gave"
    common.print_rich(table, f"Measured: {what}, with random weights. RSS: of the whole process.")
