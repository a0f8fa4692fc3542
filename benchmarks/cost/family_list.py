"""The model families that docs/coverage.md begins with: whose widths stand for them, and how large their steps are.

Order: by the number of derivatives that their publishers' models have on the hub (`PUBLISHERS`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from memopt.walk.models.config import config_nodes
from memopt.walk.models.shrink.depth import with_depth

#: Most bytes of a layer, of those of its floor.
LIMIT = 1.15
#: Publisher -> models on the hub that were made of its models: fine-tuned, adapters, merged, quantised. Source: the
#: data set irenesolaiman/hf-derivatives-monthly on the hub, whose table has the first 20 organisations.
PUBLISHERS = {
    "Qwen": 134_553,
    "google": 74_703,
    "meta": 38_818,
    "huggingface": 19_085,
    "openai": 16_596,
    "microsoft": 16_501,
    "facebook": 14_116,
    "mistralai": 13_554,
    "deepseek-ai": 7_439,
}


@dataclass(frozen=True)
class Family:
    """A family: the config of one of its models, and how large its steps are."""

    name: str
    model: str
    """The checkpoint whose widths these are."""
    publisher: str
    """Its account on the hub, or the one whose derivatives count."""
    model_type: str
    architecture: str
    fields: dict[str, Any] = field(default_factory=dict)
    """What differs from the default config."""
    depths: tuple[int, int] = (2, 3)
    """Layers of the two models whose difference is a layer, or a group of layers."""
    sizes: tuple[tuple[int, int | None], tuple[int, int | None]] = ((1, 4096), (1, 32768))
    """(rows, tokens) of about 4k and 32k tokens; None: what an image or a sound has."""
    note: str = ""

    def config(self, depth: int | None = None) -> PreTrainedConfig:
        """The config, without dropout; of `depth` layers."""
        fields = dict(self.fields)
        if depth is not None and "layer_types" in fields:
            fields |= {"layer_types": fields["layer_types"][:depth], "num_hidden_layers": depth}
        config = AutoConfig.for_model(self.model_type, **fields)
        config.architectures = [self.architecture]
        for node in config_nodes(config):
            node.use_cache = False
            for name, value in list(vars(node).items()):
                if isinstance(value, float) and ("drop" in name or name == "mask_time_prob"):
                    setattr(node, name, 0.0)
        return config if depth is None else with_depth(config, depth)


_SUMS = (
    "A norm behind a sublayer keeps its x_hat, and the norm in front of the next one its own; the input of that one, "
    "a sum, could be computed from both summands."
)
#: Family -> what memopt keeps beyond its floor, from the storages of the trace (`Row.beyond`).
CAUSES = {
    **dict.fromkeys(("Gemma 2", "Gemma 3", "Gemma 3n", "Gemma 4", "GLM-4", "OLMo 2", "OLMo 3"), _SUMS),
    "T5": "The sum of position bias and mask, one in each stack and layer, which attention saves.",
    "DeBERTa-v3": "Scaled keys beside the keys, which another product reads; the mask and the places of the gathers, "
    "made in each layer.",
    "DINOv2": "A layer scale keeps the output that it scales; the sum behind it could be computed from that.",
    "DINOv3": "A layer scale keeps the output that it scales; the sum behind it could be computed from that.",
    "DeepSeek-V3": "Keys, joined with their rotated part, beside the product that they and the values are parts of.",
}


def _llama(hidden: int, mlp: int, layers: int, heads: int, kv: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "vocab_size": vocab, "max_position_embeddings": 40960, **more,
    }  # fmt: skip


_SHORT = ((8, 512), (64, 512))
_LM, _LONG = "ForCausalLM", {"max_position_embeddings": 40960}
_NEMOTRON = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
#: In the order of the derivatives of their publishers; within one, as people name them.
FAMILIES = (
    Family("Qwen3", "Qwen3-8B", "Qwen", "qwen3", f"Qwen3{_LM}", _llama(4096, 12288, 36, 32, 8, 151936, head_dim=128)),
    Family("Qwen2", "Qwen2.5-7B", "Qwen", "qwen2", f"Qwen2{_LM}", _llama(3584, 18944, 28, 28, 4, 152064)),
    Family("Qwen3.5", "Qwen3.5-9B", "Qwen", "qwen3_5_text", f"Qwen3_5{_LM}", _LONG, (4, 8)),
    Family("Qwen3.5-MoE", "Qwen3.5-35B-A3B", "Qwen", "qwen3_5_moe_text", f"Qwen3_5Moe{_LM}", _LONG, (4, 8)),
    Family(
        "Qwen3-MoE", "Qwen3-30B-A3B", "Qwen", "qwen3_moe", f"Qwen3Moe{_LM}",
        _llama(2048, 6144, 48, 32, 4, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128,
               num_experts_per_tok=8),
    ),
    Family("Qwen3-Next", "Qwen3-Next-80B-A3B", "Qwen", "qwen3_next", f"Qwen3Next{_LM}", _LONG, (4, 8)),
    Family("Qwen2.5-VL", "Qwen2.5-VL-7B, language blocks", "Qwen", "qwen2_5_vl_text", "Qwen2_5_VLTextModel",
           _llama(3584, 18944, 28, 28, 4, 152064)),
    Family("Qwen3-VL", "Qwen3-VL-8B, language blocks", "Qwen", "qwen3_vl_text", "Qwen3VLTextModel",
           _llama(4096, 12288, 36, 32, 8, 151936, head_dim=128)),
    Family("BERT", "bert-base", "google", "bert", "BertForMaskedLM", sizes=_SHORT),
    Family("Gemma 3", "gemma-3-4b", "google", "gemma3_text", f"Gemma3{_LM}",
           _llama(2560, 10240, 34, 8, 4, 262208, head_dim=256, sliding_window=1024), (6, 12)),
    Family("Gemma 2", "gemma-2-2b", "google", "gemma2", f"Gemma2{_LM}", _LONG, (2, 4)),
    Family("Gemma 3n", "gemma-3n-E4B", "google", "gemma3n_text", f"Gemma3n{_LM}",
           {"num_kv_shared_layers": 0, **_LONG}, (5, 10),
           note="No layer takes the keys and values of another."),
    Family("Gemma 4", "default config", "google", "gemma4_text", f"Gemma4{_LM}", _LONG, (6, 12)),
    Family("ViT", "vit-base-patch16-224", "google", "vit", "ViTForImageClassification",
           sizes=((21, None), (166, None))),
    Family("T5", "flan-t5-base, one block of each stack", "google", "t5", "T5ForConditionalGeneration",
           {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12,
            "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, sizes=_SHORT),
    Family("SigLIP", "siglip-base-patch16-224, one block of each tower", "google", "siglip", "SiglipModel",
           sizes=((16, None), (126, None))),
    Family("Llama 3", "Llama-3.1-8B", "meta", "llama", f"Llama{_LM}", _llama(4096, 14336, 32, 32, 8, 128256)),
    Family("SmolLM3", "SmolLM3-3B", "huggingface", "smollm3", f"SmolLM3{_LM}",
           _llama(2048, 11008, 36, 16, 4, 128256), (4, 8)),
    Family("DistilBERT", "distilbert-base", "huggingface", "distilbert", "DistilBertForMaskedLM", sizes=_SHORT),
    Family("Whisper", "whisper-small, one block of each stack", "openai", "whisper", "WhisperForConditionalGeneration",
           {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12,
            "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072},
           sizes=((2, 448), (17, 448))),
    Family("gpt-oss", "gpt-oss-20b", "openai", "gpt_oss", f"GptOss{_LM}",
           {"num_hidden_layers": 24, "num_local_experts": 32, **_LONG}, (2, 4)),
    Family("CLIP", "clip-vit-base-patch32, one block of each tower", "openai", "clip", "CLIPModel",
           sizes=((32, None), (256, None))),
    Family("GPT-2", "gpt2", "openai", "gpt2", "GPT2LMHeadModel", sizes=((4, 1024), (32, 1024))),
    Family("Phi-3", "Phi-3-mini", "microsoft", "phi3", f"Phi3{_LM}", _llama(3072, 8192, 32, 32, 32, 32064)),
    Family("Phi-4", "phi-4", "microsoft", "phi3", f"Phi3{_LM}", _llama(5120, 17920, 40, 40, 10, 100352)),
    Family("DeBERTa-v3", "deberta-v3-base", "microsoft", "deberta-v2", "DebertaV2ForMaskedLM",
           {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
            "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm",
            "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": -1,
            "position_biased_input": False}, sizes=_SHORT),
    Family("MPNet", "mpnet-base", "microsoft", "mpnet", "MPNetForMaskedLM", sizes=_SHORT),
    Family("MiniLM", "MiniLM-L6-H384", "microsoft", "bert", "BertForMaskedLM",
           {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
           sizes=_SHORT),
    Family("RoBERTa", "xlm-roberta-base", "facebook", "xlm-roberta", "XLMRobertaForMaskedLM",
           {"vocab_size": 250002, "max_position_embeddings": 514}, sizes=_SHORT),
    Family("wav2vec 2.0", "wav2vec2-base", "facebook", "wav2vec2", "Wav2Vec2ForCTC", sizes=((8, None), (64, None))),
    Family("BART", "bart-base, one block of each stack", "facebook", "bart", "BartForConditionalGeneration",
           {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
            "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "vocab_size": 50265},
           sizes=_SHORT),
    Family("DINOv2", "dinov2-base", "facebook", "dinov2", "Dinov2ForImageClassification",
           sizes=((16, None), (128, None))),
    Family("DINOv3", "default config", "facebook", "dinov3_vit", "DINOv3ViTModel", sizes=((16, None), (128, None))),
    Family("Mistral", "Mistral-7B-v0.3", "mistralai", "mistral", f"Mistral{_LM}",
           _llama(4096, 14336, 32, 32, 8, 32768, sliding_window=None)),
    Family("Ministral", "Ministral-8B-2410", "mistralai", "ministral", f"Ministral{_LM}",
           _llama(4096, 12288, 36, 32, 8, 131072, head_dim=128), (4, 8)),
    Family("Mixtral", "Mixtral-8x7B", "mistralai", "mixtral", f"Mixtral{_LM}",
           _llama(4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2)),
    Family("DeepSeek-V3", "DeepSeek-V3", "deepseek-ai", "deepseek_v3", f"DeepseekV3{_LM}", _LONG, (4, 5)),
    Family("GLM-4", "GLM-4-9B-0414", "other", "glm4", f"Glm4{_LM}", _LONG),
    Family("GLM-4.5", "GLM-4.5-Air", "other", "glm4_moe", f"Glm4Moe{_LM}", {"head_dim": 128, **_LONG}, (2, 3)),
    Family("Granite 4 hybrid", "granite-4.0-h-micro", "other", "granitemoehybrid", f"GraniteMoeHybrid{_LM}",
           _llama(2048, 2048, 40, 32, 8, 100352, num_local_experts=0, shared_intermediate_size=8192, mamba_n_heads=64,
                  mamba_d_state=128, position_embedding_type="nope",
                  layer_types=["attention" if at % 10 == 5 else "mamba" for at in range(40)]), (10, 20)),
    Family("Nemotron-H", "Nemotron-H-8B", "other", "nemotron_h", f"NemotronH{_LM}",
           {"num_hidden_layers": 52, **_LONG,
            "layer_types": [_NEMOTRON[kind] for kind in f"M-M-M-M{4 * '*-M-M-M-M-M'}-"]}, (8, 19)),
    Family("ModernBERT", "ModernBERT-base", "other", "modernbert", "ModernBertForMaskedLM", {}, (4, 7), _SHORT),
    Family("OLMo 2", "OLMo-2-7B", "other", "olmo2", f"Olmo2{_LM}", _llama(4096, 11008, 32, 32, 32, 100352)),
    Family("OLMo 3", "Olmo-3-7B", "other", "olmo3", f"Olmo3{_LM}",
           _llama(4096, 11008, 32, 32, 32, 100278, sliding_window=4096), (4, 8)),
    Family("LFM2", "LFM2-1.2B", "other", "lfm2", f"Lfm2{_LM}",
           _llama(2048, 12288, 16, 32, 8, 65536, full_attn_idxs=[2, 5, 8, 10, 12, 14]), (3, 6)),
    Family("Falcon-H1", "default config", "other", "falcon_h1", f"FalconH1{_LM}", _LONG),
    Family("Mamba 2", "mamba2-2.7b", "other", "mamba2", f"Mamba2{_LM}",
           {"hidden_size": 2560, "num_heads": 80, "n_groups": 1, "vocab_size": 50288}),
    Family("Bamba", "Bamba-9B", "other", "bamba", f"Bamba{_LM}",
           _llama(4096, 14336, 32, 32, 8, 128256, mamba_d_state=128, attn_layer_indices=[9, 18, 27]), (9, 18)),
    Family("Jamba", "Jamba-v0.1", "other", "jamba", f"Jamba{_LM}", _LONG, (8, 16)),
    Family("Kimi-Linear", "Kimi-Linear-48B-A3B", "other", "kimi_linear", f"KimiLinear{_LM}", _LONG, (5, 9)),
)  # fmt: skip
