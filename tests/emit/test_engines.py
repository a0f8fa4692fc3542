"""Emitted files mean what the plan says, as transformers and accelerate read them; the others are in tests/train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from transformers import HfArgumentParser, TrainingArguments

from memopt.emit import KINDS, files_of
from memopt.errors import UsageError
from memopt.plan.recipe import load_recipe
from tests.emit.plans import SHIPPED, planned, shipped_text, text_of

EVERY_BLOCK = "checkpointing.method=full"
ONE_BLOCK = "checkpointing.blocks=[model.layers.0]"


def arguments_of(text: str) -> TrainingArguments:
    """As `parse_yaml_file` reads them, on the CPU."""
    (parsed,) = HfArgumentParser(TrainingArguments).parse_dict({**yaml.safe_load(text), "use_cpu": True})  # type: ignore[arg-type]
    return parsed  # type: ignore[no-any-return]


def test_the_recipe_lies_beside_every_file() -> None:
    plan = planned(EVERY_BLOCK)
    files, notes = files_of(plan, ["trainer", "torchtitan"])
    assert sorted(files) == ["recipe.yaml", "torchtitan.args", "training_args.yaml"]
    assert yaml.safe_load(files["recipe.yaml"])["checkpointing"]["method"] == "full"
    assert ["does not patch" in note for note in notes] == [True]


@pytest.mark.parametrize(
    ("precision", "bf16", "fp16"),
    [("fp32", False, False), ("bf16", False, False), ("bf16-mixed", True, False), ("fp16-mixed", False, True)],
)
def test_trainer_reads_batch_accumulation_precision_and_optimizer(precision: str, bf16: bool, fp16: bool) -> None:
    text = text_of(planned(precision=precision, setup={"optimizer": "adafactor"}), "trainer")
    found = arguments_of(text)
    assert (found.per_device_train_batch_size, found.gradient_accumulation_steps) == (2, 4)
    assert (found.bf16, found.fp16, found.optim) == (bf16, fp16, "adafactor")
    assert found.gradient_checkpointing is False  # the recipe's would run inside of it
    assert f"dtype=torch.{'bfloat16' if precision == 'bf16' else 'float32'}" in text


def test_comments_say_what_the_file_has_no_place_for() -> None:
    text = text_of(planned(EVERY_BLOCK, ONE_BLOCK, train="lora", lora_targets=("q_proj", "v_proj")), "trainer")
    assert "# The recipe checkpoints some blocks" in text
    assert "LoraConfig(r=8, target_modules=['q_proj', 'v_proj'])" in text
    assert "memopt.patch(model, 'plan/recipe.yaml')" in text
    assert "target_modules='all-linear', use_dora=True)" in text_of(planned(train="lora", use_dora=True), "trainer")


def test_4_bit_weights_are_loaded_as_they_were_counted() -> None:
    in_bf16 = text_of(planned(train="qlora"), "trainer")
    loading = (
        "dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4'"
    )
    assert loading in in_bf16
    assert "prepare_model_for_kbit_training" not in in_bf16
    mixed = text_of(planned(train="qlora", precision="bf16-mixed"), "trainer")
    assert loading in mixed
    assert "prepare_model_for_kbit_training(model, False), then memopt.patch" in mixed
    assert "quant_storage" not in in_bf16
    sharded = text_of(planned(train="qlora", setup={"sharding": "fsdp", "devices": 2}), "fsdp")
    assert "bnb_4bit_quant_storage=torch.bfloat16)" in sharded


def test_trainer_shards_as_planned() -> None:
    found = arguments_of(text_of(planned(setup={"sharding": "fsdp", "devices": 2}), "trainer"))
    plugin = found.fsdp_plugin_args
    assert (plugin["fsdp_version"], plugin["auto_wrap_policy"]) == (2, "TRANSFORMER_BASED_WRAP")
    assert plugin["reshard_after_forward"] is True


def launched(text: str, tmp_path: Path) -> Any:
    """The arguments of `accelerate launch --config_file FILE script.py`, merged with the file's."""
    file = tmp_path / "accelerate.yaml"
    file.write_text(text)
    assert load_config_from_file(str(file)).num_machines == 1
    parsed = launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
    return _validate_launch_command(parsed)[0]


@pytest.mark.parametrize(
    ("sharding", "flag"), [("ddp", "multi_gpu"), ("fsdp", "use_fsdp"), ("zero2", "use_deepspeed"), ("none", "")]
)
def test_accelerate_launches_as_planned(sharding: str, flag: str, tmp_path: Path) -> None:
    setup = {"sharding": sharding, "devices": 1 if sharding == "none" else 3}
    precision = "bf16" if sharding == "zero2" else "bf16-mixed"
    found = launched(text_of(planned(precision=precision, setup=setup), "accelerate"), tmp_path)
    flags = {name: getattr(found, name) for name in ("multi_gpu", "use_fsdp", "use_deepspeed")}
    assert [name for name, its in flags.items() if its] == [flag] * bool(flag)
    assert (found.mixed_precision, found.num_processes) == ("bf16", setup["devices"])
    if sharding == "zero2":
        assert (found.zero_stage, found.gradient_accumulation_steps) == (2, 4)


def test_fsdp_is_version_2_with_blocks_freed_after_forward(tmp_path: Path) -> None:
    setup = {"sharding": "fsdp", "devices": 2}
    found = launched(text_of(planned(setup=setup), "fsdp"), tmp_path)
    assert (found.fsdp_version, found.fsdp_auto_wrap_policy) == (2, "TRANSFORMER_BASED_WRAP")
    assert (found.fsdp_reshard_after_forward, str(found.fsdp_activation_checkpointing).lower()) == (True, "false")
    assert found.mixed_precision == "no"  # the weights are in bf16


@pytest.mark.parametrize(
    ("kind", "words", "plan"),
    [
        ("fsdp", "sharding 'none'", {}),
        ("deepspeed", "sharding 'fsdp'", {"setup": {"sharding": "fsdp", "devices": 2}}),
        ("accelerate", "under DeepSpeed", {"precision": "bf16-mixed", "setup": {"sharding": "zero3", "devices": 2}}),
        ("axolotl", "bf16-mixed", {"precision": "bf16-mixed"}),
        ("torchtitan", "LoRA", {"train": "lora"}),
        ("torchtitan", "LoRA", {"train": "qlora"}),
        ("torchtitan", "optimizer sgd", {"setup": {"optimizer": "sgd"}}),
    ],
)
def test_what_an_engine_cannot_express_is_refused(kind: str, words: str, plan: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"--emit {kind}: its configuration cannot express .*{words}"):
        text_of(planned(**plan), kind)


def test_torchtitan_checkpoints_all_blocks_or_none() -> None:
    with pytest.raises(UsageError, match="activation checkpointing of chosen blocks"):
        text_of(planned(EVERY_BLOCK, ONE_BLOCK), "torchtitan")
    both = "checkpointing.blocks=[model.layers.0,model.layers.1]"  # as the planner writes it
    assert text_of(planned(EVERY_BLOCK, both), "torchtitan").endswith("activation-checkpoint:full\n")


def test_the_error_for_an_unknown_engine_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="--emit 'acelerate' is no engine") as found:
        files_of(planned(), ["acelerate"])
    assert found.value.hint == "Did you mean 'accelerate'?"


def test_the_recipe_that_is_written_can_be_read(tmp_path: Path) -> None:
    plan = planned(EVERY_BLOCK, ONE_BLOCK)
    files, _ = files_of(plan, KINDS.keys() - {"fsdp", "deepspeed", "torchtitan"})
    (tmp_path / "recipe.yaml").write_bytes(files["recipe.yaml"])
    assert load_recipe(tmp_path / "recipe.yaml") == plan.recipe


@pytest.mark.parametrize("kind", KINDS)
def test_the_shipped_files_are_what_would_be_emitted(kind: str) -> None:
    assert (SHIPPED / KINDS[kind].file).read_text() == shipped_text(kind), "run `python -m tests.emit.plans`"


@pytest.mark.parametrize("train", ["full", "qlora"])
@pytest.mark.parametrize("kind", ["trainer", "accelerate", "axolotl"])
def test_the_attention_with_which_the_model_is_loaded_is_written(kind: str, train: str) -> None:
    said = "attn_implementation: flash_attention_2" if kind == "axolotl" else "attn_implementation='flash_attention_2'"
    assert said in text_of(planned(train=train, attention="flash_attention_2"), kind)
    assert "attn_implementation" not in text_of(planned(train=train), kind)
