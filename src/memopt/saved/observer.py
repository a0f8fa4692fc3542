"""Observes which operation saves which tensor for backward, and in which module.

It uses global module hooks, a function mode and saved-tensor hooks. `memopt.walk` and `memopt.reporting` interpret the
observations.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from memopt.saved.kept import alias_of, function_of
from memopt.torch_compat import is_operator, operator_schema, storage_id

CHECKPOINT = "checkpoint"
"""Name of the operation that saves a checkpointed region's inputs."""
_CHECKPOINT_MODULE = "torch.utils.checkpoint"
#: Attribute of an autograd function, or global of a module, whose code saves tensors: its name for the operation.
_OPERATION = "__memopt_saves__"
_DEEPEST_SAVER = 6


@dataclass(frozen=True)
class Save:
    """One tensor saved by one operation."""

    modules: tuple[str, ...]
    """Names of the modules that were running, the outermost first."""
    modules_entered: int
    """Number of module calls that had begun."""
    function: str
    """Name of the function that Python had called; empty inside a `torch.autograd.Function`."""
    functions_called: int
    """Number of function calls that had begun."""
    saver: str
    """If `function` is empty: the `torch.autograd.Function` or step of memopt that saved it; empty if unknown."""
    differentiable: bool
    """Whether the tensor is part of the graph (an attention mask is not)."""
    instead_of: int = 0
    """The id of the storage that the operation saved and that this tensor replaces; 0 if it saved this tensor."""

    @property
    def module(self) -> str:
        """Name of the innermost module that was running."""
        return self.modules[-1] if self.modules else ""

    @property
    def operation(self) -> str:
        return self.function or self.saver


class SavedTensorObserver:
    """Context manager that follows which module and function run; `pack` and `unpack` are the saved-tensor hooks.
    `unpack` returns a detached alias: a tensor with a grad_fn, held by that same node, would be a reference cycle."""

    def __init__(
        self,
        model: nn.Module,
        *,
        entered: Callable[[str, tuple[Any, ...]], None] | None = None,
        left: Callable[[Any], object] | None = None,
        stand_ins: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        self.modules = RunningModules(model, entered=entered, left=left)
        self.functions = RunningFunctions(stand_ins)
        self._saves: Saves = []
        self._active = ExitStack()
        self.pack = self._make_pack()

    def __enter__(self) -> SavedTensorObserver:
        with ExitStack() as stack:
            stack.enter_context(self.modules)
            stack.enter_context(self.functions)
            self._active = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._active.__exit__(*error)

    def saves(self) -> Iterator[tuple[Tensor, Save]]:
        """The tensors that autograd still holds, in the order of their saves."""
        for reference in self._saves:
            slot = reference()
            if slot is not None:
                yield slot.tensor, slot.save

    @staticmethod
    def unpack(slot: ObservedTensor) -> Tensor:
        return slot.tensor

    def _make_pack(self) -> Callable[[Tensor], ObservedTensor]:
        def pack(tensor: Tensor) -> ObservedTensor:
            function = self.functions.current()
            save = Save(
                modules=tuple(self.modules.names),
                modules_entered=self.modules.entered,
                function=function,
                functions_called=self.functions.called,
                saver="" if function else _saver(sys._getframe(1)),
                differentiable=tensor.requires_grad,
            )
            return ObservedTensor(alias_of(tensor), save, self._saves)

        pack.memopt_observer = True  # type: ignore[attr-defined]
        return pack


# memopt's scopes recompute less under unknown hooks. This attribute marks hooks that only observe.
SavedTensorObserver.unpack.memopt_observer = True  # type: ignore[attr-defined]


class ObservedTensor:
    """The object that autograd holds in the place of a tensor, for as long as it would hold the tensor."""

    __slots__ = ("__weakref__", "_saves", "save", "tensor")

    def __init__(self, tensor: Tensor, save: Save, saves: Saves) -> None:
        self.tensor, self.save, self._saves = tensor, save, saves
        saves.append(weakref.ref(self))

    def keep(self, tensor: Tensor) -> None:
        """Hold a copy instead (`memopt.saved.pinned`)."""
        self.tensor, self.save = tensor, self._replaced()

    def instead(self, tensor: Tensor) -> ObservedTensor:
        """A holder of `tensor`, which replaces this tensor: the operation that saved this one counts as its saver."""
        return ObservedTensor(tensor, self._replaced(), self._saves)

    def beside(self, tensor: Tensor) -> ObservedTensor:
        """A holder of `tensor`, which is kept beside this tensor for the same operation."""
        return ObservedTensor(tensor, self.save, self._saves)

    def _replaced(self) -> Save:
        return replace(self.save, instead_of=storage_id(self.tensor.untyped_storage()))

    def unpack(self) -> Tensor:
        return self.tensor


#: All tensors that were saved, in the order of their saves; a reference is dead once autograd has freed its tensor.
Saves = list[weakref.ref[ObservedTensor]]


_observers = 0


def is_observed() -> bool:
    """Whether global module hooks of this file, which only observe, are registered."""
    return _observers > 0


class RunningModules:
    """Context manager that follows which modules of `model` run. Other modules count under their caller's name.
    `entered` gets the name of each module whose forward begins, and its positional arguments; `left` is called whenever
    a forward has ended, also by an error, with its result or None."""

    def __init__(
        self,
        model: nn.Module,
        *,
        entered: Callable[[str, tuple[Any, ...]], None] | None = None,
        left: Callable[[Any], object] | None = None,
    ) -> None:
        self.names: list[str] = []
        """The modules that are running, the outermost first."""
        self.entered = 0
        """Number of calls that have begun."""
        self._of = {id(module): name for name, module in model.named_modules()}
        self._on_entry, self._on_exit = entered, left
        self._hooks: list[Any] = []

    def __enter__(self) -> RunningModules:
        global _observers
        _observers += 1
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *error: Any) -> None:
        global _observers
        _observers -= 1
        for hook in self._hooks:
            hook.remove()

    def current(self) -> str:
        """Name of the innermost running module; empty if none is running."""
        return self.names[-1] if self.names else ""

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.entered += 1
        self.names.append(self._of.get(id(module), self.current()))
        if self._on_entry is not None:
            self._on_entry(self.names[-1], args)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.names.pop()
        if self._on_exit is not None:
            self._on_exit(output)


class RunningFunctions(TorchFunctionMode):
    """Counts the functions that Python calls and names the outermost one that is running. Functions with an entry in
    `stand_ins` are replaced by it."""

    def __init__(self, stand_ins: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.called = 0
        self._running: list[str] = []
        self._stand_ins = stand_ins or {}

    def current(self) -> str:
        return self._running[0] if self._running else ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called += 1
        self._running.append(_name(func))
        try:
            return self._stand_ins.get(func, func)(*args, **(kwargs or {}))
        finally:
            self._running.pop()


def _name(function: Any) -> str:
    if is_operator(function):
        name: str = operator_schema(function).name.removeprefix("aten::")
    else:
        name = getattr(function, "__name__", "") or str(function)
    return name.strip("_")


def _saver(frame: Any) -> str:
    """Name of the `autograd.Function` (or of memopt's step) that is saving, found on the call stack."""
    for _ in range(_DEEPEST_SAVER):
        if frame is None:
            break
        if (function := function_of(frame)) is not None:
            own = getattr(function, _OPERATION, function.__name__)
            return CHECKPOINT if function.__module__ == _CHECKPOINT_MODULE else str(own)
        if frame.f_globals.get("__name__") == _CHECKPOINT_MODULE:
            return CHECKPOINT
        if step := frame.f_globals.get(_OPERATION):
            return str(step)
        frame = frame.f_back
    return ""
