"""Emitted files, loaded by DeepSpeed, TRL, axolotl and torchtitan."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.emit.plans import planned, text_of

TWO = {"devices": 2}


@pytest.mark.parametrize(
    ("precision", "section"),
    [("bf16", "bfloat16_config"), ("fp16", "float16_config"), ("fp32", ""), ("bf16-mixed", "torch_autocast")],
)
def test_deepspeed_reads_stage_batch_and_precision(
    precision: str, section: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.config import DeepSpeedConfig

    file = tmp_path / "deepspeed.json"
    file.write_text(text_of(planned(precision=precision, setup={"sharding": "zero3", **TWO}), "deepspeed"))
    found = DeepSpeedConfig(str(file))
    assert found.zero_config.stage == 3
    assert (found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps) == (2, 4)
    on = [name for name in ("bfloat16_config", "float16_config") if getattr(found, name).enabled]
    assert [*on, *["torch_autocast"] * found.torch_autocast_enabled] == [section] * bool(section)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed", "bf16-autocast"])
def test_trl_reads_the_trainers_file_without_its_own_defaults(precision: str) -> None:
    from trl import SFTConfig, TrlParser

    values = {**yaml.safe_load(text_of(planned(precision=precision), "trainer")), "use_cpu": True}
    (found,) = TrlParser(SFTConfig).parse_dict(values)
    assert (found.bf16, found.gradient_checkpointing) == ("-" in precision, False)
    assert (found.per_device_train_batch_size, found.gradient_accumulation_steps) == (2, 4)


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        ({"train": "lora"}, "bfloat16"),
        ({"train": "qlora"}, "bfloat16"),
        ({"train": "lora", "precision": "bf16-autocast"}, "bf16"),
        ({"train": "lora", "modules_to_save": ("embed_tokens", "lm_head")}, "bfloat16"),
        ({"train": "lora", "use_dora": True}, "bfloat16"),
        ({"train": "lora", "lora_targets": ("q_proj",), "precision": "fp32"}, "float32"),
        ({"setup": {"sharding": "fsdp", **TWO}}, "bfloat16"),
        ({"setup": {"sharding": "zero2", **TWO}}, "bfloat16"),
    ],
)
def test_axolotl_reads_what_was_planned(plan: dict[str, Any], dtype: str) -> None:
    config = pytest.importorskip("axolotl.utils.schemas.config", reason="axolotl is not installed")
    from memopt.axolotl import Arguments

    values = yaml.safe_load(text_of(planned("attention.implementation=sdpa", **plan), "axolotl"))
    unknown = values.keys() - config.AxolotlInputConfig.model_fields.keys()
    assert unknown == {"memopt_recipe"} <= Arguments.model_fields.keys()
    found = config.AxolotlInputConfig(**values, datasets=[{"path": "some/data", "type": "alpaca"}], learning_rate=1e-4)
    assert (found.micro_batch_size, found.gradient_accumulation_steps, found.sequence_len) == (2, 4, 128)
    assert (found.attn_implementation, found.gradient_checkpointing) == ("sdpa", False)
    assert (bool(found.bfloat16), bool(found.bf16)) == (dtype == "bfloat16", dtype == "bf16")
    if "train" in plan:
        assert (found.adapter, bool(found.load_in_4bit)) == (plan["train"], plan["train"] == "qlora")
        assert found.lora_target_linear or found.lora_target_modules == ["q_proj"]
        assert tuple(found.lora_modules_to_save or ()) == plan.get("modules_to_save", ())
        assert bool(found.peft_use_dora) == plan.get("use_dora", False)
    if plan.get("setup", {}).get("sharding") == "fsdp":
        assert found.fsdp_config.reshard_after_forward
        assert str(found.fsdp_config.fsdp_version or found.fsdp_version) == "2"


@pytest.fixture
def torchtitan(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its reader of command lines; it imports a writer of logs that no test needs."""
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    logs = ModuleType("torch.utils.tensorboard")
    logs.SummaryWriter = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", logs)
    from torchtitan.config.manager import ConfigManager

    return ConfigManager()


@pytest.mark.parametrize("sharding", ["none", "ddp", "fsdp"])
@pytest.mark.parametrize("method", ["none", "full"])
def test_torchtitan_reads_what_was_planned(torchtitan: Any, sharding: str, method: str) -> None:
    devices = 1 if sharding == "none" else 2
    plan = planned(f"checkpointing.method={method}", setup={"sharding": sharding, "devices": devices})
    arguments = text_of(plan, "torchtitan").split()
    found = torchtitan.parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *arguments])
    step = found.training
    assert (step.local_batch_size, step.global_batch_size, step.seq_len) == (2, 8 * devices, 128)
    assert (step.dtype, step.mixed_precision_param) == ("bfloat16", "bfloat16")
    degrees = found.parallelism.data_parallel_replicate_degree, found.parallelism.data_parallel_shard_degree
    assert degrees == {"none": (1, 1), "ddp": (2, 1), "fsdp": (1, 2)}[sharding]
    chosen = found.activation_checkpoint
    assert (None if chosen is None else type(chosen).__qualname__) == (None if method == "none" else "FullAC.Config")
