"""No kernel moves more bytes than its row in benchmarks/results/kernel_bytes.json says."""

from __future__ import annotations

import json

import pytest

from benchmarks.kernel_bytes import RESULTS, cases, count
from tests.triton.conftest import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="bytes are counted in Triton's interpreter")

RECORDED = {row["case"]: row for row in json.loads(RESULTS.read_text())["kernels"]}


@pytest.mark.parametrize(
    ("variant", "hidden", "dtype"),
    [
        # Long rows take seconds.
        pytest.param(
            *case, marks=[pytest.mark.slow] if case[1] > 8192 and case[0].name == "rms" else [], id=str(case[0])
        )
        for case in cases()
    ],
)
def test_a_kernel_moves_what_its_row_says(variant, hidden, dtype):
    counted = count(variant, hidden, dtype)
    assert counted == RECORDED[counted["case"]]


def test_every_row_is_of_a_kernel() -> None:
    assert len(RECORDED) == len(cases())
