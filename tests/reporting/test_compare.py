"""Before and after as plain data: rows, kinds of blocks, parts, tables and JSON, from accounts made by hand."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from memopt.reporting.compare import UNSEEN, Comparison, compare_rows, comparison_tables, summary
from memopt.trace.account import Account, Part, SavedStorage
from memopt.trace.training import Training

UNIT = 2**20


def kept(cause: str, units: float, block: str = "layers.0", part: Part = "block", **changes: object) -> SavedStorage:
    fields = {"nbytes": int(units * UNIT), "dtype": "bfloat16", "shape": (512, 1024), "savers": ()}
    return SavedStorage(part=part, block=block, cause=cause, **{**fields, **changes})  # type: ignore[arg-type]


def comparison(
    before: list[SavedStorage], after: list[SavedStorage], blocks: tuple[str, ...] = ("layers.0",), **fields: int
) -> Comparison:
    return Comparison(
        model="acme/model",
        model_class="AcmeForCausalLM",
        recipe="exact-unfolded",
        training=Training(batch=1, seq=512),
        before=Account(tuple(before), blocks, unit=UNIT, **fields),
        after=Account(tuple(after), blocks, unit=UNIT),
        notes=("Traced without padding.",),
    )


def printed(report: Comparison, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for renderable in comparison_tables(report):
        console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_tensors_of_one_cause_dtype_and_shape_make_one_row() -> None:
    (row,) = compare_rows([kept("linear input", 1)] * 3, [kept("linear input", 1)])
    assert (row.before, row.after, row.count_before, row.count_after) == (3 * UNIT, UNIT, 3, 1)


def test_rows_follow_the_order_of_the_causes_and_then_the_size() -> None:
    rows = compare_rows([kept("other", 9), kept("gate", 1), kept("norm input", 1), kept("gate", 2, shape=(1,))], [])
    assert [(row.cause, row.before // UNIT) for row in rows] == [
        ("norm input", 1),
        ("gate", 2),
        ("gate", 1),
        ("other", 9),
    ]


def test_weight_copies_of_all_shapes_make_one_row() -> None:
    copies = [kept("weight copy", 1, shape=(512, 64)), kept("weight copy", 2, shape=(64, 512))]
    assert [(row.before // UNIT, row.count_before) for row in compare_rows(copies, [])] == [(3, 2)]


def test_blocks_that_keep_the_same_are_one_kind() -> None:
    blocks = ("layers.0", "layers.1", "layers.2")
    entries = [kept("gate", 1, "layers.0"), kept("gate", 2, "layers.1"), kept("gate", 2, "layers.2")]
    kinds = comparison(entries, entries, blocks).kinds()
    assert [(kind.blocks, kind.before // UNIT) for kind in kinds] == [(("layers.0",), 1), (("layers.1", "layers.2"), 2)]


def test_parts_and_unseen_bytes_add_up_to_the_total() -> None:
    entries = [kept("gate", 3), kept("other", 1, "", "embeddings"), kept("softmax/loss", 4, "", "head")]
    report = comparison(entries, entries[1:], unseen=7)
    assert sum(before for _, before, _ in report.parts()) == report.before.total
    assert (UNSEEN, 7, 0) in report.parts()
    assert report.change == pytest.approx(-3 / 8, abs=1e-4)


def test_the_summary_line_says_before_after_and_change() -> None:
    gib = 1024
    report = comparison([kept("gate", 26.6 * gib)], [kept("gate", 14.1 * gib)])
    assert summary(report) == "saved for backward: 26.6 GiB -> 14.1 GiB (-47 %)"


def test_a_part_that_saved_nothing_before_is_new() -> None:
    text = printed(comparison([kept("gate", 1)], [kept("gate", 1), kept("other", 1, "", "shared")]))
    assert re.search(r"held by several blocks +0 +\S+ +new", text)


def test_the_tables_fit_80_columns_and_cut_no_name_short() -> None:
    long = "base_model.model.vision_tower.encoder.stages.3.very_long_module_name_that_is_wider_than_a_column.layers.17"
    entries = [
        kept("activation intermediate", 12345.67, long, shape=(16, 128, 4096, 4096), dtype="float32"),
        kept("norm statistics", 0.001, long, shape=(16, 1)),
    ]
    text = printed(comparison(entries * 2, entries, (long,)))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    squeezed = text.replace("\n", "").replace(" ", "")
    assert long in squeezed
    assert "2 x fp32" in text
    assert "activation intermediate" in text


def test_small_tensors_are_summed_in_one_line_and_stay_in_the_total() -> None:
    entries = [kept("norm statistics", 0.001, shape=(512, 1)), kept("other", 0.002), kept("gate", 1)]
    report = comparison(entries, entries)
    assert "norm statistics" not in printed(report)
    assert "small tensors" in printed(report)
    assert report.kinds()[0].before == report.before.total


def test_the_report_says_what_it_counts_and_what_not() -> None:
    words = " ".join(printed(comparison([kept("gate", 1)], [])).split())
    assert "Counted: activations" in words
    assert "Not counted: weights, their gradients, optimizer states" in words
    assert "Traced without padding." in words


def test_the_json_document_has_bytes_as_integers_and_round_trips() -> None:
    entries = [kept("gate", 1.5), kept("softmax/loss", 4, "", "head")]
    data = comparison(entries, entries[1:]).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["summary"] == {"before": 5.5 * UNIT, "after": 4 * UNIT, "change": pytest.approx(-1.5 / 5.5)}
    assert isinstance(data["summary"]["before"], int)
    assert data["block_kinds"][0]["rows"][0]["before"] == {"bytes": 1.5 * UNIT, "tensors": 1}
    assert data["outside_blocks"][0]["cause"] == "softmax/loss"
