"""A model that is built once is traced at every size as one that was built for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from memopt.plan.recipe import load_recipe
from memopt.prediction.subject import reads_tokens
from memopt.torch_compat import FakeTensorMode
from memopt.trace.arguments import example_of
from memopt.trace.trace import trace
from memopt.trace.tracer import Tracer, _form
from memopt.trace.training import Step, Training
from tests.factories import MORE_NAMES, NAMES
from tests.trace.builders import named_config, sites_of

WAYS: list[tuple[str | None, dict[str, Any]]] = [
    (None, {}),
    (None, {"checkpointing": "full"}),
    (None, {"train": "lora"}),
    ("exact-unfolded", {}),
    ("exact-unfolded", {"train": "lora", "adapter_fp32": True}),
    ("exact-unfolded", {"checkpointing": "full"}),
    ("exact-levels", {"precision": "bf16-mixed"}),
    ("int8", {}),
    ("lowmemory-bp", {}),
    ("sampled", {"train": "lora"}),
]
QUICK = ("llama", "t5")


@pytest.mark.parametrize(("recipe", "training"), WAYS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*NAMES, *MORE_NAMES)]
)
@pytest.mark.rotates(3)
def test_a_step_of_another_size_is_that_of_a_model_built_for_it(
    name: str, recipe: str | None, training: dict[str, Any]
) -> None:
    config = named_config(name)
    seq = 16 if reads_tokens(config) else None
    small = Training(2, seq, **training)
    large = replace(small, batch=3, seq=seq and 24)
    tracer = Tracer(Step(config, small, sites_of(config), recipe and load_recipe(recipe)))
    for size in (small, large, small):
        FakeTensorMode.cache_clear()  # what comes out of it may lack the padding of a storage
        each = tracer._trace(size)
        FakeTensorMode.cache_clear()
        fresh = trace(replace(tracer.of, training=size))
        assert _form(each) == _form(fresh)
        assert (each.parameters, each.batch, each.notes) == (fresh.parameters, fresh.batch, fresh.notes)


@pytest.mark.parametrize("name", QUICK)
def test_arguments_of_another_size_are_those_that_are_found_for_it(name: str) -> None:
    config = named_config(name)
    small, large = Training(2, 16), Training(3, 24)
    example_of(config, sites_of(config), small)
    found = example_of(config, sites_of(config), large)
    other = named_config(name)  # nothing is known of its size
    alone = example_of(other, sites_of(other), large)
    for mine, its in ((found.inputs, alone.inputs), (found.targets, alone.targets)):
        assert _shapes(mine) == _shapes(its)
    assert found.is_read == alone.is_read


def _shapes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", value) for name, value in arguments.items()}
