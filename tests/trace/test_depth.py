"""A deep model's step, put together from that of a few of its blocks, is the step of the whole model."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import groupby

import pytest
from torch import nn
from transformers import Gemma3TextConfig, MixtralConfig, PreTrainedConfig

from memopt.plan.recipe import load_recipe
from memopt.prediction.planner.levels import levels_of
from memopt.trace.trace import subject, trace
from memopt.trace.tracer import Extension, Tracer, UnlikeError, _deepened, _form
from memopt.trace.training import Step, Training
from memopt.walk.models.alike import LEAST_GROUPS, take_out
from memopt.walk.models.build import build_meta
from memopt.walk.observe import find_sites
from tests.trace.builders import named_config


def tracer(name: str, recipe: str | None = None) -> Tracer:
    config = named_config(name, num_hidden_layers=12)
    return Tracer(step_of(config, recipe))


def step_of(config: PreTrainedConfig, recipe: str | None) -> Step:
    return Step(config, Training(), find_sites(build_meta(config)), recipe and load_recipe(recipe))


@pytest.mark.parametrize(
    ("name", "recipe", "training"),
    [
        pytest.param("llama", None, Training(2, 16), marks=pytest.mark.slow),
        ("llama", "exact-unfolded", Training(2, 16, train="lora")),
        ("llama", "exact-unfolded", Training(2, 16, frozen=("embed_tokens", "layers.[0-2]"))),
        pytest.param("llama", "exact-levels", Training(2, 16), marks=pytest.mark.slow),
        pytest.param("llama", "int8", Training(2, 16, checkpointing="full"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.rotates(3)
def test_the_step_of_a_few_blocks_extends_to_that_of_all(name: str, recipe: str | None, training: Training) -> None:
    short = tracer(name, recipe)
    extended, whole = short.at(training), short._trace(training)
    assert _form(extended) == _form(whole)
    assert short.extends
    assert extended.parameters == whole.parameters


def test_experts_with_adapters_extend_too() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = MixtralConfig(**sizes, vocab_size=64, num_hidden_layers=7, num_local_experts=2)
    config.architectures = ["MixtralForCausalLM"]
    short = Tracer(step_of(config, "exact-unfolded"))
    short.at(Training(1, 8, train="lora"))
    assert short.extends


@pytest.mark.parametrize("recipe", [None, "exact-unfolded"])
@pytest.mark.rotates(3)
def test_decoders_whose_blocks_add_to_one_gradient_extend_too(recipe: str | None) -> None:
    config = named_config("t5", num_layers=8, num_decoder_layers=8)
    short = Tracer(step_of(config, recipe))
    training = Training(2, 16, checkpointing="full")  # the sum over the blocks begins in the last one
    assert _form(short.at(training)) == _form(short._trace(training))
    assert short.extends


def test_no_single_block_is_left_out_of_those_that_alternate() -> None:
    # Five of one kind, then another: a model may tell them by their number.
    config = Gemma3TextConfig(
        hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=50,
        num_hidden_layers=26, architectures=["Gemma3ForCausalLM"],
    )  # fmt: skip
    assert take_out(build_meta(config), [f"model.layers.{number}" for number in range(26)]) == ()


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param([1] * 6 + [0] * 6, marks=pytest.mark.slow),
        pytest.param([1] * 2 + [0] * 6 + [3] * 4, marks=pytest.mark.slow),
        [1] * 6 + [5] * 6,
    ],
)
def test_blocks_of_unlike_levels_do_not_stand_for_one_another(levels: list[int]) -> None:
    config, training = named_config("llama", num_hidden_layers=12), Training(2, 16)
    sites = find_sites(build_meta(config))
    recipe = levels_of(sites, load_recipe("exact-unfolded")).recipe_at((*levels, 0))
    short = Tracer(Step(config, training, sites, recipe), extends=True)
    runs = short._trace(training, LEAST_GROUPS).runs
    assert len(runs) == (2 if levels.count(levels[-1]) == 6 else 1)  # four of each six are traced
    assert _form(short.at(training)) == _form(short._trace(training))
    assert short.extends


def test_blocks_that_are_not_alike_are_all_traced() -> None:
    short = tracer("llama")
    config = named_config("llama", num_hidden_layers=12, layer_types=None)
    model = build_meta(config)
    model.model.layers[5].mlp.act_fn = nn.GELU()
    assert [run.left_out for run in take_out(model, short.of.sites.blocks)] == [2]  # of the six behind the odd one


def test_interior_blocks_that_allocate_differently_are_noticed() -> None:
    short = tracer("llama")
    of = short.of.trained(batch=2, seq=16)
    whole = trace(of, subject(of, 4))
    (run,) = whole.runs
    odd = next(k for k, e in enumerate(whole.events) if e.allocated and "layers.2." in e.storage.module)
    events = [e for e in whole.events if e.storage is not whole.events[odd].storage]
    with pytest.raises(UnlikeError, match="not alike"):
        Extension(events, (), run, run.left_out).whole()


def test_the_order_of_frees_between_two_allocations_tells_no_blocks_apart() -> None:
    # Autocast drops its copies of the weights by their addresses, so in another order in each block.
    training = Training(2, 16, checkpointing="full")
    short = tracer("llama")._trace(training, LEAST_GROUPS)
    shuffled, draw = [], random.Random(0)
    for _, stretch in groupby(short.events, key=lambda event: (event.allocated, event.moment)):
        each = list(stretch)
        shuffled += each if each[0].allocated else draw.sample(each, len(each))
    assert shuffled != list(short.events)
    assert _form(_deepened(replace(short, events=tuple(shuffled)))) == _form(_deepened(short))


def test_blocks_that_share_parameters_are_all_traced() -> None:
    short = tracer("llama")
    model = build_meta(short.of.config)
    model.model.layers[5].mlp.up_proj.weight = model.model.layers[4].mlp.up_proj.weight
    assert take_out(model, short.of.sites.blocks) == ()
