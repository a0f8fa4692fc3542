"""Models that other tools partition: ZeRO-3's parameters (empty except while they are gathered), forwards with hooks of
accelerate's device maps, and forwards of transformers' tensor and expert parallel plans."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

_PARALLEL_PLANS = ("transformers.distributed.tensor_parallel", "transformers.distributed.expert_parallel")


def is_partitioned(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a parameter that ZeRO-3 partitions."""
    return hasattr(tensor, "ds_id")


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """The shape of `tensor`; for a partitioned parameter the shape of the whole parameter."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def gathered(module: nn.Module) -> AbstractContextManager[Any]:
    """Inside, the partitioned parameters of `module` are whole. All ranks must enter it for the same module."""
    parts = [p for p in module.parameters() if is_partitioned(p)]
    deepspeed: Any = sys.modules.get("deepspeed")
    return deepspeed.zero.GatheredParameters(parts) if parts and deepspeed else nullcontext()


def gathers_for_its_calls(module: nn.Module, hooks: Iterable[Any]) -> bool:
    """Whether all parameters of `module` are partitioned, and all `hooks` are hooks of ZeRO-3, which gather them."""
    ours = list(map(is_of_zero, hooks))
    return bool(ours) and all(ours) and all(map(is_partitioned, module.parameters()))


def is_of_zero(hook: Any) -> bool:
    """Whether `hook` is a hook of DeepSpeed."""
    return str(getattr(hook, "__module__", "")).startswith("deepspeed.")


def gather_at_once(module: nn.Module, at_once: bool = True) -> bool:
    """Let ZeRO-3 gather all weights of `module` by hooks of that module, with none on the modules inside; returns
    whether it did before. ``deepspeed.initialize`` reads this mark of a leaf module."""
    before = bool(vars(module).pop("_z3_leaf", False))
    if at_once:
        vars(module)["_z3_leaf"] = True
    return before


def fetch_before(node: Any) -> tuple[nn.Module, Callable[[torch.Tensor], None]] | None:
    """The module whose weights ZeRO-3 fetches when backward reaches `node`, and a tensor hook that fetches them too.
    None for any other node. ZeRO-3 passes each output of a module through such a node, which returns its input."""
    if type(node).__name__ != "PreBackwardFunctionForModuleBackward":
        return None
    module, fetch = getattr(node, "module", None), getattr(node, "pre_backward_function", None)
    return None if module is None or fetch is None else (module, lambda gradient: fetch(module))


@functools.cache
def _steps_of_optimizers() -> list[int]:
    """A list of one number: how many steps all optimizers have made since the first call of this function."""
    count = [0]

    def stepped(*_: object) -> None:
        count[0] += 1

    register_optimizer_step_post_hook(stepped)
    return count


def version_of_partitioned() -> int:
    """A number that each optimizer step changes: ZeRO-3 writes to its parameters without changing their versions."""
    return _steps_of_optimizers()[0]


@contextmanager
def hooks_lifted(model: nn.Module) -> Iterator[None]:
    """Inside, modules run the forwards inside accelerate's hooks. Afterwards these hooks wrap the forwards that the
    modules' classes have by then. Two kinds of hooks stay: hooks that load weights for one call (offload to CPU or
    disk), and hooks around a forward that replaced the class's forward."""
    lifted = [each for each in model.modules() if _hooks_its_class(each) and not offloads(each)]
    forwards = [vars(each).pop("forward") for each in lifted]
    try:
        yield
    finally:
        for module, forward in zip(lifted, forwards, strict=True):
            module.__dict__.update(forward=forward, _old_forward=MethodType(type(module).forward, module))


def _hooks_its_class(module: nn.Module) -> bool:
    """Whether accelerate's hook on `module` wraps the forward of the module's class."""
    inner = getattr(vars(module).get("_old_forward"), "__func__", None)
    return "forward" in vars(module) and inner is type(module).forward


def offloads(module: nn.Module) -> bool:
    """Whether accelerate loads the weights of `module` for each of its calls, from CPU memory or disk."""
    hook: Any = vars(module).get("_hf_hook")
    return any(getattr(each, "offload", False) for each in (hook, *getattr(hook, "hooks", ())))


def is_only_moved(module: nn.Module) -> bool:
    """Whether accelerate's hook on `module` moves its inputs and outputs to other devices, and does nothing else."""
    hook: Any = vars(module).get("_hf_hook")
    return type(hook).__name__ == "AlignDevicesHook" and not hook.offload and _hooks_its_class(module)


def is_parallel_forward(forward: object) -> bool:
    """Whether transformers' tensor or expert parallel plan made `forward`, which replaces a module's on the instance.
    It is bound to that module: on a copy of the module it runs the module itself, with sharded weights."""
    return getattr(forward, "__module__", None) in _PARALLEL_PLANS
