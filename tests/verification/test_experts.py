"""Folders of models with experts: grouped products do not run in fp64, and a router may choose another expert."""

from __future__ import annotations

import pytest
import torch
import transformers

from memopt.pipeline import patch_checkpoint
from memopt.verification.run import verify
from tests.factories import VOCAB_SIZE, randomise_vectors_

_SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "intermediate_size": 32, "head_dim": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_OF_EACH = {"moe_intermediate_size": 16, "num_experts": 4}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
CONFIGS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": _OF_EACH,
    "Olmoe": {"num_experts": 4},
    "GptOss": {"num_local_experts": 4},
    "DeepseekV3": {**_LATENT, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                   "first_k_dense_replace": 0},
}  # fmt: skip


#: `make test-all` verifies these too: their experts are computed as those of Mixtral and DeepSeek-V3 are.
SLOW = {"Qwen3Moe", "Olmoe"}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CONFIGS]
)
@pytest.mark.rotates(3)
def test_a_folder_with_experts_is_verified(family, tmp_path):
    config = getattr(transformers, f"{family}Config")(**_SIZES | CONFIGS[family])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        randomise_vectors_(model)
    # PyTorch's shape rule for grouped products knows bf16 alone; GPT-OSS has fp32 norms, which run stock code.
    dtype = torch.float16 if family in ("Mixtral", "GptOss") else torch.bfloat16
    levels = {"Mixtral": "all", "GptOss": ["gradient", "memory"]}
    model.to(dtype).save_pretrained(tmp_path / "model")
    patch_checkpoint(tmp_path / "model", tmp_path / "out")
    verdict = verify(tmp_path / "out", level=levels.get(family, ["gradient"]))
    assert verdict.status == "pass", [check for check in verdict.checks if check.status != "pass"]
    (modules,) = (check for check in verdict.checks if check.id == "gradient.modules")
    assert modules.value < 1e-12
    planned = [check.value for check in verdict.checks if check.id == "memory.plan"]
    assert planned == [0.0] * (family in levels)
