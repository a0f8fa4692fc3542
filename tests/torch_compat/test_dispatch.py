"""Modes, fake tensors and function transforms: PyTorch's private names do what `memopt.torch_compat` says."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from memopt import torch_compat
from tests.torch_compat.leaves import leaf


class _Record(torch_compat.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_operators_with_their_schemas_and_none_under_no_dispatch() -> None:
    with _Record() as mode:
        x = torch.ones(2, 2).mul_(3)
        with torch_compat.no_dispatch():
            torch.ones(2)
    ones, mul = mode.seen
    assert torch_compat.is_operator(mul)
    assert not torch_compat.is_operator(torch.mul)
    assert torch_compat.operator_name(ones) == "ones"
    schema = torch_compat.operator_schema(mul)
    assert schema.name == "aten::mul_"
    assert schema.is_mutable
    assert [argument.name for argument in schema.arguments] == ["self", "other"]
    assert len(schema.returns) == 1
    assert x.sum() == 12


def test_a_mode_of_traces_sees_operators_without_code_of_the_compiler_between() -> None:
    callers: list[list[str]] = []

    class Mode(torch_compat.TracingMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            callers.append([frame.name for frame in traceback.extract_stack()])
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2)
    own = "test_a_mode_of_traces_sees_operators_without_code_of_the_compiler_between"
    assert callers[0][-2:] == [own, "__torch_dispatch__"]


def test_a_mode_that_is_entered_where_no_other_is_on_sees_operators_alone() -> None:
    with _Record() as outer, torch_compat.no_modes(), _Record() as inner:
        torch.ones(2)
    assert [torch_compat.operator_name(each) for each in inner.seen] == ["ones"]
    assert not outer.seen


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_function_mode_sees_nothing_under_no_torch_function() -> None:
    with _Functions() as mode:
        x = torch.ones(2)
        with torch_compat.no_torch_function():
            assert x.shape == torch.add(x, x).shape
    assert mode.seen == [torch.ones]


def test_rows_are_multiplied_by_groups_and_a_function_mode_sees_it() -> None:
    x, matrices = torch.randn(4, 8), torch.randn(2, 8, 16)
    with _Functions() as mode:
        y = torch.nn.functional.grouped_mm(x, matrices, offs=torch.tensor([1, 4], dtype=torch.int32))
    assert torch_compat.grouped_mm in mode.seen
    assert torch.allclose(y, torch.cat([x[:1] @ matrices[0], x[1:] @ matrices[1]]))


class _Views(_Record):
    """Hands out what `torch_compat.view_below_autograd` makes of each result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.result = super().__torch_dispatch__(func, types, args, kwargs)
        return torch_compat.view_below_autograd(self.result)


def test_a_view_made_below_autograd_is_the_result_of_an_operator_and_sees_changes_in_place() -> None:
    x = torch.ones(3, requires_grad=True)
    with _Views() as mode:
        y = x.exp()
    assert y is not mode.result
    assert y.data_ptr() == mode.result.data_ptr()
    y.detach().mul_(2)
    assert mode.result._version == y._version == 1
    assert mode.result.grad_fn is None
    assert y.grad_fn is not None


def test_fake_tensors_have_no_memory_and_can_be_left() -> None:
    with torch_compat.FakeTensorMode():
        fake = torch.empty(2**40)
        with torch_compat.unset_fake_temporarily():
            real = torch.ones(2)
    assert isinstance(fake, torch_compat.FakeTensor)
    assert type(fake) in torch_compat.PLAIN_TYPES
    assert type(real) is Tensor


def test_a_mode_sees_that_autograd_reads_the_device_of_a_fake_tensor() -> None:
    with torch_compat.FakeTensorMode():
        weight = leaf(2)
        with _Record() as mode:
            weight.view(1, 2)
    assert torch_compat.device_read in mode.seen


def test_a_wrapper_of_tensors_is_distinguished_from_a_tensor() -> None:
    wrapper = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert torch_compat.is_traceable_wrapper_subclass(wrapper)
    assert not torch_compat.is_traceable_wrapper_subclass(torch.ones(2))


def test_trees_are_mapped_and_listed() -> None:
    tree = {"a": [1, (2, 3)], "b": 4}
    assert torch_compat.tree_leaves(tree) == [1, 2, 3, 4]
    assert torch_compat.tree_map(lambda n: n + 1, tree) == {"a": [2, (3, 4)], "b": 5}


def test_a_function_transform_is_seen_and_its_tensors() -> None:
    seen: list[tuple[object, bool]] = []

    def function(x: Tensor) -> Tensor:
        seen.append((torch_compat.interpreter_stack(), torch_compat.is_transformed(x)))
        return x.sum()

    function(torch.ones(2))
    torch.func.grad(function)(torch.ones(2))
    assert seen[0] == (None, False)
    assert seen[1][0] is not None
    assert seen[1][1]


def test_batched_gradients_are_seen() -> None:
    seen: list[bool] = []
    x = leaf(2)
    y = x * 2
    y.register_hook(
        lambda gradient: seen.append(torch_compat.is_legacy_batched(gradient) or torch_compat.is_transformed(gradient))
    )
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y.sum(), x)
    assert seen == [True, False]


def test_a_forward_mode_level_is_seen() -> None:
    assert torch_compat.forward_mode_level() == -1
    with forward_ad.dual_level():
        assert torch_compat.forward_mode_level() == 0


def test_a_trace_is_seen() -> None:
    seen: list[object] = []

    def function(x: Tensor) -> Tensor:
        seen.extend((torch_compat.tracing_state(), torch_compat.proxy_mode()))
        return x + 1

    function(torch.ones(2))
    torch.jit.trace(function, torch.ones(2), check_trace=False)
    make_fx(function)(torch.ones(2))
    make_fx(function, pre_dispatch=True)(torch.ones(2))
    assert [each is not None for each in seen] == [False, False, True, False, False, True, False, True]


def test_a_fake_tensor_may_have_known_values_and_no_other_has() -> None:
    values = torch.arange(3)
    with torch_compat.FakeTensorMode():
        fake, unknown = torch.empty(3, dtype=torch.long), torch.empty(3)
    torch_compat.set_known_values(fake, values)
    assert torch_compat.known_values(fake) is values
    assert torch_compat.known_values(unknown) is None
    assert torch_compat.known_values(values) is None


def test_the_allowed_kernels_of_attention_are_listed_in_their_order() -> None:
    kernels = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    for each in (kernels, kernels[::-1], kernels[:1]):
        with sdpa_kernel(each, set_priority=True):
            assert torch_compat.kernels_of_attention(with_priority=True) == each
    assert len(torch_compat.kernels_of_attention(with_priority=True) or ()) > 2
