"""Calls of the parts that a model's own forward does not reach: a vision or audio tower, one of two encoders.

After `memopt.walk.calls.inputs.runnable_calls`, modules that have not run are reached by `get_*_features` methods or by
calls of the nested models that contain them. The result of such a call counts as an output of the model, since its
consumers are not observed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from memopt.saved.observer import RunningModules
from memopt.walk.calls.inputs import (
    VARIANTS,
    Call,
    Calls,
    Runner,
    Variant,
    first_to_run,
    proposed,
    run_once,
    runnable_calls,
    unobserved,
)
from memopt.walk.models.config import one_line
from memopt.walk.sites import ancestors, is_inside

#: Calls of one part that are tried before it is given up.
_MOST_TRIES = 8


def every_call(model: nn.Module, inputs: Mapping[str, Any] | None = None, *, run: Runner | None = None) -> Calls:
    """`runnable_calls`, then calls of the parts that none of these reached. With `inputs`, only these are run: they
    show how the model is used, and no part is called. The errors include one for each part that does not run at all."""
    visits = _Visits(model)
    with RunningModules(model, entered=visits.enter):
        calls = runnable_calls(model, inputs, run=visits.during(run))
        if inputs is not None or not calls:
            return calls
        errors = list(calls.errors)
        for part, method in _targets(model, visits):
            tried = _Trial(model, part, method)
            reached = tried.reaches(visits)
            if reached is None:
                errors += tried.errors[:1]
            elif reached:
                found = first_to_run(model, tried.calls(VARIANTS), visits.during(run))
                calls += found
                errors += found.errors
    return Calls(calls, errors)


class _Visits:
    """The modules that ran in calls that ran to their end."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: set[str] = set()
        self.now: set[str] = set()

    def enter(self, name: str, args: tuple[Any, ...]) -> None:
        self.now.add(name)

    def during(self, run: Runner | None) -> Runner:
        def watched(model: nn.Module, call: Call) -> Any:
            self.now = set()
            output = (run or unobserved)(model, call)
            self.seen |= self.now
            return output

        return watched

    def idle(self) -> set[str]:
        """Modules with children and parameters of which nothing has run. A leaf does not count: its parent may use the
        parameters without a call, as attention does with its output projection."""
        ran = {above for name in self.seen for above in ("", *ancestors(name), name)}
        return {
            name
            for name, module in self.model.named_modules()
            if name not in ran and next(module.children(), None) is not None and any(True for _ in module.parameters())
        }


def _targets(model: nn.Module, visits: _Visits) -> Iterator[tuple[str, str]]:
    """(part, method) to call while modules are idle: feature methods of any model inside, then idle models."""
    models = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    for name, module in models.items():
        for method in _feature_methods(type(module)):
            if any(is_inside(idle, name) for idle in visits.idle()):
                yield name, method
    for name in models:
        if name in visits.idle():
            yield name, ""


def _feature_methods(cls: type) -> list[str]:
    names = (name for name in dir(cls) if name.startswith("get_") and name.endswith("_features"))
    return [name for name in names if callable(getattr(cls, name))]


class _Trial:
    """The possible calls of one part, tried unobserved first, since many reach no new module."""

    def __init__(self, model: nn.Module, part: str, method: str) -> None:
        self.model, self.part, self.method = model, part, method
        self.errors: list[tuple[str, str]] = []

    def reaches(self, visits: _Visits) -> bool | None:
        """Whether the first call that runs reaches a module that has not run before; None if no call runs."""
        idle = visits.idle()
        for call in self.calls(("plain",)):
            visits.now = set()
            try:
                run_once(self.model, call)
            except Exception as error:  # any failure means that these inputs do not fit
                self._failed(call.name, error)
                continue
            return not idle.isdisjoint(visits.now)
        return None

    def calls(self, variants: Sequence[Variant]) -> Iterator[Call]:
        """Calls to try, a few of each variant."""
        tries: Counter[str] = Counter()
        try:
            for call in proposed(self.model, variants, 0, part=self.part, method=self.method):
                tries[call.label] += 1
                if tries[call.label] <= _MOST_TRIES:
                    yield call
        except Exception as error:  # the signature or config is not understood
            self._failed(Call("", {}, self.part, self.method).target, error)

    def _failed(self, name: str, error: Exception) -> None:
        self.errors.append((name, f"{type(error).__name__}: {one_line(error)}"))
