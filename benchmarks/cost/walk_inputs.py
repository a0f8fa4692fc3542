"""How many model types each rule for inputs serves: `python -m benchmarks.walk --inputs`.

A rule (`memopt.walk.calls.arguments`) serves a model type if a call that it made is one of those by which a small model
of the type is walked, on numbers or on meta tensors.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.coverage import examined, with_progress
from memopt.walk.calls import arguments
from memopt.walk.calls.arguments.request import Forms, Request
from memopt.walk.calls.arguments.singles import ARGUMENTS
from memopt.walk.calls.parts import every_call
from memopt.walk.models.build import build_meta
from tests.zoo.build import Row, Stop, model_types, runnable


@dataclass
class InputsRow:
    """By what one model type is served."""

    model_type: str
    status: str = "ok"
    reason: str = ""
    forms: list[str] = field(default_factory=list)
    """``rule: form`` of every call that ran, numbers left open."""
    arguments: list[str] = field(default_factory=list)
    """Names of what these calls pass."""


def served(types: Sequence[str], jobs: int | None = None) -> list[str]:
    """Lines with the number of `types`, by default all of transformers, that each rule, form and argument serves."""
    names = list(types) or model_types()
    rows = list(with_progress(examined(names, jobs or os.cpu_count() or 1, _examine, InputsRow), 0, len(names)))
    ran = [row for row in rows if row["status"] == "ok"]
    rules = Counter(name for row in ran for name in {form.partition(":")[0] for form in row["forms"]})
    forms = Counter(form for row in ran for form in row["forms"])
    given = Counter(name for row in ran for name in row["arguments"])
    lines = [f"{len(ran)} of {len(rows)} model types run with inputs that these rules make:"]
    for _, rule in arguments.RULES:
        lines.append(f"{rules[rule.__name__]:5}  {rule.__name__}")
        own = sorted(form for form in forms if form.partition(":")[0] == rule.__name__)
        lines += [f"{forms[form]:5}      {form.partition(': ')[2] or 'as they are'}" for form in own]
    return [*lines, "Arguments that have a builder:", *(f"{given[name]:5}  {name}" for name in ARGUMENTS)]


def _examine(model_type: str) -> InputsRow:
    arguments.RULES = tuple((modality, _named(rule)) for modality, rule in arguments.RULES)
    try:
        _, twin, calls = runnable(Row(model_type))
    except Stop as stop:
        return InputsRow(model_type, stop.status, stop.reason)
    every = [*calls, *every_call(build_meta(twin.config))]
    forms = sorted({re.sub(r"\d+", "N", call.detail) for call in every})
    return InputsRow(model_type, forms=forms, arguments=sorted({name for call in every for name in call.kwargs}))


def _named(rule: Callable[[Request], Forms]) -> Callable[[Request], Forms]:
    """`rule`, whose forms begin with its name."""

    def named(request: Request) -> Forms:
        for detail, given in rule(request):
            yield f"{rule.__name__}: {detail}", given

    return named
