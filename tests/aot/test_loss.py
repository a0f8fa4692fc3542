"""What the compiler makes of the loop over a row's classes, and when it compiles again."""

from __future__ import annotations

import re

import pytest
import torch

from memopt.kernels.loss.function_triton import launch_gradient, launch_statistics
from memopt.kernels.loss.reference import RowFactors
from tests.aot.cases import BACKENDS
from tools.kernels.aot import capture


def test_the_loop_has_no_barrier_and_little_more_than_one_exponential_an_element() -> None:
    logits = torch.empty(512, 128256, dtype=torch.bfloat16, device="meta")
    with capture("sm_90") as binaries:
        launch_statistics(logits, torch.empty(512, 4, device="meta"), None, False)
    (loop,) = re.findall(r"Loop Header.*?@%p\d+ bra", binaries[0].asm["ptx"], re.DOTALL)
    vectors = len(re.findall(r"ld\.global\.v4", loop))
    assert vectors
    assert len(re.findall(r"ex2\.approx", loop)) == vectors * (8 + 1)  # one to rescale the lane's sum
    assert not re.search(r"bar\.|shfl", loop)


@pytest.mark.parametrize("target", BACKENDS)
def test_another_number_of_rows_or_columns_does_not_compile_again(target: str) -> None:
    with capture(target) as binaries:
        for rows, columns in ((512, 32000), (96, 128256), (17, 8192)):
            logits = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
            of_rows = torch.empty(rows, dtype=torch.int64, device="meta")
            numbers = torch.empty(rows, device="meta")
            launch_statistics(logits, torch.empty(rows, 4, device="meta"), None, False)
            launch_gradient(
                logits, of_rows, numbers[:, None].expand(rows, 2), RowFactors(numbers, None, 0.0), None, logits
            )
    assert len({id(binary.asm) for binary in binaries}) == 2
