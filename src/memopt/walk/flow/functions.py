"""Functions of a model's own code that save intermediates half as large as their arguments and results, or larger."""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn

from memopt.recompute.pure import NotPureError, differentiable, form_of
from memopt.recompute.versions import versions_of
from memopt.saved.observer import Save
from memopt.torch_compat import tree_leaves
from memopt.walk.aten.parameters import storage_key
from memopt.walk.models.plain import exchanged, homes
from memopt.walk.sites import FunctionName, FunctionSite


class _FunctionCall(NamedTuple):
    module: str
    name: FunctionName
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    returned: Any
    given: list[Tensor]
    versions: list[int]
    """`given`, `versions`: the tensors among the arguments, and their versions when the call returned."""
    begun: int
    ended: int
    """`begun`, `ended`: how many functions of PyTorch had been called before the call, and until it returned."""


class FunctionCalls:
    """Records calls of the functions in the Python modules of a model's classes. `here` returns the name of the module
    that is running, `called` how many functions of PyTorch have been called so far."""

    def __init__(self, model: nn.Module, here: Callable[[], str], called: Callable[[], int]) -> None:
        self._homes = homes(model)
        self._here, self._called = here, called
        self._calls: list[_FunctionCall] = []

    def active(self) -> contextlib.AbstractContextManager[None]:
        recorded = [
            (home, name, self._recorded((home.__name__, name), value))
            for home in self._homes
            for name, value in vars(home).items()
            if isinstance(value, FunctionType)
        ]
        return exchanged(recorded)

    def _recorded(self, name: FunctionName, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = self._called()
            returned = function(*args, **kwargs)
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            if any(each.requires_grad for each in given):
                what, spans = (args, kwargs, returned, given, versions_of(given)), (begun, self._called())
                self._calls.append(_FunctionCall(self._here(), name, function, *what, *spans))
            return returned

        return call

    def forget(self) -> None:
        """Release the arguments and results of the calls."""
        self._calls.clear()

    def sites(self, saves: Sequence[tuple[Tensor, Save]], parameters: Collection[int | None]) -> list[FunctionSite]:
        """Functions that save large intermediates (of nested ones, the outermost), by the module that calls them."""
        # Backward would call them again with other arguments.
        changed = {each[:2] for each in self._calls if versions_of(each.given) != each.versions}
        proved: dict[FunctionName, bool] = {}
        chosen: list[_FunctionCall] = []
        # An inner function ends before the function that calls it, so the reverse order starts with outer functions.
        for call in reversed(self._calls):
            inner = any(each.begun <= call.begun and call.ended <= each.ended for each in chosen[-1:])
            if inner or call[:2] in changed or not _saves_much(call, saves, parameters):
                continue
            if call.name not in proved:
                proved[call.name] = _is_pure(call)
            if proved[call.name]:
                chosen.append(call)
        found: dict[str, dict[FunctionName, None]] = {}
        for call in reversed(chosen):
            found.setdefault(call.module, {})[call.name] = None
        return [FunctionSite(module, tuple(names)) for module, names in found.items()]


def _saves_much(call: _FunctionCall, saves: Sequence[tuple[Tensor, Save]], parameters: Collection[int | None]) -> bool:
    """Whether its intermediates, less the arguments kept only for a recompute, reach half its arguments and results."""
    first, last = (bisect_left(saves, n + 1, key=lambda saved: saved[1].functions_called) for n in call[-2:])
    inside = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor, _ in saves[first:last]}
    given, returned = (_storages(each, parameters) for each in ((call.args, call.kwargs), call.returned))
    known = {*given, *returned, *parameters}
    saved = sum(size for key, size in inside.items() if key not in known)
    kept_instead = sum(size for key, size in given.items() if key not in inside)
    return 2 * (saved - kept_instead) >= sum((given | returned).values()) > 0


def _storages(values: Any, parameters: Collection[int | None]) -> dict[int | None, int]:
    """Storage of each tensor in `values`, unless a parameter has it -> bytes of the tensor."""
    tensors = (each for each in tree_leaves(values) if isinstance(each, Tensor))
    found = {storage_key(each): each.nbytes for each in tensors}  # of a view only its own bytes
    return {key: size for key, size in found.items() if key not in parameters}


def _is_pure(call: _FunctionCall) -> bool:
    with contextlib.suppress(NotPureError):
        form_of(call.args, call.kwargs)
        return any(differentiable(call.function, call.args, call.kwargs))
    return False
