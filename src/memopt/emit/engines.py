"""One function an engine: a planned step as the text of its configuration file. Nothing else is set in it.

Sources: transformers' TrainingArguments 5.23, accelerate's ClusterConfig 1.15, DeepSpeedConfig 0.19, axolotl's
AxolotlInputConfig 0.19, torchtitan's ConfigManager 0.3.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from memopt.emit.planned import Planned
from memopt.errors import UsageError
from memopt.plan.recipe import dump_recipe
from memopt.prediction.setup import Sharding

RECIPE_FILE = "recipe.yaml"
_OPTIMIZERS = {"adamw": "adamw_torch", "adamw8bit": "adamw_bnb_8bit", "sgd": "sgd", "adafactor": "adafactor"}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
_WRAPPED = "TRANSFORMER_BASED_WRAP"
_ANY: tuple[Sharding, ...] = ("none", "ddp", "fsdp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Kind:
    """A file that an engine reads."""

    file: str
    text: Callable[[Planned], str]
    note: str = ""
    """What a user has to know beside what the file says."""


def check_kinds(names: Iterable[str]) -> tuple[str, ...]:
    """`names`, each once.

    Raises:
        UsageError: one is no kind of file; says the nearest.
    """
    found = tuple(dict.fromkeys([names] if isinstance(names, str) else names))
    for name in found:
        if name not in KINDS:
            near = difflib.get_close_matches(name, KINDS, n=1, cutoff=0.5)
            hint = f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(KINDS)}."
            raise UsageError(f"--emit '{name}' is no engine.", hint)
    return found


def files_of(planned: Planned, kinds: Iterable[str]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """(file name -> content: the recipe, and the file of each of `kinds`; what a user has to know).

    Raises:
        UsageError: a file cannot express the plan; says what, and what to do.
    """
    files = {RECIPE_FILE: dump_recipe(planned.recipe)}
    chosen = [KINDS[name] for name in check_kinds(kinds)]
    files |= {kind.file: kind.text(planned) for kind in chosen}
    return {name: text.encode() for name, text in files.items()}, tuple(kind.note for kind in chosen if kind.note)


def files_named(kinds: Iterable[str]) -> tuple[str, ...]:
    """Names of the files that `files_of` makes for `kinds`."""
    return (RECIPE_FILE, *(KINDS[name].file for name in check_kinds(kinds)))


def file_names() -> frozenset[str]:
    """Every name that a file may have."""
    return frozenset({RECIPE_FILE, *(kind.file for kind in KINDS.values())})


def _trainer(planned: Planned) -> str:
    sharding = planned.shared("trainer", *_ANY)
    values: dict[str, Any] = {
        "per_device_train_batch_size": planned.step.batch,
        "gradient_accumulation_steps": planned.accumulation,
        "optim": _OPTIMIZERS[planned.optimizer],
        "bf16": _mixed_precision("trainer", planned, sharding) == "bf16",
        "fp16": _mixed_precision("trainer", planned, sharding) == "fp16",
        "gradient_checkpointing": False,
    }
    if sharding == "fsdp":
        values |= {"fsdp": True, "fsdp_config": _fsdp()}
    elif sharding.startswith("zero"):
        values["deepspeed"] = _deepspeed_values(planned, sharding)
    return _yaml(
        planned, "HfArgumentParser(TrainingArguments).parse_yaml_file(...), or --config of TRL's commands", values
    )


def _accelerate(planned: Planned) -> str:
    sharding = planned.shared("accelerate", *_ANY)
    return _launch_file("accelerate", planned, sharding)


def _fsdp_file(planned: Planned) -> str:
    return _launch_file("fsdp", planned, planned.shared("fsdp", "fsdp"))


def _launch_file(engine: str, planned: Planned, sharding: str) -> str:
    """accelerate's file; of batch and accumulation it has a place under DeepSpeed only."""
    kinds = {"none": "NO", "ddp": "MULTI_GPU", "fsdp": "FSDP"}
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kinds.get(sharding, "DEEPSPEED"),
        "mixed_precision": _mixed_precision(engine, planned, sharding),
    }
    if planned.devices is not None:
        values["num_processes"] = planned.devices
    if sharding == "fsdp":
        values["fsdp_config"] = {f"fsdp_{key}": value for key, value in _fsdp().items()}
    elif sharding.startswith("zero"):
        stage = int(sharding[-1])
        values["deepspeed_config"] = {"zero_stage": stage, "gradient_accumulation_steps": planned.accumulation}
    own = (
        f"Micro-batches of {planned.step.batch}, {planned.accumulation} in a step, {planned.optimizer}: in your script."
    )
    return _yaml(planned, "accelerate launch --config_file ...", values, own)


def _deepspeed(planned: Planned) -> str:
    sharding = planned.shared("deepspeed", "zero2", "zero1", "zero3")
    return json.dumps(_deepspeed_values(planned, sharding), indent=2) + "\n"


def _deepspeed_values(planned: Planned, sharding: str) -> dict[str, Any]:
    """DeepSpeed's own 16-bit modes keep fp32 weights beside the 16-bit ones, which `--sharding zero*` counts."""
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": planned.step.batch,
        "gradient_accumulation_steps": planned.accumulation,
        "zero_optimization": {"stage": int(sharding[-1])},
    }
    precision, _, mixed = planned.step.precision.partition("-")
    if mixed:
        values["torch_autocast"] = {"enabled": True, "dtype": _DTYPES[precision]}
    elif precision in _DTYPES:
        values[precision] = {"enabled": True}
    return values


def _axolotl(planned: Planned) -> str:
    sharding = planned.shared("axolotl", *_ANY)
    step, precision = planned.step, planned.step.precision
    if precision.endswith("mixed"):  # its `bf16: true` loads the weights in bf16 too
        hint = f"Use 16-bit weights: --precision {precision[:4]}."
        raise planned.refusal("axolotl", f"{precision}, fp32 weights under autocast", hint)
    values: dict[str, Any] = {
        "base_model": planned.model,
        "plugins": ["memopt.axolotl.Plugin"],
        "memopt_recipe": planned.recipe_file,
        "micro_batch_size": planned.step.batch,
        "gradient_accumulation_steps": planned.accumulation,
        "optimizer": _OPTIMIZERS[planned.optimizer],
        "bf16": False,
        "gradient_checkpointing": False,
    }
    if precision in _DTYPES:
        values[_DTYPES[precision]] = True
    if planned.step.seq is not None:
        values["sequence_len"] = planned.step.seq
    if planned.attention is not None:
        values["attn_implementation"] = planned.attention
    if (lora := planned.lora) is not None:
        targets = lora["target_modules"]
        every = {"lora_target_linear": True} if isinstance(targets, str) else {"lora_target_modules": targets}
        values |= {"adapter": step.train, "lora_r": lora["r"], **every}
        if step.train == "qlora":
            values["load_in_4bit"] = True
    if sharding == "fsdp":
        values |= {"fsdp_version": 2, "fsdp_config": {k: v for k, v in _fsdp().items() if k != "version"}}
    elif sharding.startswith("zero"):
        values["deepspeed"] = _deepspeed_values(planned, sharding)
    return _yaml(planned, "axolotl train ..., after you have added your datasets", values, complete=True)


def _torchtitan(planned: Planned) -> str:
    """Arguments of its command line, the one form in which it reads settings: one a line, the last a sub-command."""
    step = planned.step
    sharding = planned.shared("torchtitan", "none", "ddp", "fsdp")
    refuse = [
        (step.has_adapters, "LoRA", "Plan with --train full."),
        (planned.optimizer != "adamw", f"optimizer {planned.optimizer}", "Plan with --optimizer adamw."),
        (step.precision.startswith("fp16"), step.precision, "Plan with --precision bf16 or bf16-mixed."),
        (planned.checkpointed == "some", "activation checkpointing of chosen blocks, but of all or none",
         "Give a recipe with checkpointing.method full or none."),
        (planned.attention not in (None, "sdpa"), f"attention by {planned.attention}", "Use sdpa."),
    ]  # fmt: skip
    for wrong, what, hint in refuse:
        if wrong:
            raise planned.refusal("torchtitan", what, hint)
    devices = planned.devices or 1
    values = {
        "training.local-batch-size": step.batch,
        "training.global-batch-size": step.batch * planned.accumulation * devices,
        **({} if step.seq is None else {"training.seq-len": step.seq}),
        "training.dtype": "bfloat16" if step.precision == "bf16" else "float32",
        "training.mixed-precision-param": "float32" if step.precision == "fp32" else "bfloat16",
        "parallelism.data-parallel-replicate-degree": devices if sharding == "ddp" else 1,
        "parallelism.data-parallel-shard-degree": devices if sharding == "fsdp" else 1,
    }
    lines = [f"--{key}={value}" for key, value in values.items()]
    return "\n".join([*lines, "activation-checkpoint:" + ("full" if planned.checkpointed == "all" else "none"), ""])


def _mixed_precision(engine: str, planned: Planned, sharding: str) -> str:
    """``no``, ``bf16`` or ``fp16``, as transformers and accelerate mean it; under DeepSpeed it is DeepSpeed's mode."""
    precision, _, mixed = planned.step.precision.partition("-")
    if not sharding.startswith("zero"):
        return precision if mixed else "no"
    if mixed:
        hint = f"Use 16-bit weights (--precision {precision}), or --emit deepspeed."
        raise planned.refusal(engine, f"{planned.step.precision} under DeepSpeed", hint)
    return precision if precision in _DTYPES else "no"


def _fsdp() -> dict[str, Any]:
    """FSDP2 as `--sharding fsdp` counts it: blocks are wrapped, and freed after their forward."""
    return {"version": 2, "auto_wrap_policy": _WRAPPED, "reshard_after_forward": True}


def _yaml(planned: Planned, use: str, values: Mapping[str, Any], *own: str, complete: bool = False) -> str:
    """YAML under comments: how to use it and, unless it is `complete`, what the file has no place for."""
    notes = [f"Written by memopt for {planned.model}. Use: {use}"]
    if planned.checkpointed != "none":
        notes.append(f"The recipe checkpoints {planned.checkpointed} blocks: the engine's own checkpointing is off.")
    if not complete:
        notes.append(f"Load the model: {planned.loading}")
        if (lora := planned.lora) is not None:
            notes.append(f"LoRA: LoraConfig({', '.join(f'{key}={value!r}' for key, value in lora.items())})")
        if planned.step.seq is not None:
            notes.append(f"Planned for rows of {planned.step.seq} tokens.")
    text: str = yaml.safe_dump(dict(values), sort_keys=False, width=120)
    return "".join(f"# {' '.join(note.split())}\n" for note in (*notes, *own)) + text


KINDS = {
    "trainer": Kind("training_args.yaml", _trainer),
    "accelerate": Kind("accelerate.yaml", _accelerate),
    "deepspeed": Kind(
        "deepspeed.json",
        _deepspeed,
        "TrainingArguments(deepspeed=...) has to be given batch, accumulation and bf16 or fp16 as in deepspeed.json.",
    ),
    "fsdp": Kind("fsdp.yaml", _fsdp_file),
    "axolotl": Kind("axolotl.yaml", _axolotl),
    "torchtitan": Kind(
        "torchtitan.args",
        _torchtitan,
        "torchtitan.args says batch, dtype, sharding and checkpointing; torchtitan trains modules of its own, "
        "and memopt does not patch them.",
    ),
}
