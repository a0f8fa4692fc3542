"""Models that other tools partition: ZeRO-3's parameters (empty except while they are gathered), models that
transformers shards before it reads their weights, and forwards with hooks of accelerate's device maps."""

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


def is_partitioned(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a parameter of ZeRO-3."""
    return hasattr(tensor, "ds_id")


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """The shape of `tensor`, of a partitioned parameter that of the whole."""
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def gathered(module: nn.Module) -> AbstractContextManager[Any]:
    """Inside, the partitioned parameters of `module` are whole; every rank has to enter it for the same module."""
    parts = [p for p in module.parameters() if is_partitioned(p)]
    deepspeed: Any = sys.modules.get("deepspeed")
    return deepspeed.zero.GatheredParameters(parts) if parts and deepspeed else nullcontext()


def gathers_for_its_calls(module: nn.Module, hooks: Iterable[Any]) -> bool:
    """Whether the parameters of `module` are partitioned, and `hooks` are those alone by which ZeRO-3 gathers them."""
    ours = [str(getattr(hook, "__module__", "")).startswith("deepspeed.") for hook in hooks]
    return bool(ours) and all(ours) and all(map(is_partitioned, module.parameters()))


def fetch_before(node: Any) -> tuple[nn.Module, Callable[[torch.Tensor], None]] | None:
    """The module whose weights ZeRO-3 fetches when backward comes to `node`, and a hook of a tensor that does the same.

    None for any other node. ZeRO-3 passes each output of a module through such a node, which returns what it is given.
    """
    if type(node).__name__ != "PreBackwardFunctionForModuleBackward":
        return None
    module, fetch = getattr(node, "module", None), getattr(node, "pre_backward_function", None)
    return None if module is None or fetch is None else (module, lambda gradient: fetch(module))


@functools.cache
def _steps_of_optimizers() -> list[int]:
    """How many steps optimizers have made since this was first called."""
    count = [0]

    def stepped(*_: object) -> None:
        count[0] += 1

    register_optimizer_step_post_hook(stepped)
    return count


def version_of_partitioned() -> int:
    """Another number after an optimizer's step: ZeRO-3 writes its parameters where no version counter sees it."""
    return _steps_of_optimizers()[0]


@contextmanager
def hooks_lifted(model: nn.Module) -> Iterator[None]:
    """Inside, modules have the forwards that accelerate's hooks are around; afterwards the hooks are around those of
    the modules' classes then.

    Hooks that load weights for one call alone (offload to CPU or disk) stay: such modules keep their forward. So do
    those of a forward that somebody had put in place of the class's.
    """
    lifted = [each for each in model.modules() if _hooks_its_class(each) and not offloads(each)]
    forwards = [vars(each).pop("forward") for each in lifted]
    try:
        yield
    finally:
        for module, forward in zip(lifted, forwards, strict=True):
            module.__dict__.update(forward=forward, _old_forward=MethodType(type(module).forward, module))


def _hooks_its_class(module: nn.Module) -> bool:
    """Whether accelerate's hook on `module` is around the forward of the module's class."""
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


@contextmanager
def before_sharding(change: Callable[[nn.Module], object]) -> Iterator[None]:
    """Inside, `change` gets every model on meta that ``from_pretrained(distributed_config=...)`` is about to shard.

    What FSDP2 has sharded admits no other parameters, and each rank reads its shards alone. Without effect where
    transformers has no ``maybe_distribute_model``.
    """
    from transformers import PreTrainedModel

    name = "maybe_distribute_model"
    inherited: Any = getattr(PreTrainedModel, name, None)
    if inherited is None:
        yield
        return

    def changed(cls: type, model: nn.Module, distributed_config: Any, mesh: Any) -> Any:
        if mesh is not None:
            change(model)
        return inherited.__func__(cls, model, distributed_config, mesh)

    own = vars(PreTrainedModel).get(name)
    setattr(PreTrainedModel, name, classmethod(changed))
    try:
        yield
    finally:
        if own is None:
            delattr(PreTrainedModel, name)
        else:
            setattr(PreTrainedModel, name, own)
