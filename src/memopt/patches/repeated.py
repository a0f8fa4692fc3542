"""Function modes around a forward, which a part of it needs again where that part runs again in backward."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.overrides import TorchFunctionMode


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
