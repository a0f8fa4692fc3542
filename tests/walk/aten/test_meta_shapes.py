"""Outputs on meta that are answered from memory are the ones that the operation would have made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memopt.walk.aten.meta_reads import MetaShapes
from memopt.walk.calls.parts import every_call
from memopt.walk.models.build import build_meta
from tests.walk.configs import make_config

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Counted:
    """An aten overload that counts how often it runs."""

    def __init__(self, function: Any) -> None:
        self.function, self._schema, self.runs = function, function._schema, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.function(*args, **kwargs)


def described(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.device)


def exact(value: Any) -> tuple[Any, ...]:
    """All that an argument on meta is, more than the cache asks for."""
    if isinstance(value, Tensor):
        return (type(value), *described(value), value.is_conj(), value.is_neg(), value.requires_grad)
    if isinstance(value, (list, tuple)):
        return (type(value), *map(exact, value))
    if isinstance(value, dict):
        return tuple((name, exact(part)) for name, part in value.items())
    return (type(value), repr(value))


def test_the_same_form_is_worked_out_once() -> None:
    shapes, mul = MetaShapes(), Counted(aten.mul.Tensor)
    first = shapes.call(mul, (meta(4, 3), meta(3)), {})
    second = shapes.call(mul, (meta(4, 3), meta(3)), {})
    assert mul.runs == 1
    assert described(first) == described(second)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


@pytest.mark.parametrize(
    ("function", "one", "other"),
    [
        (aten.add.Tensor, (meta(2, dtype=torch.int64), 1), (meta(2, dtype=torch.int64), 1.0)),
        (aten.add.Tensor, (meta(2, dtype=torch.bool), 1), (meta(2, dtype=torch.bool), True)),
        (aten.mul.Tensor, (meta(4, 3), meta(3)), (meta(4, 3).half(), meta(3).half())),
        (aten.clone.default, (meta(4, 3),), (meta(3, 4).t(),)),
        (aten.cat.default, ([meta(2, 3), meta(2, 3)],), ([meta(2, 3), meta(2, 3)], 1)),
    ],
)
def test_forms_that_differ_are_distinguished(function: Any, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    shapes = MetaShapes()
    for args in (one, other):
        shapes.call(function, args, {})
        assert described(shapes.call(function, args, {})) == described(function(*args))


def test_what_shares_memory_or_writes_is_run_each_time() -> None:
    shapes, tensor = MetaShapes(), meta(4, 3)
    for function, args in (
        (aten.transpose.int, (tensor, 0, 1)),
        (aten._unsafe_view.default, (tensor, [12])),  # its schema does not say that it is a view
        (aten.add_.Tensor, (tensor, 1)),
        (aten.split.Tensor, (tensor, 2)),
    ):
        counted = Counted(function)
        for _ in range(2):
            out = shapes.call(counted, args, {})
            assert (out[0] if isinstance(out, (list, tuple)) else out).untyped_storage()._cdata == (
                tensor.untyped_storage()._cdata
            )
        assert counted.runs == 2


def test_numbers_are_not_taken_for_forms() -> None:
    shapes, ones = MetaShapes(), torch.ones(3)
    assert shapes.call(aten.add.Tensor, (ones, 1), {}).sum() == 6
    assert shapes.call(aten.add.Tensor, (ones + 1, 1), {}).sum() == 9


@pytest.mark.parametrize(
    "family", ["llama", "mixtral", pytest.param("qwen2_vl", marks=pytest.mark.slow), "swin", "t5", "whisper"]
)
@pytest.mark.rotates(2)
def test_whole_forwards_are_answered_rightly(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, compared, truths = MetaShapes.call, [], {}

    def checked(self: MetaShapes, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answer = call(self, function, args, kwargs)
        if isinstance(answer, Tensor) and not function._schema.is_mutable:
            # A call that is the same to the last detail is run once: layers repeat theirs.
            key = (function, exact((args, kwargs)))
            if key not in truths:
                truths[key] = described(function(*args, **kwargs))
            compared.append((described(answer), truths[key], str(function)))
        return answer

    monkeypatch.setattr(MetaShapes, "call", checked)
    assert every_call(build_meta(make_config(family)))
    assert len(compared) > 1000
    assert [entry for entry in compared if entry[0] != entry[1]] == []
