"""The account of the kernels in docs/kernels.md is what was recorded, and no kernel moves much more than its floor."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from benchmarks.kernel_account import table
from benchmarks.kernel_bytes import RESULTS

DOCS = Path(__file__).parents[2] / "docs" / "kernels.md"
#: A call that reads its input in more launches than one, where registers do not hold a row and its two sums: dy again
#: for dbias; or, where they hold no row, dy and x_hat again for both sums. In bytes of an element of the input.
AGAIN = {
    "norm_backward, layer, weight, bias: 4097 x bfloat16": 2,
    "norm_backward, layer, weight, bias: 16384 x bfloat16": 2,
    "norm_backward, rms, weight: 16384 x float32": 8,
    "norm_backward, layer, weight, bias: 16384 x float32": 8,
}


def test_the_table_of_the_documentation_is_what_was_recorded() -> None:
    assert table() in DOCS.read_text()


def test_what_is_moved_beyond_the_floor_is_named_here() -> None:
    moved = {row["case"]: row["memory"] - row["floor"] for row in json.loads(RESULTS.read_text())["kernels"]}
    assert {case: more for case, more in moved.items() if more} == AGAIN
