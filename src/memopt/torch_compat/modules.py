"""Private names of `torch.nn.Module`, `torch.compile` and activation checkpointing."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.utils import checkpoint

from memopt.torch_compat.autograd import current_graph_task_id, top_saved_tensors_hooks
from memopt.torch_compat.lookup import find, is_found

#: PyTorch's classes of batch norms; their common base class is private.
BATCH_NORM_CLASSES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_CALL = nn.Module.__call__.__code__


def is_module_call(frame: FrameType) -> bool:
    """Whether `frame` runs a call of a module; the module is the frame's local variable ``self``."""
    return frame.f_code is _CALL


def modules_that_run() -> Iterator[nn.Module]:
    """The modules whose calls are running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_module_call(frame):
            yield frame.f_locals["self"]
        frame = frame.f_back


_WATCHED = "modules whose children may have hooks run their stock forward"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
for _name in _HOOKS:
    find(f"torch.nn.Module.{_name}", None, _WATCHED)

_FLAGS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")

for _name in _FLAGS:
    find(f"torch.nn.Module.{_name}", None, "hooks with keyword arguments that are removed before backward")

Tables = tuple[MutableMapping[int, Any], ...]


def _module_hooks(module: nn.Module) -> Tables:
    # `torch.compile` traces it, so it is plain Python.
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _unknown_hooks(module: nn.Module) -> Tables:
    return ({0: None},) * 4


module_hooks: Callable[[nn.Module], Tables] = (
    _module_hooks if all(is_found(f"torch.nn.Module.{name}") for name in _HOOKS) else _unknown_hooks
)
"""The hooks of one module: forward, forward-pre, backward, backward-pre; changing a table changes the module's.

The parent of a hooked module must call it, not bypass it. Without these names every module counts as hooked.
"""


def hook_flags(module: nn.Module) -> Tables:
    """Tables of the hooks that get keyword arguments, beside :func:`module_hooks`; () without these private names."""
    return tuple(vars(module)[name] for name in _FLAGS if name in vars(module))


def no_forward_hooks() -> dict[str, OrderedDict[int, Any]]:
    """Attributes for a copy of a module, so that it runs none of the original's forward hooks."""
    return {"_forward_hooks": OrderedDict(), "_forward_pre_hooks": OrderedDict()}


has_any_global_hook: Callable[[], Any] = find("torch.nn.modules.module._has_any_global_hook", lambda: True, _WATCHED)
"""Whether a hook is registered for all modules (``register_module_forward_hook`` and the like).

Without this name a global hook counts as registered.
"""


_DROPOUT = "torch.nn.modules.dropout._DropoutNd"
_dropout: Any = find(_DROPOUT, (nn.Dropout,), "dropouts other than nn.Dropout that are switched off are not listed")


def is_dropout(module: nn.Module) -> bool:
    """Whether a module is one of PyTorch's dropouts, which all have the base class ``_DropoutNd`` and a float ``p``."""
    return isinstance(module, _dropout)


find("torch.nn.utils.parametrize._cache_enabled", 0, "adapters of stacked experts save weights and adapters summed")


def parametrizations_are_cached() -> bool:
    """Whether all reads of a parametrised weight return the same tensor (``parametrize.cached()`` is active)."""
    return bool(getattr(parametrize, "_cache_enabled", 0))


def fsdp_leaves_gathered(module: nn.Module, hooks: Iterable[Any]) -> bool:
    """Whether `hooks` are FSDP2's, and leave the parameters of `module` whole from its forward until its backward:
    ``reshard_after_forward=False``. False if PyTorch lacks the private names that show this."""
    state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    resharded = any(getattr(group, "post_forward_mesh_info", group) is not None for group in groups)
    ours = all(map(_is_of_fsdp, hooks))
    return state is not None and None not in groups and ours and not resharded


def fsdp_takes_back(module: nn.Module) -> bool:
    """Whether `module` has hooks of FSDP2 that reshard its parameters at the end of its forward."""
    forward, forward_pre, *_ = module_hooks(module)
    found = [each for each in (*forward.values(), *forward_pre.values()) if _is_of_fsdp(each)]
    return bool(found) and not fsdp_leaves_gathered(module, found)


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


find("torch.nn.Module._replicate_for_data_parallel", None, "replicas of nn.DataParallel save as much as in stock")


def replicating(cls: type[nn.Module], settle: Callable[[nn.Module, nn.Module], None]) -> dict[str, Any]:
    """Attributes of a subclass of `cls`: ``settle(module, replica)`` gets each replica that `nn.DataParallel` makes."""

    def replicate(self: nn.Module) -> nn.Module:
        replica: nn.Module = cls._replicate_for_data_parallel(self)
        settle(self, replica)
        return replica

    return {"_replicate_for_data_parallel": replicate}


def is_replica(module: nn.Module) -> bool:
    """Whether `nn.DataParallel` made `module`, whose weights are no parameters but copies, for one call."""
    return bool(getattr(module, "_is_replica", False))


def compiled_module(module: object) -> object | None:
    """The module that `torch.compile` wrapped as `module`; None if it is not such a wrapper."""
    return getattr(module, "_orig_mod", None)


def is_checkpointed_region() -> bool:
    """Whether the running code will run again in backward, or is this second run: the innermost saved-tensor hook is
    checkpointing's, or this thread runs backward (reentrant checkpointing)."""
    return checkpointing_hook() is not None or current_graph_task_id() != -1


def checkpointing_hook() -> object | None:
    """The innermost saved-tensor hook outside of memopt's scopes if it is checkpointing's, else None. Each checkpointed
    region has its own hook."""
    top = top_saved_tensors_hooks(False)
    pack = None if top is None else getattr(top[0], "memopt_outer_pack", None) or top[0]
    return pack if getattr(pack, "__module__", None) == checkpoint.__name__ else None


_Call: Any = find(
    "torch.utils.checkpoint._CheckpointFrame", (), "logits that a checkpointed function reads are computed whole"
)


def checkpointed_call() -> tuple[Any, bool] | None:
    """The call of a checkpointed function that runs here, an object that both of its runs share, and whether this is
    the second run, in backward. None outside of such calls."""
    hook: Any = inspect.unwrap(checkpointing_hook())  # type: ignore[arg-type]
    for cell in getattr(hook, "__closure__", None) or ():
        content = cell.cell_contents
        is_second = isinstance(content, weakref.ref)
        call = content() if is_second else content
        if isinstance(call, _Call):
            return call, is_second
    return None


_Stop: Any = find(
    "torch.utils.checkpoint._StopRecomputationError",
    (),
    "checkpointed blocks whose code catches every error (`except Exception`) fail in backward",
)


class _Stopped(BaseException):
    """The end of a second run, on its way out of the model's code."""


@contextmanager
def stopping_unseen() -> Iterator[None]:
    """Checkpointing ends a second run by an exception, which it raises when the last tensor is saved that backward
    needs. Around the second run of a function: code that catches every `Exception` does not catch this one. Where code
    catches even it, the run ends at the next tensor that is saved, or where the function ends."""
    top = top_saved_tensors_hooks(False)
    if top is None or checkpointing_hook() is not top[0]:
        yield
        return
    pack, unpack = top
    is_stopped = False

    @functools.wraps(pack)
    def pack_or_stop(tensor: Tensor) -> Any:
        nonlocal is_stopped
        if is_stopped:
            raise _Stopped
        try:
            return pack(tensor)
        except _Stop as stop:
            is_stopped = True
            raise _Stopped from stop

    try:
        with saved_tensors_hooks(pack_or_stop, unpack):
            yield
    except (_Stopped, Exception):
        if not is_stopped:
            raise
    if is_stopped:
        raise _Stop  # a new one: the old one and `_Stopped` would hold each other, and their frames


def calls_of_checkpointing() -> int:
    """How many functions of PyTorch's activation checkpointing are running in this thread."""
    count, was_inside = 0, False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        is_inside = frame.f_globals.get("__name__") == checkpoint.__name__
        count += is_inside and not was_inside  # PyTorch 2.15 has two frames of a call, one in the other
        frame, was_inside = frame.f_back, is_inside
    return count


_modes: Callable[[], Any] = find(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    tuple,
    "selective checkpointing does not save the products of patched linears",
)


def is_selectively_checkpointed() -> bool:
    """Whether selective checkpointing chooses among the operators that run here."""
    return any(type(mode).__module__ == checkpoint.__name__ for mode in _modes())
