"""The families that people ask for by name, their default configs made small: which norms are folded, and on demand.

The table is the regression bar of the walk. What it does not list is refused: a residual add, a rotary embedding, a
tie, a bias that has nowhere to go.
"""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from memopt.walk.calls.twin import build_twin
from memopt.walk.observe import walk_config
from tests.walk.test_families import cautioned, folded

pytestmark = pytest.mark.slow

Templates = tuple[str, ...]
_DECODER: Templates = ("model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm")
_GEMMA: Templates = ("model.layers.*.input_layernorm", "model.layers.*.pre_feedforward_layernorm")
_LOW_RANK: Templates = ("model.layers.*.self_attn.q_a_layernorm", "model.layers.*.self_attn.kv_a_layernorm")
_CLIP: Templates = ("encoder.layers.*.layer_norm1", "encoder.layers.*.layer_norm2")


def _inside(prefix: str, *templates: str) -> Templates:
    return tuple(f"{prefix}.{template}" for template in templates)


#: Model type -> (norms folded by default, norms folded only where hidden states may change), indices left open.
FAMILIES: dict[str, tuple[Templates, Templates]] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "phi3", "llama4_text", "gpt_oss", "mixtral", "qwen2_moe"),
        (_DECODER, ("model.norm",)),
    ),
    "qwen3_next": ((*_DECODER, "model.layers.*.linear_attn.norm"), ("model.norm",)),
    "deepseek_v3": ((*_DECODER, *_LOW_RANK), ("model.norm",)),
    "gemma": (_DECODER, ()),
    "gemma2": (_GEMMA, ()),
    "gemma3_text": (_GEMMA, ()),
    "olmo2": ((), ("model.norm",)),
    "gpt_neox": (_inside("gpt_neox.layers.*", "input_layernorm", "post_attention_layernorm"), ()),
    "mamba": (("backbone.layers.*.norm",), ()),
    "mamba2": (("backbone.layers.*.norm", "backbone.layers.*.mixer.norm"), ("backbone.norm_f",)),
    "gpt2": (("transformer.h.*.ln_1", "transformer.h.*.ln_2"), ()),
    "bloom": (_inside("transformer.h.*", "input_layernorm", "post_attention_layernorm"), ()),
    "falcon": ((), ()),
    "opt": (_inside("model.decoder.layers.*", "self_attn_layer_norm", "final_layer_norm"), ()),
    "bert": ((), ("bert.encoder.layer.*.output.LayerNorm",)),
    "roberta": ((), ("roberta.encoder.layer.*.output.LayerNorm",)),
    "deberta": ((), ("deberta.encoder.layer.*.output.LayerNorm",)),
    "deberta-v2": ((), ("deberta.encoder.layer.*.output.LayerNorm",)),
    "modernbert": (_inside("model.layers.*", "attn_norm", "mlp_norm"), ("model.final_norm",)),
    "wav2vec2": ((), ("wav2vec2.feature_projection.layer_norm",)),
    "bart": ((), ("model.encoder.layers.*.final_layer_norm",)),
    "t5": (
        ("encoder.block.*.layer.*.layer_norm", "decoder.block.*.layer.*.layer_norm"),
        ("encoder.final_layer_norm",),
    ),
    "whisper": (
        (
            *_inside("model.encoder.layers.*", "self_attn_layer_norm", "final_layer_norm"),
            *_inside("model.decoder.layers.*", "self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
        ),
        ("model.encoder.layer_norm",),
    ),
    "vit": (_inside("vit.layers.*", "layernorm_before", "layernorm_after"), ("vit.layernorm",)),
    "dinov2": (_inside("dinov2.encoder.layer.*", "norm1", "norm2"), ("dinov2.layernorm",)),
    "swin": (("swin.encoder.layers.*.blocks.*.layernorm_after",), ()),
    "clip_vision_model": (_CLIP, ()),
    "siglip_vision_model": ((*_CLIP, "head.layernorm"), ()),
    "qwen2_vl": (
        (
            *_inside("model.language_model.layers.*", "input_layernorm", "post_attention_layernorm"),
            *_inside("model.visual", "blocks.*.norm1", "blocks.*.norm2", "merger.ln_q"),
        ),
        ("model.language_model.norm",),
    ),
    "llava": (
        (
            *_inside("model.language_model.layers.*", "input_layernorm", "post_attention_layernorm"),
            *_inside("model.vision_tower", *_CLIP),
        ),
        ("model.language_model.norm",),
    ),
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_named_family_is_folded_as_far_as_it_can_be(model_type: str) -> None:
    sites = walk_config(build_twin(CONFIG_MAPPING[model_type]()).config)
    assert (folded(sites), set(cautioned(sites))) == tuple(map(set, FAMILIES[model_type]))
    assert all(norm.executed for norm in sites.norms)
    assert all(norm.proof is not None and norm.proof <= 1e-10 for norm in sites.norms if norm.foldable_with_cautions)
