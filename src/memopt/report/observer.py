"""Sees every tensor that autograd saves, with the module and the operation that save it.

It observes only: what it hands back to autograd is the tensor itself (detached, since a tensor that is kept by its
own node would keep that node alive for ever).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from memopt.report.storages import storages
from memopt.saved.kept import alias_of
from memopt.saved.savers import APPLY
from memopt.torch_compat import is_operator, operator_schema, storage_id

_CHECKPOINT_MODULE = "torch.utils.checkpoint"
_SAMPLE_MODULE = "memopt.saved.sampled"
CHECKPOINT = "checkpoint"
"""Name of the operation that saves a checkpointed region's inputs."""
SAMPLE = "sample"
"""Name of the operation that keeps rows of a linear's input, their indices and their weights."""


@dataclass(frozen=True)
class Event:
    """One tensor saved by one operation."""

    module: str
    operation: str
    block: str
    blocks_entered: int
    """How many calls of blocks had begun."""
    differentiable: bool
    """Whether the tensor is part of the graph (an attention mask is not)."""


@dataclass(frozen=True)
class Saved:
    """A storage that autograd holds, with everyone who saved it, in order."""

    storage: torch.UntypedStorage
    events: tuple[Event, ...]


class SavedTensorObserver:
    """Context manager that follows which module and function run; `pack` and `unpack` are the saved-tensor hooks."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._blocks = frozenset(blocks)
        self._modules: list[str] = []
        self._functions = _FunctionNames()
        self._removable: list[Any] = []
        self._slots: list[tuple[weakref.ref[_Slot], Event]] = []
        self.blocks_entered = 0
        self.unit = 0
        """Bytes of the first block's input in the compute dtype."""
        self.pack = self._make_pack()

    def __enter__(self) -> SavedTensorObserver:
        self._removable = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._removable:
            hook.remove()

    def module(self) -> str:
        """Name of the innermost module that is running."""
        return self._modules[-1] if self._modules else ""

    def function(self) -> str:
        """Name of the function that Python called and that is still running."""
        return self._functions.current()

    def saved(self) -> list[Saved]:
        """What autograd still holds, in order of the first save."""
        held: dict[int, tuple[torch.UntypedStorage, list[Event]]] = {}
        for reference, event in self._slots:
            slot = reference()
            if slot is not None:
                for storage in storages([slot.tensor]):
                    held.setdefault(storage_id(storage), (storage, []))[1].append(event)
        return [Saved(storage, tuple(events)) for storage, events in held.values()]

    @staticmethod
    def unpack(slot: _Slot) -> Tensor:
        return slot.tensor

    def _make_pack(self) -> Callable[[Tensor], _Slot]:
        def pack(tensor: Tensor) -> _Slot:
            event = Event(
                module=self.module(),
                operation=self.function() or _saver(sys._getframe(1)),
                block=self._block(),
                blocks_entered=self.blocks_entered,
                differentiable=tensor.requires_grad,
            )
            slot = _Slot(alias_of(tensor))
            self._slots.append((weakref.ref(slot), event))
            return slot

        pack.memopt_observer = True  # type: ignore[attr-defined]
        return pack

    def _block(self) -> str:
        """The innermost block that is running."""
        return next((name for name in reversed(self._modules) if name in self._blocks), "")

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        self._modules.append(self.module() if name is None else name)
        if name in self._blocks:
            self.blocks_entered += 1
            self.unit = self.unit or _hidden_bytes(args)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop()


# memopt's own hooks are more careful under hooks that they do not know; these only look.
SavedTensorObserver.unpack.memopt_observer = True  # type: ignore[attr-defined]


class _Slot:
    """What autograd holds in the place of a tensor; it lives exactly as long as autograd keeps the tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def keep(self, tensor: Tensor) -> None:
        """Hold a copy instead (`memopt.saved.pinned`)."""
        self.tensor = tensor


class _FunctionNames(TorchFunctionMode):
    """Remembers the name of the outermost torch function that is running."""

    def __init__(self) -> None:
        super().__init__()
        self._running: list[str] = []

    def current(self) -> str:
        return self._running[0] if self._running else ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "") or str(func)
        if is_operator(func):
            name = operator_schema(func).name.removeprefix("aten::")
        self._running.append(name.strip("_"))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._running.pop()


def _hidden_bytes(args: Any) -> int:
    hidden = next((arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()), None)
    if hidden is None:
        return 0
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return hidden.numel() * dtype.itemsize


def _saver(frame: Any) -> str:
    """Name of the `autograd.Function` (or of memopt's own step) that is saving: only the call stack tells."""
    for _ in range(6):
        if frame is None:
            break
        if frame.f_code is APPLY:
            function = frame.f_locals["cls"]
            return CHECKPOINT if function.__module__ == _CHECKPOINT_MODULE else str(function.__name__)
        if frame.f_globals.get("__name__") == _CHECKPOINT_MODULE:
            return CHECKPOINT
        if frame.f_globals.get("__name__") == _SAMPLE_MODULE:
            return SAMPLE
        frame = frame.f_back
    return ""
