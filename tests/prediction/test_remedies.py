"""What the answer advises beside its table: another attention, seeds of dropouts, a longer sequence."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from transformers import BartConfig, GPT2Config, ResNetConfig

from memopt.errors import UsageError
from memopt.plan.recipe import load_recipe
from memopt.prediction.alternatives import headline
from memopt.prediction.headline import Headline
from memopt.prediction.peak import predict
from memopt.prediction.setup import Setup
from memopt.reporting.terminal import columns
from memopt.trace.estimate import has_table_of_positions
from memopt.trace.training import Request, Step, Training
from memopt.walk.models.build import build_meta
from tests.trace.builders import named_config, sites_of

MIB = 1 << 20


@pytest.fixture(scope="module")
def eager() -> Headline:
    config = named_config("gemma2", max_position_embeddings=2048)
    about = Step(config, Training(1, 2048), sites_of(config), load_recipe("exact-unfolded"))
    return headline(Request("a model"), gpu="560MiB", step=about)


@pytest.mark.rotates(4)
def test_eager_attention_is_named_with_what_the_model_supports(eager: Headline) -> None:
    (advice,) = (each for each in eager.remedies if "tokens x tokens" in each)
    assert "attn_implementation='flash_attention_2' or 'flex_attention' makes none (--attention counts it)" in advice
    assert "sdpa" not in advice  # this model's scores are capped


@pytest.mark.rotates(4)
@pytest.mark.parametrize(
    ("recipe", "accuracy"),
    [("exact-unfolded", "exact"), ("wta-crs", "sampled"), ("sampled", "30% off; sampled")],
)
def test_gradients_are_exact_only_by_recipes_that_are(recipe: str, accuracy: str) -> None:
    config = named_config("bert")
    about = Step(config, Training(1, 32), sites_of(config), load_recipe(recipe))
    ways = {way.name: way.accuracy for way in headline(Request("a model"), gpu="1GiB", step=about).ways()}
    assert ways["stock"] == ways["stock + checkpointing"] == "exact"
    assert ways["memopt"] == ways["memopt + checkpointing"] == accuracy


@pytest.mark.rotates(4)
def test_masks_of_dropouts_are_named_with_the_setting_that_saves_seeds() -> None:
    config = named_config(
        "bert", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0, max_position_embeddings=2048
    )
    about = Step(config, Training(4, 1024), sites_of(config), load_recipe("exact-unfolded"))
    found = headline(Request("a model"), gpu="540MiB", step=about)
    (advice,) = (each for each in found.remedies if "dropouts.method=seed" in each)
    assert "dropout masks" in advice
    seeded = replace(about, recipe=load_recipe("exact-unfolded", ("dropouts.method=seed",)))
    assert predict(seeded).peak.nbytes < predict(about).peak.nbytes


def test_where_only_fewer_rows_fit_their_number_is_named() -> None:
    """Images have no shorter sequence."""
    config = named_config("vit")
    about = Step(config, Training(10**5, None), sites_of(config), load_recipe("exact-unfolded"))
    found = headline(Request("a model"), gpu="600MiB", step=about)
    (way,) = (way for way in found.ways() if way.name == "memopt + checkpointing")
    assert way.batch is not None
    assert found.remedies[0] == f"memopt + checkpointing fits with --batch {way.batch.value}"


def test_a_way_that_cannot_be_traced_is_no_advice_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    config = named_config("vit")
    about = Step(config, Training(10**5, None), sites_of(config), load_recipe("exact-unfolded"))
    assert "fits with --batch" in headline(Request("a model"), gpu="600MiB", step=about).remedies[0]


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


@pytest.mark.rotates(4)
def test_full_tuning_that_does_not_fit_for_its_gradients_alone_is_advised_to_release_them() -> None:
    config = named_config("llama", hidden_size=1024, intermediate_size=4096, vocab_size=8192)
    about = Step(config, Training(1, 64), sites_of(config), load_recipe("exact-unfolded"))
    need = predict(about, Setup(release_gradients=True)).needs // MIB + 2
    assert predict(about).needs > need * MIB
    remedy = headline(Request("a model"), gpu=f"{need}MiB", step=about).remedies[0]
    assert "with --release-gradients (no clipping) fits" in remedy
    assert remedy.endswith("memopt.release_gradients(optimizer)")
    scaled = replace(about, training=replace(about.training, precision="fp16"))
    assert "release" not in str(headline(Request("a model"), gpu=f"{need}MiB", step=scaled).remedies)
    adapters = replace(about, training=replace(about.training, train="lora"))
    assert "release" not in str(headline(Request("a model"), gpu="530MiB", step=adapters).remedies)


LONG = {"long-context": (), "long-context, keep=none": ("checkpointing.keep=none",)}


@pytest.mark.rotates(4)
def test_the_longest_sequence_of_each_way_is_that_of_its_predictions() -> None:
    config = named_config("llama", max_position_embeddings=2048, intermediate_size=1024)
    about = Step(config, Training(1, 512), sites_of(config), load_recipe("exact-unfolded"))
    found = headline(Request("a model"), gpu="600MiB", step=about, longest=True)
    longest = {way.name: way.seq for way in found.ways() if way.seq is not None}
    assert len(longest) == len(list(found.ways()))
    assert all(way.batch is None for way in found.ways())
    assert longest["stock"].value < longest["memopt"].value < longest["long-context"].value
    for name, settings in LONG.items():
        way = replace(about, recipe=load_recipe("long-context", settings))
        fits, one_more = (
            predict(replace(way, training=Training(1, tokens)), Setup(memory=600 * MIB))
            for tokens in (longest[name].value, longest[name].value + 128)
        )
        assert fits.needs <= 600 * MIB < one_more.needs
        assert longest[name].offloaded == pytest.approx(fits.offloaded, rel=0.01)
    assert not longest["memopt + checkpointing"].offloaded
    assert any("made for 2048 positions; beyond them" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "positions"),
    [("gpt2", "n_positions"), pytest.param("bert", "max_position_embeddings", marks=pytest.mark.slow)],
)
@pytest.mark.rotates(4)
def test_a_table_of_positions_ends_the_search(name: str, positions: str) -> None:
    config = named_config(name, **{positions: 200})
    assert not has_table_of_positions(build_meta(named_config("llama", vocab_size=200, max_position_embeddings=200)))
    about = Step(config, Training(1, 64), sites_of(config), load_recipe("exact-unfolded"))
    found = headline(Request("a model"), gpu="24GiB", step=about, longest=True)
    assert {str(way.seq) for way in found.ways()} == {"200"}
    assert any("made for 200 positions; it takes no more" in note for note in found.notes)


def test_what_has_no_length_or_no_card_has_no_longest_sequence() -> None:
    config = named_config("vit")
    about = Step(config, Training(1, None), sites_of(config), load_recipe("exact-unfolded"))
    with pytest.raises(UsageError, match="reads no tokens, so it has no longest sequence"):
        headline(Request("a model"), gpu="24GiB", step=about, longest=True)
    with pytest.raises(UsageError, match="needs a card, and inputs of any length"):
        headline(Request("a model"), step=about, longest=True)


def test_a_way_that_the_model_refuses_is_left_out_with_the_reason() -> None:
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4,
        architectures=["ResNetForImageClassification"],
    )  # fmt: skip
    about = Step(config, Training(1, None), sites_of(config), load_recipe("exact-unfolded"))
    found = headline(Request("a model"), gpu="1GiB", step=about)
    assert "checkpointing" not in str([way.name for way in found.others])
    (why, _) = (each for each in found.notes if each.startswith("Not in the table: ") and "support" in each)
    assert "stock + checkpointing. ResNetForImageClassification does not support" in why


@pytest.mark.rotates(4)
def test_the_search_ends_at_the_last_batch_that_the_model_takes() -> None:
    config = GPT2Config(
        vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, architectures=["GPT2ForSequenceClassification"]
    )
    about = Step(config, Training(1, 16), sites_of(config), load_recipe("exact-unfolded"))
    found = headline(Request("a model"), gpu="1GiB", step=about)
    assert str(found.patched.batch) == "1 or more"
    assert columns(found)["batch"](found.patched)[0] == "1+"


def test_tensors_of_tokens_and_a_width_of_the_same_size_are_not_taken_for_attention() -> None:
    config = named_config("llama", hidden_size=256, vocab_size=64, max_position_embeddings=256)
    about = Step(config, Training(1, 256), sites_of(config), load_recipe("exact-unfolded"))
    need = predict(about).needs
    found = headline(Request("a model"), gpu=f"{need // MIB}MiB", step=about)
    assert not found.patched.fits(need // MIB * MIB)
    assert "tokens x tokens" not in str(found.remedies)


def test_no_block_of_a_step_is_dropped() -> None:
    steps = []
    for layerdrop in (0.0, 0.9):
        config = BartConfig(
            vocab_size=64, d_model=16, encoder_layers=3, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
            encoder_layerdrop=layerdrop, architectures=["BartForConditionalGeneration"],
        )  # fmt: skip
        steps.append(Step(config, Training(2, 16), sites_of(config), load_recipe("exact-unfolded")))
    assert predict(steps[1]).peak.nbytes == predict(steps[0]).peak.nbytes
    assert steps[1].config.encoder_layerdrop == 0.9
