"""What the answer advises beside its table: another attention, seeds of dropouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt.plan.recipe import load_recipe
from memopt.prediction.alternatives import headline
from memopt.prediction.headline import Headline
from memopt.trace.training import Request, Step, Training
from tests.trace.builders import named_config, sites_of

MIB = 1 << 20


@pytest.fixture(scope="module")
def eager() -> Headline:
    config = named_config("gemma2", max_position_embeddings=2048)
    about = Step(config, Training(1, 2048), sites_of(config), load_recipe("exact-unfolded"))
    return headline(Request("a model"), gpu="560MiB", step=about)


def test_eager_attention_is_named_with_what_the_model_supports(eager: Headline) -> None:
    (advice,) = (each for each in eager.remedies if "tokens x tokens" in each)
    assert "attn_implementation='flash_attention_2' or 'flex_attention' makes none" in advice
    assert "sdpa" not in advice  # this model's scores are capped


def test_masks_of_dropouts_are_named_with_the_setting_that_saves_seeds() -> None:
    config = named_config(
        "bert", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0, max_position_embeddings=2048
    )
    about = Step(config, Training(4, 1024), sites_of(config), load_recipe("exact-unfolded"))
    found = headline(Request("a model"), gpu="540MiB", step=about)
    (advice,) = (each for each in found.remedies if "dropouts.method=seed" in each)
    assert "dropout masks" in advice
    seeded = replace(about, recipe=load_recipe("exact-unfolded", ("dropouts.method=seed",)))
    assert headline(Request("a model"), gpu="540MiB", step=seeded).patched.peak < found.patched.peak


def test_where_no_other_exact_way_fits_the_recipe_for_long_context_is_named_with_its_cpu_memory() -> None:
    config = named_config("llama", max_position_embeddings=1 << 16, intermediate_size=1024)
    about = Step(config, Training(1, 1 << 15), sites_of(config), load_recipe("exact-unfolded"))
    found = headline(Request("a model"), gpu="810MiB", step=about)
    assert not any(way.fits(810 * MIB) for way in found.others)
    (advice,) = (each for each in found.remedies if "long-context" in each)
    hidden = (1 << 15) * config.hidden_size * 2
    waiting = 2 * config.num_hidden_layers * hidden  # inputs and outputs of attention
    assert f"and {waiting // MIB + 1} MiB of CPU memory, exact" in advice  # row statistics are the rest
    assert advice.endswith('memopt.patch(model, "long-context")')
