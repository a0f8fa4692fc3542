"""Steps that are traced with inputs that memopt makes: which inputs, which labels, and whose values are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, GraniteMoeHybridConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from memopt.errors import ModelError
from memopt.reporting.build import compare_training
from memopt.trace.account import account
from memopt.trace.arguments import example_of, step_arguments
from memopt.trace.trace import trace, trace_account
from memopt.trace.training import Request, Step, Training
from memopt.walk.models.build import build_meta
from memopt.walk.observe import find_sites
from tests.factories import tiny_config
from tests.support.versions import needs

_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def towers() -> PreTrainedConfig:
    text = {**_SMALL, "vocab_size": 90, "eos_token_id": 80}
    vision = {**_SMALL, "image_size": 16, "patch_size": 8}
    return transformers.CLIPConfig(text_config=text, vision_config=vision, architectures=["CLIPModel"])


def patches() -> PreTrainedConfig:
    """A tower that reads the sizes of its images from an argument."""
    return transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(
        depth=2, embed_dim=32, hidden_size=32, num_heads=2, patch_size=4,
        architectures=["Qwen2VisionTransformerPretrainedModel"],
    )  # fmt: skip


def codec() -> PreTrainedConfig:
    """Its forward computes the padding of its convolutions from numbers that it holds as tensors."""
    return transformers.EncodecConfig(
        num_filters=4, hidden_size=16, codebook_size=32, codebook_dim=16, architectures=["EncodecModel"]
    )


def experts() -> PreTrainedConfig:
    """Its experts run one after the other, each on the tokens that the router sends to it."""
    return transformers.SwitchTransformersConfig(
        d_model=32, d_ff=64, d_kv=16, num_heads=2, num_layers=2, num_decoder_layers=2, num_experts=4, vocab_size=90,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, decoder_start_token_id=0,
        architectures=["SwitchTransformersForConditionalGeneration"],
    )  # fmt: skip


def windows() -> PreTrainedConfig:
    """Whether a token attends to all is read from the mask."""
    return transformers.LongformerConfig(
        **_SMALL, attention_window=8, vocab_size=90, max_position_embeddings=64, architectures=["LongformerForMaskedLM"]
    )


def crossed() -> PreTrainedConfig:
    """Layers of text read images by layers that are found by counting those."""
    vision = {"embed_dim": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.IdeficsConfig(
        **_SMALL, vocab_size=90, cross_layer_interval=1, use_resampler=False,
        vision_config={**vision, "image_size": 16, "patch_size": 8}, architectures=["IdeficsForVisionText2Text"],
    )  # fmt: skip


def decoder() -> PreTrainedConfig:
    """Meta tensors of any width pass its first convolution."""
    return AutoConfig.for_model(
        "mimi_decoder", **_SMALL, num_key_value_heads=2, head_dim=16, num_filters=4, codebook_size=32,
        upsample_groups=32, architectures=["MimiDecoderModel"],
    )  # fmt: skip


@pytest.mark.parametrize("config", [experts(), windows(), crossed()], ids=lambda config: config.model_type)
def test_a_forward_that_reads_what_it_computes_is_traced_with_its_loss(config: PreTrainedConfig) -> None:
    sites = find_sites(build_meta(config))
    assert sites.loss_head is not None
    example = example_of(config, sites, Training(batch=3, seq=24))
    assert "labels" in example.targets
    account = trace_account(Step(config, Training(batch=3, seq=24), sites))
    assert account.total > 0


@needs("transformers", "5.23", "has no decoder of Mimi alone")
def test_inputs_that_run_on_meta_alone_are_not_taken() -> None:
    config = decoder()
    example = example_of(config, find_sites(build_meta(config)), Training(batch=3, seq=24))
    assert tuple(example.inputs["latents"].shape)[:2] == (3, 32)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (towers(), "Inputs: pixel_values"),
        (patches(), "Inputs: hidden_states 3072 x 96; others with --inputs batch.pt."),
        pytest.param(codec(), "Inputs: input_values", marks=pytest.mark.slow),
    ],
    ids=["towers", "patches", "codec"],
)
def test_a_step_of_a_model_that_reads_no_text_alone_is_traced(
    config: PreTrainedConfig, said: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    found = compare_training(Request(tmp_path, batch=3, seq=24))
    assert 0 < found.after.total <= found.before.total
    assert found.before.step is not None
    assert found.after.step is not None
    assert [note.partition(" 3 x ")[0] for note in found.before.notes if note.startswith("Inputs: ")] == [said]


def test_parts_for_images_that_do_not_run_are_named(tmp_path: Path) -> None:
    text = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 32, "patch_size": 16}  # fmt: skip
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=63, architectures=["LlavaForConditionalGeneration"]
    )
    config.save_pretrained(tmp_path)
    found = compare_training(Request(tmp_path, batch=1, seq=24))
    said = [note for note in found.before.notes if note.startswith("Inputs: ")]
    assert len(said) == 1
    assert said[0].startswith("Inputs: text alone. The model's vision part does not run: ")


@pytest.mark.parametrize(("config", "is_read"), [(towers(), False), (patches(), True)], ids=["towers", "patches"])
def test_inputs_whose_values_are_read_are_distinguished_from_others(config: PreTrainedConfig, is_read: bool) -> None:
    sites = find_sites(build_meta(config))
    assert example_of(config, sites, Training(batch=3, seq=24)).is_read == is_read


def test_two_towers_return_their_own_loss() -> None:
    config = towers()
    example = example_of(config, find_sites(build_meta(config)), Training(batch=3, seq=24))
    assert dict(example.targets) == {"return_loss": True}
    assert {name: tuple(value.shape) for name, value in example.inputs.items() if name != "use_cache"} == {
        "input_ids": (3, 24),
        "attention_mask": (3, 24),
        "pixel_values": (3, 3, 16, 16),
    }


def test_two_towers_say_how_many_positions_they_have() -> None:
    config = towers()
    most = config.text_config.max_position_embeddings
    sites = find_sites(build_meta(config))
    with pytest.raises(ModelError, match=f"--seq {most + 1} is more than the {most} positions"):
        trace_account(Step(config, Training(2, most + 1), sites))


def test_a_model_that_reads_the_autocast_of_meta_has_its_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or leaves it, as rotary embeddings of many models do; torch raises for meta."""

    rotary = LlamaRotaryEmbedding.forward

    def reads(self: LlamaRotaryEmbedding, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        assert not torch.is_autocast_enabled(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            return rotary(self, x, position_ids)

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", reads)
    config = tiny_config("llama")
    sites = find_sites(build_meta(config))
    assert sites.ran
    assert set(example_of(config, sites, Training(batch=2, seq=16)).targets) == {"labels"}


def test_labels_are_found_where_the_forward_reads_its_mask() -> None:
    """On the meta device it cannot, so no labels are found by running there."""
    config = GraniteMoeHybridConfig(
        hidden_size=32, shared_intermediate_size=48, num_local_experts=0, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
        layer_types=2 * ["mamba", "attention", "mamba", "mamba"], position_embedding_type="nope",
    )  # fmt: skip
    config.architectures = ["GraniteMoeHybridForCausalLM"]
    sites = find_sites(build_meta(config))
    assert example_of(config, sites, Training(1, 24)).targets.keys() == {"labels"}


def test_a_forward_that_converts_a_part_to_the_dtype_that_it_has_runs_again_in_backward() -> None:
    """The router is converted in every forward; PyTorch would swap its fake weights for others."""
    config = experts()
    sites, training = find_sites(build_meta(config)), Training(2, 24, "fp32", checkpointing="full")
    parts = {event.storage.part for event in trace(Step(config, training, sites)).events}
    assert "recomputed" in parts


def test_codes_have_the_shape_that_the_forward_documents() -> None:
    config = transformers.MusicgenDecoderConfig(
        vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=2, num_codebooks=4,
        pad_token_id=0, bos_token_id=1,
        architectures=["MusicgenForCausalLM"],
    )  # fmt: skip
    sites = find_sites(build_meta(config))
    training = Training(2, 24, "fp32", dropout=False, cuda_kernels=False)
    example = example_of(config, sites, training)
    assert example.inputs["input_ids"].shape == (2 * 4, 24)
    model = transformers.MusicgenForCausalLM(config).eval()
    model.config.use_cache = False
    arguments = step_arguments(model, training, example, real=True)
    real = account(model, lambda: model(**arguments), sites=sites)
    assert trace_account(Step(config, training, sites)).total == real.total
