"""What the compiler makes of the loop over a row's classes, and when it compiles again."""

from __future__ import annotations

import re

import pytest
import torch

from memopt.kernels.loss.function_triton import launch_gradient, launch_loss
from memopt.kernels.loss.reference import LossArguments
from memopt.kernels.tools.aot import TARGETS, capture


def test_the_loop_has_no_barrier_and_little_more_than_one_exponential_an_element() -> None:
    logits = torch.empty(512, 128256, dtype=torch.bfloat16, device="meta")
    target = torch.empty(512, dtype=torch.int64, device="meta")
    with capture("sm_90") as binaries:
        launch_loss(logits, target, logits[:, 0], LossArguments())
    (loop,) = re.findall(r"Loop Header.*?@%p\d+ bra", binaries[0].asm["ptx"], re.DOTALL)
    assert len(re.findall(r"ex2\.approx", loop)) == 8 + 1  # a vector of 8, and one to rescale the sum
    assert not re.search(r"bar\.|shfl", loop)


@pytest.mark.parametrize("target", TARGETS)
def test_another_number_of_rows_or_ignored_index_does_not_compile_again(target: str) -> None:
    with capture(target) as binaries:
        for rows, ignore_index in ((512, -100), (96, 0), (17, 1)):
            logits = torch.empty(rows, 32000, dtype=torch.bfloat16, device="meta")
            of_rows = torch.empty(rows, dtype=torch.int64, device="meta")
            numbers = torch.empty(rows, 2, device="meta")
            arguments = LossArguments(ignore_index=ignore_index)
            launch_loss(logits, of_rows, logits[:, 0], arguments)
            launch_gradient(logits, of_rows, numbers, numbers[:, 0], arguments, logits)
    assert len({id(binary.asm) for binary in binaries}) == 2
