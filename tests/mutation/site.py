"""The one patched module in which a fault acts, told apart from the others while its forward runs."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from memopt.patches import apply as applying
from memopt.patches import swap

_NAME = "_planted_name"


class Site:
    """Which module the fault is in: the second one that comes by, or the first where there is no other.

    A fault asks `here` where it would act, inside the forward of a patched module. It is the same module in every model
    that is loaded, so a fault may ask again in another run.
    """

    def __init__(self, number: int = 2) -> None:
        self._number = number
        self._seen: list[str] = []
        self._running: list[str] = []
        self.module: str | None = None
        """Its name, once it was found."""
        self.acted = 0
        """How often the fault changed something there; faults count it."""
        self.around: Callable[..., Any] | None = None
        """around(forward, module, *arguments) runs in place of a patched module's forward."""

    def here(self) -> bool:
        """Whether the patched module whose forward runs is the one."""
        if not self._running:
            return False
        name = self._running[-1]
        if self.module is None:
            if name not in self._seen:
                self._seen.append(name)
            if len(self._seen) == self._number:
                self.module = name
        return name == self.module

    @property
    def names(self) -> tuple[str, ...]:
        """The module, and the block that it is in: what ends in a number."""
        name = self.module or "nowhere"
        block = re.match(r".*?\.\d+(?=\.)", name)
        return (name, block[0]) if block else (name,)

    @contextmanager
    def watched(self) -> Iterator[Site]:
        """Inside, patched modules of models that are patched say when their forward runs."""
        stock_subclass, stock_apply = swap._subclass, applying.apply
        forwards: dict[Any, Any] = {}

        def apply(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            for name, module in model.named_modules():
                module.__dict__[_NAME] = name
            return stock_apply(model, *args, **kwargs)

        def subclass(cls: type[nn.Module], forward: Any) -> type[nn.Module]:
            if forward not in forwards:
                forwards[forward] = self._announced(forward)
            return stock_subclass(cls, forwards[forward])

        with replaced(swap, "_subclass", subclass), everywhere(stock_apply, apply):
            yield self

    def _announced(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def announced(stock: Any, state: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._running.append(module.__dict__.get(_NAME, ""))
            try:
                if self.around is not None:
                    return self.around(functools.partial(forward, stock, state, module), module, *args, **kwargs)
                return forward(stock, state, module, *args, **kwargs)
            finally:
                self._running.pop()

        return announced


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner` has another attribute inside."""
    before = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def everywhere(function: Any, other: Any) -> Iterator[None]:
    """Every module of memopt that has imported `function` has `other` inside."""
    name = function.__name__
    places = [
        module
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("memopt.") and vars(module).get(name) is function
    ]
    for module in places:
        setattr(module, name, other)
    try:
        yield
    finally:
        for module in places:
            setattr(module, name, function)
