"""Hooks, casts and classes of modules: PyTorch's private names do what `memopt.torch_compat` says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils import parametrize

from memopt import torch_compat


def test_the_hooks_of_a_module_are_in_their_tables() -> None:
    module = nn.Linear(2, 2)
    assert not any(torch_compat.module_hooks(module))
    module.register_forward_hook(lambda *given: None)
    assert [len(table) for table in torch_compat.module_hooks(module)] == [1, 0, 0, 0]
    module.register_forward_pre_hook(lambda *given: None)
    module.register_full_backward_hook(lambda *given: None)
    module.register_full_backward_pre_hook(lambda *given: None)
    assert [len(table) for table in torch_compat.module_hooks(module)] == [1, 1, 1, 1]
    vars(module).update(torch_compat.no_forward_hooks())
    assert [len(table) for table in torch_compat.module_hooks(module)] == [0, 0, 1, 1]


def test_a_hook_for_all_modules_is_seen() -> None:
    assert not torch_compat.has_any_global_hook()
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    assert torch_compat.has_any_global_hook()
    handle.remove()


def test_a_tensor_without_memory_stands_for_others() -> None:
    class Stand(Tensor):
        @classmethod
        def __torch_dispatch__(cls, *given: Any) -> Any:
            raise AssertionError("nothing reads it")

    assert torch_compat.makes_wrappers
    stand = torch_compat.wrapper(Stand, torch.empty(3, 2).t(), torch.bfloat16, torch.device("cpu"))
    assert (type(stand), tuple(stand.shape), stand.stride(), stand.dtype) == (Stand, (2, 3), (1, 2), torch.bfloat16)


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "privateuseone"])
def test_autocast_is_seen_on_every_device(device: str) -> None:
    assert not torch_compat.any_autocast_enabled()
    torch.set_autocast_enabled(device, True)
    try:
        assert torch_compat.any_autocast_enabled()
    finally:
        torch.set_autocast_enabled(device, False)


def test_parametrizations_are_cached_where_somebody_said_so() -> None:
    assert not torch_compat.parametrizations_are_cached()
    with parametrize.cached():
        assert torch_compat.parametrizations_are_cached()


def test_dropouts_are_recognised_by_their_base_class() -> None:
    assert torch_compat.is_dropout(nn.Dropout())
    assert torch_compat.is_dropout(nn.Dropout2d())
    assert not torch_compat.is_dropout(nn.Linear(2, 2))


def test_a_compiled_module_shows_the_original() -> None:
    module = nn.Linear(2, 2)
    assert torch_compat.compiled_module(torch.compile(module)) is module
    assert torch_compat.compiled_module(module) is None


def test_hook_flags_tell_which_hooks_take_keyword_arguments() -> None:
    module = nn.Linear(2, 2)
    assert [*map(dict, torch_compat.hook_flags(module))] == [{}, {}]
    handle = module.register_forward_pre_hook(lambda module, given, named: None, with_kwargs=True)
    assert [*map(dict, torch_compat.hook_flags(module))] == [{}, {handle.id: True}]


def test_the_end_of_a_second_run_is_no_exception_for_the_function_that_runs() -> None:
    seen: list[str] = []

    def run(x: Tensor) -> Tensor:
        with torch_compat.stopping_unseen():
            try:
                return x.sin() * 2
            except Exception as error:
                seen.append(type(error).__name__)
                raise

    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach().cos())
    assert torch.equal(run(x.detach()), 2 * x.detach().sin())  # outside of checkpointing
    assert seen == []


def test_both_runs_of_a_checkpointed_function_are_one_call() -> None:
    seen: list[Any] = []

    def run(x: Tensor) -> Tensor:
        seen.append(torch_compat.checkpointed_call())
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    assert torch_compat.checkpointed_call() is None
    loss = sum(torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum() for _ in range(2))
    assert isinstance(loss, Tensor)
    loss.backward()
    assert sorted(is_second for _, is_second in seen) == [False, False, True, True]
    (one, _), (other, _) = seen[:2]
    assert one is not other
    assert {id(call) for call, _ in seen[2:]} == {id(one), id(other)}


def test_a_replica_is_seen_and_settled() -> None:
    settled: list[Any] = []

    class Own(nn.Linear):
        pass

    for name, each in torch_compat.replicating(nn.Linear, lambda *pair: settled.append(pair)).items():
        setattr(Own, name, each)
    module: Any = Own(2, 2)
    replica = module._replicate_for_data_parallel()
    assert settled == [(module, replica)]
    assert torch_compat.is_replica(replica)
    assert not torch_compat.is_replica(module)


def test_every_batch_norm_of_pytorch_is_known() -> None:
    base = nn.modules.batchnorm._BatchNorm
    of_torch = {each for each in vars(nn).values() if isinstance(each, type) and issubclass(each, base)}
    lazy = {each for each in of_torch if each.__name__.startswith("Lazy")}  # they become one of the others
    assert of_torch - lazy == set(torch_compat.BATCH_NORM_CLASSES)
