"""What a block keeps with adapters, autocast and dropouts: what counts as passed, and one row measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.adapter_bytes import CASES, Row, measure

PASSED = Row("a case", stock=26.63, copies=13.3, expected_stock=26.63, patched=11.9, live=11.9, limit=12.0)


@pytest.mark.parametrize(
    "row",
    [
        replace(PASSED, patched=12.1, live=12.1),  # over the limit
        replace(PASSED, live=12.5),  # something is alive that the account does not see
        replace(PASSED, stock=28.0),  # another stock model than the one that is known
    ],
)
def test_a_number_that_cannot_be_trusted_or_is_too_large_fails(row: Row) -> None:
    assert PASSED.passed
    assert not row.passed


@pytest.mark.slow
def test_a_bert_with_its_dropouts_keeps_what_one_without_does() -> None:
    (case,) = (case for case in CASES if "BERT" in case.name)
    assert measure(case).passed
    assert not measure(replace(case, changes=())).passed
