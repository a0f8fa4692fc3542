"""Steps of expressions: what they compute, and what they hold meanwhile."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor

from memopt.recompute.expression import VALUE, Beside, after, cast_to, step


def test_a_step_reads_the_value_and_tensors_beside_it() -> None:
    value, mask, other = torch.randn(3, 4), torch.rand(3, 4) > 0.5, torch.randn(1, 4)
    steps = [
        step(Tensor.mul, 2.0),
        (torch.where, (Beside(0), VALUE, -1.0), ()),
        (torch.cat, ((VALUE, Beside(1)),), (("dim", 0),)),
        cast_to(torch.float64),
    ]
    expected = torch.cat((torch.where(mask, value * 2.0, -1.0), other), dim=0).double()
    assert torch.equal(after(value, steps, [mask, other]), expected)


def test_equal_steps_are_one_key() -> None:
    assert len({step(Tensor.view, (2, 3)), step(Tensor.view, (2, 3)), step(Tensor.view, (3, 2))}) == 2
    assert len({cast_to(torch.float16), cast_to(torch.float16), cast_to(torch.bfloat16)}) == 2


def test_each_value_is_let_go_when_the_next_one_is_there() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def noted(value: Tensor) -> Tensor:
        result = value + 1
        alive.append(weakref.ref(result))
        return result

    gc.collect()
    gc.disable()  # what only the collector frees counts as held
    try:
        result = after(torch.zeros(3), [step(noted), step(noted), step(Tensor.add, 1)])
        assert [each() is None for each in alive] == [True, True]
    finally:
        gc.enable()
    assert torch.equal(result, torch.full((3,), 3.0))
