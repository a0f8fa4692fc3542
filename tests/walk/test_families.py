"""Whole walks of tiny configs: verdicts, consumers, gated MLPs, activations, dropouts, loss heads and blocks."""

from __future__ import annotations

import functools
import re

import pytest
import transformers
from torch import nn

from memopt.walk.models.build import build_meta
from memopt.walk.observe import walk_config
from memopt.walk.sites import NormSite, Sites
from tests.factories import NAMES, tiny_config

#: What was found by the sources as they are is not looked for again.
pytestmark = pytest.mark.walks(shared=True)

FAMILIES = (*NAMES, "mixtral")


def config(family: str) -> transformers.PretrainedConfig:
    if family != "mixtral":
        return tiny_config(family)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 67}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2)


@functools.cache
def walked(family: str) -> Sites:
    return walk_config(config(family))


def template(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def folded(sites: Sites) -> set[str]:
    return {template(norm.name) for norm in sites.norms if norm.foldable}


def cautioned(sites: Sites) -> dict[str, str]:
    """Norms that are folded only where hidden states may change."""
    return {
        template(norm.name): "; ".join(norm.cautions)
        for norm in sites.norms
        if norm.foldable_with_cautions and norm.cautions
    }


def obstacles(sites: Sites) -> dict[str, str]:
    return {template(norm.name): "; ".join(norm.fold_obstacles) for norm in sites.norms if norm.fold_obstacles}


def norm(sites: Sites, name: str) -> NormSite:
    return next(site for site in sites.norms if site.name == name)


Words = dict[str, str]
#: Family -> (norms that are folded, norms that are with a caution and words of it, norms that are refused and words of
#: the reason), indices left open.
VERDICTS: dict[str, tuple[set[str], Words, Words]] = {
    "llama": (
        {"model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm"},
        {"model.norm": "it is the last norm"},
        {},
    ),
    "qwen3": (
        {"model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm"},
        {"model.norm": "it is the last norm"},
        {
            "model.layers.*.self_attn.q_norm": "rotary embedding",
            "model.layers.*.self_attn.k_norm": "rotary embedding",
        },
    ),
    "gemma2": (
        {"model.layers.*.input_layernorm", "model.layers.*.pre_feedforward_layernorm"},
        {},
        {
            "model.layers.*.post_attention_layernorm": "goes to a residual add",
            "model.layers.*.post_feedforward_layernorm": "goes to a residual add",
            "model.norm": "lm_head.weight is tied to model.embed_tokens.weight",
        },
    ),
    "gpt2": (
        {"transformer.h.*.ln_1", "transformer.h.*.ln_2"},
        {},
        {"transformer.ln_f": "lm_head.weight is tied to transformer.wte.weight"},
    ),
    "bert": (
        set(),
        {"bert.encoder.layer.*.output.LayerNorm": "returned as last_hidden_state by bert"},
        {
            "bert.embeddings.LayerNorm": "also goes to a residual add",
            "bert.encoder.layer.*.attention.output.LayerNorm": "also goes to a residual add",
            "bert.encoder.layer.*.output.LayerNorm": "also goes to a residual add",
            "cls.predictions.transform.LayerNorm": "is tied to bert.embeddings.word_embeddings.weight",
        },
    ),
    "roberta": (
        set(),
        {"roberta.encoder.layer.*.output.LayerNorm": "returned as last_hidden_state by roberta"},
        {
            "roberta.embeddings.LayerNorm": "also goes to a residual add",
            "roberta.encoder.layer.*.attention.output.LayerNorm": "also goes to a residual add",
            "roberta.encoder.layer.*.output.LayerNorm": "also goes to a residual add",
            "lm_head.layer_norm": "is tied to roberta.embeddings.word_embeddings.weight",
        },
    ),
    "vit": (
        {"vit.layers.*.layernorm_before", "vit.layers.*.layernorm_after"},
        {"vit.layernorm": "returned as last_hidden_state by vit"},
        {},
    ),
    "t5": (
        {"encoder.block.*.layer.*.layer_norm", "decoder.block.*.layer.*.layer_norm"},
        {"encoder.final_layer_norm": "returned as encoder_last_hidden_state by the model"},
        {"decoder.final_layer_norm": "is tied to shared.weight"},
    ),
    "opt": (
        {"model.decoder.layers.*.self_attn_layer_norm", "model.decoder.layers.*.final_layer_norm"},
        {},
        {"model.decoder.final_layer_norm": "lm_head.weight is tied to model.decoder.embed_tokens.weight"},
    ),
}
VERDICTS |= dict.fromkeys(("mistral", "phi3", "mixtral"), VERDICTS["llama"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.rotates(3)
def test_norms_are_folded_or_refused_as_they_should(family: str) -> None:
    sites = walked(family)
    expected, *reasons = VERDICTS[family]
    assert folded(sites) == expected
    for found, words in zip((cautioned(sites), obstacles(sites)), reasons, strict=True):
        assert set(found) == set(words)
        assert not {name: found[name] for name in words if words[name] not in found[name]}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_accepted_fold_is_proved(family: str) -> None:
    for site in walked(family).norms:
        assert site.proof is None or site.proof <= 1e-10
        assert (site.proof is not None) == site.foldable_with_cautions


@pytest.mark.parametrize("family", FAMILIES)
def test_every_call_ran_and_no_norm_was_missed(family: str) -> None:
    sites = walked(family)
    assert sites.traces
    assert all(outcome == "ok" for _, outcome in sites.traces)
    assert all(site.executed for site in sites.norms)
    assert sites.skipped == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_but_lookup_tables_is_a_linear(family: str) -> None:
    model = build_meta(config(family))
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    added = {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"}
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() >= 2} - tables - added
    linears = {linear.parameter for linear in walked(family).linears}
    assert matrices - linears == set()


#: Family -> (gated MLPs, their activation).
GATED = {
    "llama": (2, "silu"),
    "mistral": (2, "silu"),
    "qwen3": (2, "silu"),
    "gemma2": (2, "gelu_tanh"),
    "phi3": (2, "silu"),
}
GATED |= {"mixtral": (2, "silu"), "t5": (4, "gelu_tanh")}


@pytest.mark.parametrize("family", FAMILIES)
def test_gated_mlps_are_found_with_all_four_parts(family: str) -> None:
    sites = walked(family)
    count, kind = GATED.get(family, (0, ""))
    assert len(sites.gated_mlps) == count
    linears = {linear.parameter for linear in sites.linears}
    for site in sites.gated_mlps:
        assert site.activation == kind
        assert {site.gate, site.up, site.down} <= linears
        assert (site.gate == site.up) == (family in {"phi3", "mixtral"})
        assert all(str(weight).startswith(site.name + ".") for weight in (site.gate, site.up, site.down))


#: Family -> (kind, operations) of the MLP's activation and whether the next linear reads it directly.
ACTIVATIONS = {
    "gpt2": ("gelu_tanh", 8, True),
    "bert": ("gelu_erf", 1, True),
    "roberta": ("gelu_erf", 1, True),
    "vit": ("gelu_erf", 1, True),
    "opt": ("relu", 1, True),
    "llama": ("silu", 1, False),
    "gemma2": ("gelu_tanh", 1, False),
    "t5": ("gelu_tanh", 8, False),
}


@pytest.mark.parametrize("family", ACTIVATIONS)
def test_mlp_activations_are_found_with_what_they_feed(family: str) -> None:
    sites = walked(family)
    kind, operations, feeds_linear = ACTIVATIONS[family]
    inside = [a for a in sites.activations if any(a.name.startswith(block + ".") for block in sites.blocks)]
    assert len(inside) == len(sites.blocks)
    for site in inside:
        assert (site.kind, site.operations, site.is_module) == (kind, operations, True)
        assert site.source in {linear.parameter for linear in sites.linears}
        assert (site.next_linear is not None) == feeds_linear
        assert (site.gated_mlp is not None) == (family in GATED)


def test_an_activation_function_in_a_forward_is_found() -> None:
    (site,) = [a for a in walked("roberta").activations if not a.is_module]
    assert (site.name, site.kind, site.source) == ("lm_head", "gelu_erf", "lm_head.dense.weight")


def test_ungated_t5_feeds_its_relu_to_the_next_linear() -> None:
    sites = walk_config(tiny_config("t5", feed_forward_proj="relu", dropout_rate=0.1))
    assert sites.gated_mlps == ()
    assert {a.kind for a in sites.activations} == {"relu"}
    assert all(str(a.next_linear).endswith("DenseReluDense.wo.weight") for a in sites.activations)


def test_consumers_of_a_transposed_weight_have_axis_zero() -> None:
    site = norm(walked("gpt2"), "transformer.h.0.ln_1")
    (consumer,) = site.consumers
    assert (consumer.parameter, consumer.axis) == ("transformer.h.0.attn.c_attn.weight", 0)
    assert consumer.bias == "transformer.h.0.attn.c_attn.bias"
    assert consumer.channels is None


def test_consumers_of_a_moe_norm_are_router_and_experts() -> None:
    site = norm(walked("mixtral"), "model.layers.0.post_attention_layernorm")
    assert {(c.parameter, c.axis) for c in site.consumers} == {
        ("model.layers.0.mlp.gate.weight", 1),
        ("model.layers.0.mlp.experts.gate_up_proj", 2),
    }


def test_encoder_output_feeds_keys_and_values_of_every_decoder_block() -> None:
    consumers = norm(walked("t5"), "encoder.final_layer_norm").consumers
    assert {template(c.parameter) for c in consumers} == {
        "decoder.block.*.layer.*.EncDecAttention.k.weight",
        "decoder.block.*.layer.*.EncDecAttention.v.weight",
    }


def test_linears_tell_what_feeds_them_and_who_shares_their_input() -> None:
    linears = {linear.parameter: linear for linear in walked("llama").linears}
    gate = linears["model.layers.0.mlp.gate_proj.weight"]
    assert gate.fed_by == "model.layers.0.post_attention_layernorm"
    assert gate.input_shared_with == ("model.layers.0.mlp.up_proj.weight",)
    assert linears["model.layers.0.mlp.down_proj.weight"].fed_by == "model.layers.0.mlp"
    assert linears["model.layers.0.self_attn.o_proj.weight"].input_shared_with == ()


@pytest.mark.parametrize(
    ("family", "head", "tied_to"),
    [
        ("llama", "lm_head.weight", None),
        ("gemma2", "lm_head.weight", "model.embed_tokens.weight"),
        ("gpt2", "lm_head.weight", "transformer.wte.weight"),
        ("bert", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("t5", "lm_head.weight", "shared.weight"),
    ],
)
def test_loss_head_is_found_with_its_tie(family: str, head: str, tied_to: str | None) -> None:
    found = walked(family).loss_head
    assert found is not None
    assert (found.parameter, found.tied_to, found.vocab_size) == (head, tied_to, 67)


def test_a_classifier_of_images_is_left_with_a_reason() -> None:
    sites = walked("vit")
    assert sites.loss_head is None
    [head] = sites.loss_heads
    assert (head.module, head.obstacle) == (
        "classifier",
        "its logits are not a row of classes for each token, and small",
    )


@pytest.mark.parametrize(
    ("family", "settings", "operations"),
    [
        ("llama", {}, ()),
        ("gemma2", {"final_logit_softcapping": 7.5}, ("cap 7.5",)),
        ("Granite", {"logits_scaling": 4.0}, ("scale 0.25",)),
        ("Cohere", {"logit_scale": 0.0625}, ("scale 0.0625",)),
    ],
)
def test_what_is_done_to_logits_is_said(family: str, settings: dict[str, float], operations: tuple[str, ...]) -> None:
    if family in NAMES:
        config = tiny_config(family, **settings)
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 67}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 1, "pad_token_id": 0}
        config = getattr(transformers, f"{family}Config")(**sizes, **heads, **settings)
    head = walk_config(config).loss_head
    assert head is not None
    assert head.operations == operations


def test_a_ctc_loss_reads_all_logits_and_two_heads_are_two_rows() -> None:
    speech = transformers.Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, conv_dim=(32, 32),
        conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, vocab_size=40, architectures=["Wav2Vec2ForCTC"],
    )  # fmt: skip
    sites = walk_config(speech)
    assert sites.loss_head is None
    assert sites.loss_heads[0].obstacle.startswith("its loss is a CTC loss")
    both = walk_config(tiny_config("bert", architectures=["BertForPreTraining"]))
    assert [(head.module, bool(head.obstacle)) for head in both.loss_heads] == [
        ("cls.predictions.decoder", False),
        ("cls.seq_relationship", True),
    ]


@pytest.mark.parametrize(
    ("family", "blocks"),
    [
        ("llama", ["model.layers.0", "model.layers.1"]),
        ("gpt2", ["transformer.h.0", "transformer.h.1", "transformer.h.2"]),
        ("bert", ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
        ("vit", ["vit.layers.0", "vit.layers.1"]),
        ("t5", ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]),
        ("mixtral", ["model.layers.0", "model.layers.1"]),
    ],
)
def test_blocks_are_listed_in_order_of_execution(family: str, blocks: list[str]) -> None:
    assert list(walked(family).blocks) == blocks


def test_dropouts_are_found_with_their_probability() -> None:
    sites = walk_config(tiny_config("bert", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2))
    found = {template(d.name): (d.probability, d.is_module) for d in sites.dropouts}
    assert found["bert.embeddings.dropout"] == (0.1, True)
    assert found["bert.encoder.layer.*.output.dropout"] == (0.1, True)
    # SDPA draws the attention mask itself; the module nn.Dropout(0.2) beside it says the same.
    assert (0.2, False) in found.values() or (0.2, True) in found.values()


def test_dropout_between_norm_and_linear_refuses_the_bias() -> None:
    sites = walk_config(tiny_config("bert", hidden_dropout_prob=0.1))
    assert "mask or dropout" in obstacles(sites)["bert.embeddings.LayerNorm"]


def test_gemma_norms_have_an_offset_and_cast_after_the_scale() -> None:
    site = norm(walked("gemma2"), "model.layers.0.input_layernorm")
    assert (site.kind, site.offset, site.cast, site.hidden_size) == ("rms", 1, "after", 64)


def test_norms_without_weights_are_found() -> None:
    sites = walk_config(
        transformers.OlmoConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=67
        )
    )
    assert len(sites.norms) == 5
    assert all((n.kind, n.weight, n.hidden_size, n.eps) == ("layer", None, 64, 1e-5) for n in sites.norms)
    assert not any(n.foldable for n in sites.norms)
    assert {c.parameter.split(".")[-2] for c in sites.norms[0].consumers} == {"q_proj", "k_proj", "v_proj"}


def test_inner_blocks_of_stages_are_the_blocks() -> None:
    sites = walk_config(
        transformers.SwinConfig(image_size=64, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4)
    )
    assert sites.blocks[:3] == (
        "swin.encoder.layers.0.blocks.0",
        "swin.encoder.layers.0.blocks.1",
        "swin.encoder.layers.1.blocks.0",
    )
    # An image that no window divides is padded with zeros, which take no bias.
    assert "padding" in obstacles(sites)["swin.encoder.layers.*.blocks.*.layernorm_before"]
    assert "swin.encoder.layers.*.blocks.*.layernorm_after" in folded(sites)


def test_a_model_whose_loss_has_no_name_is_not_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers would warn of it, and give the loss of a language model."""
    asked: list[str] = []
    monkeypatch.setattr(transformers.PreTrainedModel, "loss_function", property(lambda self: asked.append("loss")))
    walk_config(tiny_config("bert", architectures=["BertModel"]))
    assert not asked
