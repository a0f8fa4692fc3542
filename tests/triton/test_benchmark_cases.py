"""The benchmark of the kernels calls every launcher, and what it times is right."""

from __future__ import annotations

import pytest

from benchmarks import kernels
from benchmarks.kernel_cases import OPS
from tests.triton.conftest import INTERPRETED


@pytest.mark.parametrize("name", OPS)
def test_every_direction_of_every_operator_is_right(name):
    rows = kernels.measure(kernels.Shape(name, 4, 32, "float32"), "memopt", dry_run=INTERPRETED)
    launched = {row["direction"] for row in rows if row["provider"] == "kernel"}
    assert launched == set(OPS[name].passes)
    assert [row["error"] for row in rows if row.get("error") is not None] == []
