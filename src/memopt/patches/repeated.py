"""What a forward goes by that a part of it needs again where that part runs again in backward: function modes around
it, modes of its modules, and tensors that may have been freed since."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

#: What a module's forward goes by beside its tensors: whether it trains, and which of its adapters (PEFT) are on.
MODES = ("training", "_active_adapter", "_disable_adapters")
#: A table that holds a value (parameters, buffers or attributes of a module), and the value's name there.
Slot = tuple[dict[str, Any], str]
ABSENT = object()


class _Active(threading.local):
    def __init__(self) -> None:
        self.modes: list[type[RepeatedMode]] = []


_active = _Active()


class RepeatedMode(TorchFunctionMode):
    """A mode without arguments, which :func:`active_modes` names while it is active in this thread."""

    def __enter__(self) -> Any:
        _active.modes.append(type(self))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _active.modes.pop()


def active_modes() -> tuple[type[RepeatedMode], ...]:
    """The modes that a forward runs in, outermost first."""
    return tuple(dict.fromkeys(_active.modes))


@contextmanager
def inside(modes: tuple[type[RepeatedMode], ...]) -> Iterator[None]:
    """Inside, what runs again finds the modes that :func:`active_modes` gave in its forward."""
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        yield


def modes_of(module: nn.Module) -> list[tuple[Slot, Any]]:
    """Of `module` and those inside it."""
    return [((own, name), own[name]) for own in map(vars, module.modules()) for name in MODES if name in own]


@contextmanager
def standing(values: Sequence[tuple[Slot, Any]]) -> Iterator[None]:
    """Inside, these stand in their slots; afterwards what stood there before."""
    now = [(slot, slot[0].get(slot[1], ABSENT)) for slot, _ in values]
    try:
        _put(values)
        yield
    finally:
        _put(now)


def _put(values: Sequence[tuple[Slot, Any]]) -> None:
    for (table, name), value in values:
        if value is ABSENT:
            table.pop(name, None)
        else:
            table[name] = value


def has_memory(tensor: Tensor) -> bool:
    """Whether a plain tensor holds data: sharding frees the weights of a forward."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and bool(tensor.untyped_storage().nbytes())
