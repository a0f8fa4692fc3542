"""Data about a model's call for its sampled linears: which rows are padding, and which samples the batch holds.

The model's forward notes its attention masks and the sample index of the batch for the duration of the call, and its
linears read these notes. The child module that holds every sampled linear (the model without its head) notes them too,
if the model's forward has not: trainers that compute the loss themselves (TRL) replace the model's forward by one that
calls this child. A linear in a call of another model, or outside of any call, has no notes and draws rows by their own
norms.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.patches.sampled_linear.gradient_memory import GradientMemory, Step
from memopt.patches.sampled_linear.padding import PaddingWatch
from memopt.patches.swap import states_in, steps_aside, swap_forward, wraps_any_forward
from memopt.torch_compat import FakeTensor

_Rows = tuple[Tensor | None, Step | None, Tensor | None]
#: The batch key for the numbers of its samples in the data set.
INDEX = "memopt_index"


class Visits:
    """State that a model and its sampled linears share. A deepcopy or pickle lacks the memory of gradients."""

    _model: weakref.ref[nn.Module] | None = None
    """The module whose calls are noted; None between unpickling and the first call."""

    def __init__(self) -> None:
        self.padding = PaddingWatch()
        self.memory: GradientMemory | None = None

    def belong_to(self, model: nn.Module) -> None:
        """Note the calls of `model`, unless another module that is alive was set before."""
        if self._model is None or self._model() is None:
            self._model = weakref.ref(model)

    def call(self, linear: int, x: Tensor) -> LinearCall | None:
        """The call of linear number `linear` with the input `x`; None if nothing is noted for its rows."""
        visit = self._current()
        rows = None if visit is None else visit.rows(x)
        return None if rows is None else LinearCall(self, linear, *rows)

    @property
    def is_open(self) -> bool:
        """Whether a call of the model is running."""
        return self._current() is not None

    def _current(self) -> Visit | None:
        visit = _visit.get()
        while visit is not None and visit.visits is not self:
            visit = visit.outer
        return visit

    @contextlib.contextmanager
    def visit(self, masks: Sequence[Tensor], index: Tensor | None) -> Iterator[None]:
        """Inside, a call of the model runs. First processes the gradients that earlier backwards reported."""
        self.padding.settle()
        step = None
        if self.memory is not None and self.memory.is_kept:
            self.memory.flush()
            self.memory.calls += 1
            step = None if index is None else self.memory.begin(index)
        token = _visit.set(Visit(self, tuple(masks), step, _visit.get()))
        try:
            yield
        finally:
            _visit.reset(token)

    def __getstate__(self) -> dict[str, Any]:
        return {"padding": self.padding, "memory": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Visits:
        model = None if self._model is None else self._model()
        if model is not None and id(model) not in memo:
            return self  # A linear alone is copied, for the same model (as PEFT does for modules_to_save).
        other = Visits()
        other.padding = copy.deepcopy(self.padding, memo)
        if model is not None:
            other.belong_to(memo[id(model)])
        return other


class Visit:
    """One call of a model."""

    def __init__(self, visits: Visits, masks: tuple[Tensor, ...], step: Step | None, outer: Visit | None) -> None:
        self.visits, self.outer = visits, outer
        self._masks, self._step = masks, step
        self._rows: dict[tuple[torch.Size, torch.device], _Rows | None] = {}

    def rows(self, x: Tensor) -> _Rows | None:
        """Padding and samples of the rows of a linear's input, as in :class:`LinearCall`; None if both are unknown."""
        shape, device = key = x.shape[:-1], x.device
        if key in self._rows:
            return self._rows[key]
        masks = [mask for mask in self._masks if mask.shape == shape or (mask.numel(),) == tuple(shape)]
        real = None
        if masks:
            there = [mask.to(device, non_blocking=True).flatten() != 0 for mask in masks]
            real = functools.reduce(torch.logical_or, there)
        grid = tuple(masks[0].shape) if masks else (shape[0], shape[1:].numel()) if shape else (0, 0)
        step = self._step if self._step is not None and grid[0] == len(self._step.rows) else None
        places = None if step is None else step.places(grid[0], grid[1], real, device)
        self._rows[key] = None if real is None and step is None else (real, step, places)
        return self._rows[key]


@dataclass(eq=False)
class LinearCall:
    """One call of one linear: the expected norms of its output's gradient, and the receiver of the actual norms."""

    visits: Visits
    linear: int
    real: Tensor | None
    """bool (n,): false for the rows of its input that are padding; None if no mask fits."""
    step: Step | None
    places: Tensor | None
    """Places of the rows in the memory of gradients; None without `step`."""
    left_out: bool = False

    def importance(self) -> Tensor | None:
        """As in `memopt.patches.sampled_linear.slot.Importance`."""
        step, places = self.step, self.places
        norms = step.recall(self.linear, places) if step is not None and places is not None else None
        if self.real is None or not self.visits.padding.leaves_out(self.linear):
            return norms
        self.left_out = True
        return self.real.float() if norms is None else norms * self.real

    def report(self, norms: Tensor) -> None:
        """Record the norms of the rows of the output's gradient, (n,)."""
        if self.real is not None:
            self.visits.padding.note(self.linear, norms, self.real, self.left_out)
        if self.step is not None and self.places is not None:
            self.step.record(self.linear, self.places, norms)


_visit: ContextVar[Visit | None] = ContextVar("memopt_visit", default=None)


@dataclass(frozen=True)
class VisitRewrite:
    """State of a module whose calls are noted."""

    visits: Visits
    is_inner: bool = False
    """Whether the module notes a call only if no call is noted yet."""


def patch_visits(model: nn.Module, visits: Visits, linears: Collection[nn.Module] = ()) -> None:
    """Let `model`, or the base model inside a PEFT model, note its calls in `visits`, and take a ``memopt_index``.
    `linears` are the sampled ones. Raises a ValueError if neither the module nor its child that holds all of them can
    be swapped."""
    entry = _entry(model)
    inner, refusals = _inner(entry, linears), []
    for module in (entry,) if inner is None else (entry, inner):
        try:
            swap_forward(module, _forward, VisitRewrite(visits, module is inner))
            visits.belong_to(module)
        except ValueError as reason:
            refusals.append(reason)
    if len(refusals) > (inner is not None):
        raise refusals[0]
    declare_index(model)


def _inner(model: nn.Module, linears: Collection[nn.Module]) -> nn.Module | None:
    """The child of `model` that holds all of `linears`."""
    for child in model.children() if linears else ():
        inside = {id(module) for module in child.modules()}
        if all(id(linear) in inside for linear in linears):
            return None if isinstance(child, nn.ModuleList | nn.ModuleDict) else child
    return None


def visits_of(model: nn.Module) -> list[Visits]:
    """All `visits` with which :func:`patch_visits` patched modules of `model`, each once."""
    return list({id(state.visits): state.visits for _, _, state in states_in(model, VisitRewrite)}.values())


def declare_index(model: nn.Module) -> None:
    """Add ``memopt_index`` to the signature of each forward that :func:`patch_visits` patched, if it is missing.
    Trainers drop batch keys that the signature does not name. The class of an unpickled model lacks the name."""
    for _, module, _ in states_in(model, VisitRewrite):
        forward: Any = type(module).forward
        signature = inspect.signature(forward)
        if INDEX in signature.parameters:
            continue
        parameters = list(signature.parameters.values())
        named = inspect.Parameter(INDEX, inspect.Parameter.KEYWORD_ONLY, default=None)
        has_more = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        parameters.insert(len(parameters) - has_more, named)
        forward.__signature__ = signature.replace(parameters=parameters)


def _entry(model: nn.Module) -> nn.Module:
    """The module that gets a batch as the model's own code does: the base model of a PEFT model, or `model`."""
    if not isinstance(getattr(model, "peft_config", None), Mapping):
        return model
    getter = getattr(model, "get_base_model", None)
    tuner = model._modules.get("base_model")  # of a model with adapters of several kinds
    base = getter() if callable(getter) else getattr(tuner, "model", None)
    return base if isinstance(base, nn.Module) else model


@wraps_any_forward
def _forward(stock: Callable[..., Any], rewrite: VisitRewrite, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    index = kwargs.pop(INDEX, None)
    if steps_aside() or (rewrite.is_inner and rewrite.visits.is_open):
        return stock(module, *args, **kwargs)
    if not isinstance(index, Tensor) or index.is_meta or isinstance(index, FakeTensor):
        index = None
    rewrite.visits.belong_to(module)
    with rewrite.visits.visit(_masks(stock, args, kwargs), index):
        return stock(module, *args, **kwargs)


def _masks(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Attention masks with one number for each token, 0 for padding, among a forward's arguments. Float masks are left
    out: their numbers are added to scores and do not mark padding."""
    named = (*zip(_positional(forward), args, strict=False), *kwargs.items())
    return [
        value
        for name, value in named
        if name.endswith("attention_mask") and isinstance(value, Tensor) and value.dim() == 2
        if not (value.is_floating_point() or value.is_complex())
    ]


@functools.lru_cache(maxsize=256)
def _positional(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a forward's positional arguments, behind `self`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(forward).parameters.values() if p.kind in kinds)[1:]
