"""The coverage table: every site, grouped by layer, in 80 columns, no name cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from memopt.plan.plan import Entry, Plan, coverage_totals
from memopt.plan.recipe import load_recipe
from memopt.reporting.terminal import coverage_table
from memopt.walk.sites import Sites

LONG = "model.language_model.layers.0.post_feedforward_layernorm"


def render(*entries: Entry, width: int = 80, verbose: bool = False) -> str:
    plan = plan_of(*entries)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(coverage_table(plan, verbose=verbose))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def plan_of(*entries: Entry) -> Plan:
    return Plan(load_recipe("exact"), Sites("M", "m"), entries)


def norms(*indices: int, action: str = "fold") -> list[Entry]:
    return [Entry("norm", f"model.layers.{i}.norm", action, f"into model.layers.{i}.q.weight") for i in indices]  # type: ignore[arg-type]


def test_layers_that_differ_by_their_number_are_one_row() -> None:
    text = render(*norms(*range(30)))
    assert text.count("model.layers") == 1
    assert "model.layers.0..29.norm" in text
    assert " 30 " in text


@pytest.mark.parametrize(
    ("indices", "shown"),
    [((0, 1, 2), "0..2"), ((0, 2, 4), "{0,2,4}"), ((0, 5, 6, 7), "{0,5..7}"), ((3,), "3"), ((1, 0), "0..1")],
)
def test_numbers_are_shown_as_ranges(indices: tuple[int, ...], shown: str) -> None:
    assert f"model.layers.{shown}.norm" in render(*norms(*indices))


def test_sites_with_another_action_are_another_row() -> None:
    text = render(*norms(0, 1), *norms(2, action="share"))
    assert "model.layers.0..1.norm" in text
    assert "model.layers.2.norm" in text


def test_sites_with_another_reason_are_another_row() -> None:
    other = Entry("norm", "model.layers.1.norm", "fold", "into model.layers.1.k.weight")
    assert render(*norms(0), other).count("model.layers") == 2


def test_experts_are_grouped_over_both_numbers() -> None:
    entries = [Entry("linear", f"layers.{i}.experts.{j}.w", "keep", "exact") for i in range(2) for j in range(8)]
    assert "layers.0..1.experts.0..7.w" in render(*entries)


def test_reasons_name_the_block_once() -> None:
    assert "into q.weight" in render(*norms(0))


def test_verbose_has_one_row_a_site() -> None:
    text = render(*norms(*range(5)), verbose=True)
    assert all(f"model.layers.{i}.norm" in text for i in range(5))


@pytest.mark.parametrize("width", [80, 100, 200])
def test_names_fit_80_columns_whole(width: int) -> None:
    text = render(Entry("activation", LONG, "recompute", "because " * 30), width=width)
    assert LONG in text.replace("\n", "").replace(" ", "")
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= width


def test_a_name_wider_than_the_column_continues_on_the_next_line() -> None:
    assert render(Entry("norm", "z" * 90, "keep", "x")).count("z") == 90


def test_the_site_of_the_whole_model_has_a_name() -> None:
    assert "(the model)" in render(Entry("activation", "", "keep", "x"))


def test_totals_account_for_every_site() -> None:
    plan = plan_of(*norms(0, 1), *norms(2, action="share"), Entry("gated_mlp", "m", "recompute", ""),
                   Entry("linear", "w", "keep", ""))  # fmt: skip
    assert coverage_totals(plan) == [
        "3 norms: 2 folded, 1 shared",
        "1 gated MLP: 1 recomputed",
        "1 linear: 1 left",
    ]
