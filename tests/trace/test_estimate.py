"""The account from a config alone: the bytes of the real run, as a CUDA device would keep them."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import masking_utils

from memopt.errors import ModelError
from memopt.patches.apply import apply
from memopt.plan.plan import make_plan
from memopt.plan.recipe import Recipe, load_recipe
from memopt.prediction.subject import step_of
from memopt.torch_compat import FakeTensorMode
from memopt.trace import estimate, trace
from memopt.trace.account import Account
from memopt.trace.causes import EXPERTS, EXPERTS_NOTE
from memopt.trace.emulate import unpadded_masks
from memopt.trace.fake import make_fake
from memopt.trace.trace import trace_account
from memopt.trace.training import Precision, Request, Step, Training
from memopt.walk.models.build import build_meta
from memopt.walk.models.shrink.config import shrunken
from memopt.walk.observe import find_sites
from memopt.walk.sites import Sites
from tests.factories import tiny_inputs, tiny_model
from tests.trace.builders import named_config, real_account, sites_of
from tests.zoo.build import small_config

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
BLOCKS_8B = Sites(
    model_class="LlamaForCausalLM",
    model_type="llama",
    blocks=tuple(f"model.layers.{index}" for index in range(32)),
    hidden_size=4096,
)
GIB = 2**30


def traced(name: str, sites: Sites | None = None, **training: Any) -> Account:
    config = named_config(name)
    return trace_account(Step(config, Training(**{"batch": 2, "seq": 24, **training}), sites or sites_of(config)))


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (transformers.LlamaConfig(), 2048),
        (transformers.WhisperConfig(), 448),
        (transformers.LEDConfig(), 16384),
        (transformers.GPT2Config(), 1024),
        (transformers.MambaConfig(), None),
    ],
)
def test_positions_of_tokens(config: transformers.PretrainedConfig, limit: int | None) -> None:
    assert estimate.max_positions(config) == limit


@pytest.fixture
def cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace takes the CPU's own kernels, so that it can be compared with a real run."""
    monkeypatch.setattr(estimate, "CudaChoices", contextlib.nullcontext)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2", "bert", "vit", "phi3"])
@pytest.mark.rotates(3)
def test_the_trace_has_the_bytes_of_the_real_run_stock_and_patched(name: str) -> None:
    config = named_config(name)
    sites, recipe = sites_of(config), load_recipe("exact-unfolded")
    model, training = tiny_model(name), Training(batch=2, seq=24, precision="fp32")
    for rules in (None, recipe):
        if rules is not None:
            apply(model, make_plan(sites, rules))
        real = real_account(name, model, sites, batch=2, seq=24)
        fake = trace_account(Step(config, training, sites, rules))
        assert fake.per_block() == real.per_block()
        assert fake.per_cause() == real.per_cause()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_what_transformers_loads_in_fp32_is_traced_in_fp32(
    precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if precision == "bf16":  # T5 names its `wo` for fp16 alone
        monkeypatch.setattr(transformers.T5PreTrainedModel, "_keep_in_fp32_modules_strict", ["w*o.weight"])
    tiny_model("t5").save_pretrained(tmp_path)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype).eval()
    sites = Sites(type(model).__name__, "t5", blocks=("encoder.block.1", "decoder.block.1"), hidden_size=64)
    real = real_account("t5", model, sites, batch=2, seq=24)
    training = Training(batch=2, seq=24, precision=precision, dropout=False, cuda_kernels=False)
    traced = trace_account(Step(model.config, training, sites, inputs=tiny_inputs("t5", 2, 24)))
    assert traced.per_block() == real.per_block()
    assert traced.per_cause() == real.per_cause()


def test_an_8b_model_keeps_26_6_gib_for_a_row_of_4096_tokens() -> None:
    config = transformers.LlamaConfig(**LLAMA_8B)
    counted = trace_account(Step(config, Training(batch=1, seq=4096), BLOCKS_8B))
    assert counted.total / GIB == pytest.approx(26.60, rel=0.001)
    assert counted.units(counted.per_block()["model.layers.16"]) == pytest.approx(24.52, abs=0.01)


def test_kept_bytes_grow_linearly_with_tokens() -> None:
    one, two, three = (traced("llama", seq=seq, batch=batch).total for seq, batch in ((64, 1), (128, 1), (64, 3)))
    per_row_constants = 2 * 64
    assert two - 2 * one == pytest.approx(0, abs=per_row_constants)
    assert three - 3 * one == pytest.approx(0, abs=3 * per_row_constants + 2 * 2 * 64 * 16 * 2)


def test_fused_attention_keeps_grouped_keys_and_values_unrepeated() -> None:
    counted = traced("llama", batch=1, seq=32)
    block = [
        kept for kept in counted.of_block("model.layers.0") if kept.cause == "attention q/k/v" and kept.nbytes > 64
    ]
    unit = 32 * 64 * 2
    assert sorted(kept.nbytes for kept in block) == [unit // 2, unit // 2, unit]


def test_attention_dropout_keeps_no_scores() -> None:
    without, dropped = (
        trace_account(Step(config, Training(batch=1, seq=64), sites_of(config)))
        for config in (named_config("bert"), named_config("bert", attention_probs_dropout_prob=0.1))
    )
    assert dropped.total == without.total


def test_dropout_keeps_one_byte_an_element() -> None:
    config = named_config("bert", hidden_dropout_prob=0.1)
    counted = trace_account(Step(config, Training(batch=2, seq=24), sites_of(config)))
    masks = [kept for kept in counted.of_block("bert.encoder.layer.1") if kept.cause == "dropout mask"]
    assert [(kept.dtype, kept.nbytes) for kept in masks] == [("bool", 2 * 24 * 64)] * 2


@pytest.mark.parametrize(("seq", "masks"), [(8, 0), (24, 1)])
def test_a_sliding_window_keeps_a_mask_only_where_the_row_is_longer(seq: int, masks: int) -> None:
    counted = traced("mistral", seq=seq)
    assert len([kept for kept in counted.of_block("model.layers.1") if kept.cause == "attention mask"]) == masks


def test_a_mask_that_is_not_skipped_has_a_row_for_each_of_the_batch() -> None:
    sizes: dict[str, Any] = {"batch_size": 2, "q_length": 24, "kv_length": 24, "local_size": 8}
    sizes["attention_mask"] = torch.ones(2, 24, dtype=torch.bool)
    real = masking_utils.sdpa_mask(**sizes)
    with unpadded_masks():
        traced_one = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**sizes)
    assert traced_one.untyped_storage().nbytes() == real.untyped_storage().nbytes() == 2 * 24 * 24


def test_positions_that_a_model_makes_itself_are_of_rows_that_are_not_packed() -> None:
    packed = torch.tensor([[0, 1, 2, 0, 1]])
    with FakeTensorMode(), unpadded_masks():
        assert masking_utils.find_packed_sequence_indices(torch.arange(5)[None] + 1) is None
    with unpadded_masks():
        assert masking_utils.find_packed_sequence_indices(packed).tolist() == [[0, 0, 0, 1, 1]]


def test_checkpointing_keeps_one_unit_a_block() -> None:
    counted = traced("llama", checkpointing="full")
    assert set(counted.per_block().values()) == {counted.unit}
    assert counted.unseen > 0


def test_autocast_lists_copies_of_the_weights_apart() -> None:
    counted = traced("llama", precision="bf16-mixed")
    model = build_meta(named_config("llama"))
    block = model.get_submodule("model.layers.1")
    weights = sum(2 * parameter.numel() for parameter in block.parameters() if parameter.dim() == 2)
    assert counted.per_cause("model.layers.1")["weight copy"] == weights
    assert any("Autocast" in note for note in counted.notes)


def test_lora_keeps_no_normalised_copies_for_frozen_norms() -> None:
    full, lora = traced("llama"), traced("llama", train="lora", lora_rank=4)
    assert "norm output (x_hat)" in full.per_cause("model.layers.1")
    assert "norm output (x_hat)" not in lora.per_cause("model.layers.1")


def test_lora_names_what_is_saved_as_full_tuning_does() -> None:
    lora = traced("llama", train="lora", lora_rank=4)
    assert lora.per_cause("model.layers.1")["norm input"] > 0


def test_lora_on_experts_names_their_weights_with_the_adapter_and_says_what_to_do() -> None:
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, architectures=["MixtralForCausalLM"],
    )  # fmt: skip
    sites = find_sites(build_meta(config))

    def lora(*targets: str, recipe: Recipe | None = None) -> Account:
        return trace_account(Step(config, Training(seq=24, train="lora", lora_targets=targets), sites, recipe))

    weights = sum(2 * each.numel() for each in build_meta(config).parameters() if each.dim() == 3)
    assert lora("all-linear").per_cause()[EXPERTS] == weights
    assert EXPERTS_NOTE in lora("all-linear").notes
    patched = lora("all-linear", recipe=load_recipe("exact-unfolded"))
    for other in (patched, lora("q", "v"), trace_account(Step(config, Training(seq=24), sites))):
        assert EXPERTS not in other.per_cause()
        assert EXPERTS_NOTE not in other.notes


def test_positions_of_three_dimensions_are_no_experts() -> None:
    """... though the hidden states of one image have their shape."""
    assert EXPERTS not in traced("vit", batch=1, seq=None).per_cause()


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("embed", {"embed.weight"}),  # a whole name is no part of another
        ("tower.embed", {"tower.embed.weight"}),
        ("tower", {"tower.embed.weight", "tower.head.weight"}),
        ("embed.weight", {"embed.weight"}),
        ("head", {"tower.head.weight"}),
        ("*e[am]*d", {"embed.weight", "tower.embed.weight", "tower.head.weight"}),
    ],
)
def test_a_name_freezes_what_it_is_or_else_what_has_it_as_a_part(name: str, frozen: set[str]) -> None:
    tower = nn.ModuleDict({"embed": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 2, bias=False)})
    model: Any = nn.ModuleDict({"embed": nn.Linear(2, 2, bias=False), "tower": tower, "rest": nn.Linear(2, 2)})
    estimate._freeze(model, [name])
    assert {name for name, each in model.named_parameters() if not each.requires_grad} == frozen


def test_lora_targets_may_be_beginnings_of_names() -> None:
    short = traced("llama", train="lora", lora_targets=("q", "v"))
    full = traced("llama", train="lora", lora_targets=("q_proj", "v_proj"))
    assert short == full
    assert short.total < traced("llama", train="lora").total


def test_fp32_adapters_on_a_16_bit_model_keep_casts() -> None:
    assert traced("llama", train="lora", adapter_fp32=True).total > traced("llama", train="lora").total


def test_the_dropout_of_an_adapter_keeps_a_mask_and_its_output() -> None:
    """In the second block, whose attention saves the input anyway. In the first one nothing below is trained: the
    output takes the place of the input, and no mask is needed."""
    without, dropped = (traced("llama", train="lora", lora_targets=("o",), lora_dropout=p) for p in (0.0, 0.1))
    assert dropped.total - without.total == (1 + 2) * 2 * 24 * named_config("llama").hidden_size


def test_adapters_are_those_that_peft_makes_unless_the_step_names_others() -> None:
    asked = {dtype: Request("m", train="lora", lora_dtype=dtype).training.adapter_fp32 for dtype in ("fp32", "base")}
    assert asked == {"fp32": True, "base": False}
    assert not Request("m").training.adapter_fp32
    assert Request("m", train="lora", lora_dropout=0.1).training.lora_dropout == 0.1


def test_an_unknown_lora_target_names_those_that_exist() -> None:
    with pytest.raises(ModelError, match=r"'conv'.*down_proj, gate_proj"):
        traced("llama", train="lora", lora_targets=("conv",))


def test_a_linear_to_which_peft_cannot_add_is_named_with_the_remedy() -> None:
    """Llama 4's router is a linear that returns a tuple."""
    config = transformers.Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_local_experts=4, interleave_moe_layer_step=1,
        pad_token_id=0, architectures=["Llama4ForCausalLM"],
    )  # fmt: skip
    with pytest.raises(ModelError, match="'router': it returns a tuple") as caught:
        trace_account(Step(config, Training(seq=24, train="lora"), find_sites(build_meta(config))))
    assert "--lora-targets down_proj,gate_proj,k_proj,o_proj,q_proj,up_proj,v_proj;" in caught.value.hint


def test_a_linear_of_groups_to_which_peft_cannot_add_is_named() -> None:
    """DeepSeek V4 multiplies groups of a linear's inputs by parts of its weight."""
    config, name = small_config("deepseek_v4")
    config = next(shrunken(config))
    config.architectures = [name]
    with pytest.raises(ModelError, match="'o_a_proj': its forward fails on a matrix of inputs") as caught:
        trace_account(Step(config, Training(seq=24, train="lora"), find_sites(build_meta(config))))
    assert "o_b_proj" in caught.value.hint


def test_linears_that_peft_refuses_are_not_proposed_instead() -> None:
    config = transformers.Mamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16, state_size=8, n_groups=1,
        architectures=["Mamba2ForCausalLM"],
    )  # fmt: skip
    with pytest.raises(ModelError, match="'out_proj' is incompatible") as caught:
        trace_account(Step(config, Training(seq=24, train="lora"), find_sites(build_meta(config))))
    assert caught.value.hint == "Name others with --lora-targets; the blocks have: in_proj."


def test_a_dtype_that_a_model_does_not_run_in_names_the_precision() -> None:
    config = transformers.XLNetConfig(
        vocab_size=64, d_model=32, n_layer=1, n_head=2, d_inner=48, architectures=["XLNetLMHeadModel"]
    )
    with pytest.raises(ModelError, match="expected scalar type") as caught:
        trace_account(Step(config, Training(seq=24), find_sites(build_meta(config))))
    assert caught.value.hint == "Use another --precision."


def test_code_that_multiplies_with_a_packed_weight_names_what_to_skip() -> None:
    """Jamba's does."""
    config = transformers.JambaConfig(
        hidden_size=64, num_hidden_layers=2, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, attn_layer_offset=1, attn_layer_period=2, expert_layer_period=2, expert_layer_offset=1,
    )  # fmt: skip
    config.architectures = ["JambaForCausalLM"]
    training = Training(1, 16, train="qlora")
    with pytest.raises(ModelError, match="llm_int8_skip_modules of quantization_config in config"):
        trace_account(Step(config, training, sites_of(config)))
    skipped = {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["dt_proj"]}
    config.quantization_config = skipped
    assert trace_account(Step(config, training, sites_of(config))).total


def test_a_missing_peft_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match="needs peft"):
        traced("llama", train="lora")


def test_a_row_too_long_for_the_model_is_an_error_with_its_reason() -> None:
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        with pytest.raises(
            ModelError, match=r"^--seq \d+ is more than the 512 positions in the config of \w+\. Use a smaller --seq\.$"
        ) as caught:
            traced("bert", seq=4096)
    finally:
        logger.removeHandler(handler)
    assert "\n" not in str(caught.value)
    assert logged == []


@pytest.mark.parametrize(("name", "positions"), [("gpt2", "n_positions"), ("opt", "max_position_embeddings")])
def test_a_row_beyond_a_table_of_positions_is_an_error(name: str, positions: str) -> None:
    config, sites = named_config(name, **{positions: 64}), sites_of(named_config(name))
    with pytest.raises(ModelError, match="--seq 65 is more than the 64 positions"):
        trace_account(Step(config, Training(1, 65), sites))
    assert trace_account(Step(config, Training(1, 64), sites)).total
    rotary = named_config("llama", max_position_embeddings=64)
    assert trace_account(Step(rotary, Training(1, 65), sites_of(rotary))).total


def test_rows_for_padding_in_a_table_of_positions_are_no_positions(tmp_path: Path) -> None:
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.RobertaConfig(
        **settings, vocab_size=99, max_position_embeddings=34, architectures=["RobertaForMaskedLM"]
    )
    real = transformers.RobertaForMaskedLM(config)
    real(torch.full((1, 32), 5))
    with pytest.raises(RuntimeError, match="out of bounds"):
        real(torch.full((1, 33), 5))
    config.save_pretrained(tmp_path)
    assert step_of(Request(tmp_path)).training.seq == 32
    with pytest.raises(ModelError, match=r"--seq 33 is more than the 32 positions .* has 34, but 2 of them"):
        trace_account(step_of(Request(tmp_path, seq=33)))


def test_an_error_of_a_row_of_all_positions_names_the_option_for_fewer(tmp_path: Path) -> None:
    few = {"num_encoder_layers": 1, "num_decoder_layers": 1, "num_encoder_attention_heads": 2}
    config = transformers.ProphetNetConfig(
        **few, num_decoder_attention_heads=2, hidden_size=16, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=50,
        max_position_embeddings=32, architectures=["ProphetNetForConditionalGeneration"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="fewer tokens than its config has positions: give a smaller --seq"):
        trace_account(step_of(Request(tmp_path)))
    assert trace_account(step_of(Request(tmp_path, seq=30))).total


def test_adapters_too_large_to_make_are_an_error() -> None:
    with pytest.raises(ModelError, match="rank 1000000000000 are too large to make here"):
        traced("llama", train="lora", lora_rank=10**12)


def test_a_folded_norm_is_traced_as_frozen_and_keeps_no_copy_of_its_weight() -> None:
    config = named_config("llama")
    sites, training = sites_of(config), Training(batch=2, seq=24)
    recipe = load_recipe("exact-unfolded")
    shared = trace_account(Step(config, training, sites, recipe))
    folded = trace_account(Step(config, training, sites, recipe, folded=["model.layers.0.input_layernorm"]))
    copy_of_its_weight = config.hidden_size * 2
    assert folded.total == shared.total - copy_of_its_weight
    assert folded.notes == shared.notes


def test_tied_weights_stay_tied_in_the_trace() -> None:
    model = build_meta(named_config("gpt2"))
    make_fake(model, FakeTensorMode())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_experts_are_traced_as_they_are_trained() -> None:
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=99, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    blocks = Sites("MixtralForCausalLM", "mixtral", blocks=("model.layers.0", "model.layers.1"), hidden_size=64)
    for precision in ("bf16", "fp32"):
        counted = trace_account(Step(config, Training(batch=2, seq=64, precision=precision), blocks))
        assert counted.units(counted.per_block()["model.layers.1"]) < 40


def test_a_trace_leaves_transformers_masks_as_they_were() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    traced("llama")
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask


def test_a_step_whose_backward_cannot_be_traced_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **names: Any) -> Any:
        raise RuntimeError("no rule for this")

    monkeypatch.setattr(trace, "record", fails)
    config = named_config("llama")
    traced = trace_account(Step(config, Training(seq=8), sites_of(config)), whole=True)
    assert traced.step is None
    assert traced.total > 0
    assert "Peak of a step: unknown, since backward fails (RuntimeError: no rule for this)." in traced.notes


def test_what_an_adapted_linear_saves_is_a_linear_s_input() -> None:
    config = named_config("llama")
    options: dict[str, Any] = {"sites": sites_of(config), "recipe": load_recipe("exact-unfolded")}
    counted = trace_account(Step(config, Training(2, 24, train="lora"), **options)).per_cause("model.layers.1")
    assert "linear input" in counted
    assert "other" not in counted
