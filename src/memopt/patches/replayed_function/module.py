"""Functions that a module's forward calls by name, and that run again in backward.

While such a module runs, wrappers replace these functions in the Python module of its code. In another thread, or
outside of such a module, a wrapper calls the function unchanged. It also does so if a kernel of another package is
installed for the function, because a kernel saves little more than its arguments.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from memopt.kernels.replay.function import replayed_call
from memopt.patches.swap import steps_aside
from memopt.recompute.pure import NotPureError, differentiable, form_of
from memopt.walk.models.plain import is_kernel
from memopt.walk.sites import FunctionName

#: Function -> form of a call -> for each returned tensor, whether it has a gradient; () if the function is not pure.
_proved: WeakKeyDictionary[Callable[..., Any], dict[Hashable, tuple[bool, ...]]] = WeakKeyDictionary()


class ReplayedFunctions:
    """Makes the contexts around the calls of one module."""

    def __init__(self, names: Sequence[FunctionName]) -> None:
        self.names = tuple(names)

    def __call__(self, module: nn.Module, given: Sequence[Any]) -> AbstractContextManager[object]:
        return nullcontext() if steps_aside() else _inside(self)

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``function(*args, **kwargs)``; it runs again in backward if it is proved pure for such a call."""
        known = () if is_kernel(function) else _proof(function, args, kwargs)
        return replayed_call(function, args, kwargs, known) if any(known) else function(*args, **kwargs)


def _proof(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, ...]:
    """The entry of `_proved` for such a call, found once for all modules by running the function on meta tensors."""
    try:
        form = form_of(args, kwargs)
    except NotPureError:
        return ()
    known = _proved.setdefault(function, {})
    if form not in known:
        known[form] = ()
        with contextlib.suppress(NotPureError):
            known[form] = differentiable(function, args, kwargs)
    return known[form]


class _Thread(threading.local):
    functions: ReplayedFunctions | None = None


_thread = _Thread()
_lock = threading.Lock()
#: FunctionName -> (its wrapper, the function that it replaced, number of running modules that need the wrapper).
_exchanged: dict[FunctionName, tuple[Any, Any, int]] = {}


@contextlib.contextmanager
def _inside(functions: ReplayedFunctions) -> Iterator[None]:
    outer, _thread.functions = _thread.functions, functions
    with _lock:
        for name in functions.names:
            _exchange(name)
    try:
        yield
    finally:
        _thread.functions = outer
        with _lock:
            for name in functions.names:
                _give_back(name)


def _exchange(name: FunctionName) -> None:
    home = vars(sys.modules[name[0]])
    now, before, users = _exchanged.get(name, (None, None, 0))
    if home[name[1]] is not now:
        now, before = _looking(name, home[name[1]]), home[name[1]]
        home[name[1]] = now
    _exchanged[name] = now, before, users + 1


def _give_back(name: FunctionName) -> None:
    home = vars(sys.modules[name[0]])
    now, before, users = _exchanged.pop(name)
    if users > 1:
        _exchanged[name] = now, before, users - 1
    elif home[name[1]] is now:
        home[name[1]] = before


def _looking(name: FunctionName, function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of `function`, which calls it through the innermost `ReplayedFunctions` of the thread."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        inside = _thread.functions
        if inside is None or name not in inside.names or steps_aside():
            return function(*args, **kwargs)
        return inside.call(function, args, kwargs)

    return call
