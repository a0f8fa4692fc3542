"""A planned training step, and one function for each engine that writes the step as the engine's configuration file.

Plain data, no torch. A file sets nothing but the plan.

Sources: transformers' TrainingArguments 5.23, accelerate's ClusterConfig 1.15, DeepSpeedConfig 0.19, axolotl's
AxolotlInputConfig 0.19, torchtitan's ConfigManager 0.3.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from memopt.errors import UsageError
from memopt.patches.capabilities import EngineSettings
from memopt.patches.registry import having
from memopt.plan.recipe import Recipe, dump_recipe
from memopt.prediction.planner.choice import Choice
from memopt.prediction.setup import TRAINER_NAMES, Setup, Sharding
from memopt.trace.training import ALL_LINEAR, Precision, Training

RECIPE_FILE = "recipe.yaml"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
#: FSDP2 as `--sharding fsdp` counts it: each block is wrapped, and resharded after its forward.
_FSDP = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}
_ANY: tuple[Sharding, ...] = ("none", "ddp", "fsdp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Planned:
    """A training step as an engine must run it."""

    model: str
    """The model to load: a hub id or a folder."""
    recipe_file: str
    """Path at which the recipe will be written."""
    recipe: Recipe
    step: Training
    """The training step; its batch is one micro-batch on one device."""
    setup: Setup = field(default_factory=Setup)
    settings: dict[str, str] = field(default_factory=dict)
    """Values of engines' own settings, from the patches (`Patch.engine_settings`)."""

    patched: bool = False
    """Whether the model is a folder that `memopt patch` writes. Then the plan is not about devices: they share the
    model in the engine's usual way."""

    @property
    def loading(self) -> str:
        """The code by which a script loads the model."""
        dtype = _DTYPES.get(self.step.precision.removesuffix("-autocast"), "float32")
        attention = f", attn_implementation={self.step.attention!r}" if self.step.attention else ""
        if self.patched:
            return f"memopt.load({self.model!r}, dtype=torch.{dtype}{attention})"
        then = f"then memopt.patch(model, {self.recipe_file!r})"
        if self.step.train == "qlora":
            precision, _, mixed = self.step.precision.partition("-")
            dtype = _DTYPES.get(precision, "float32")
            given = f"load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.{dtype}"
            if self.setup.sharding in ("fsdp", "zero3"):  # all shards must have one dtype
                given += f", bnb_4bit_quant_storage=torch.{dtype}"
            dtype += f", quantization_config=BitsAndBytesConfig({given})"
            then = f"prepare_model_for_kbit_training(model, False), {then}" if mixed == "mixed" else then
        return f"from_pretrained({self.model!r}, dtype=torch.{dtype}{attention}), {then}"

    @property
    def checkpointed(self) -> str:
        """``none``, ``some`` or ``all`` blocks are checkpointed by the recipe."""
        return self.settings.get("gradient_checkpointing", "none")

    @property
    def attention(self) -> str | None:
        """The attention implementation that the recipe sets, or with which the model is loaded; None: its own."""
        return self.settings.get("attn_implementation", self.step.attention)

    @property
    def lora(self) -> dict[str, int | float | str | list[str]] | None:
        """Arguments of `peft.LoraConfig`; None if everything is trained."""
        if self.step.train == "full":
            return None
        names = self.step.lora_targets
        dropout = {"lora_dropout": self.step.lora_dropout} if self.step.lora_dropout else {}
        targets = ALL_LINEAR if ALL_LINEAR in names else list(names)
        saved = {"modules_to_save": list(self.step.modules_to_save)} if self.step.modules_to_save else {}
        dora = {"use_dora": True} if self.step.use_dora else {}
        return {"r": self.step.lora_rank, "target_modules": targets, **dropout, **dora, **saved}

    def shared(self, engine: str, *ways: Sharding) -> Sharding:
        """How the devices share the model: one of `ways`, the first if the plan is not about devices; else an error."""
        if self.patched:
            return ways[0]
        if self.setup.sharding in ways:
            return self.setup.sharding
        wanted = " or ".join(f"--sharding {way}" for way in ways if way != "none")
        raise self.refusal(engine, f"sharding '{self.setup.sharding}'", f"Plan with {wanted} --devices N.")

    def refusal(self, engine: str, what: str, hint: str) -> UsageError:
        """The error for a plan that an engine's file cannot express."""
        return UsageError(f"--emit {engine}: its configuration cannot express {what}.", hint)


def planned_step(model: str, recipe_file: str, choice: Choice) -> Planned:
    """The step that `memopt report --budget` chose."""
    plan, step = choice.plan, replace(choice.step, batch=choice.plan.batch)
    setup = replace(choice.setup, accumulation=plan.accumulation)
    return Planned(model, recipe_file, plan.recipe, step, setup, _settings(plan.recipe, choice.blocks))


def patched_step(folder: str, recipe_file: str, recipe: Recipe, blocks: Sequence[str], dtype: str | None) -> Planned:
    """A patched checkpoint, which will be written to `folder` and fixes recipe and dtype, not a batch: one row, without
    accumulation. `dtype` is that of its weights, as in config.json; fp16 weights are trained in fp32 under autocast,
    with a scaled loss."""
    precisions: dict[str | None, Precision] = {"bfloat16": "bf16", "float16": "fp16-mixed"}
    step = Training(seq=None, precision=precisions.get(dtype, "fp32"))
    # The checkpoint is folded already, and memopt.patch takes no recipe that folds.
    return Planned(folder, recipe_file, recipe.unfolded(), step, settings=_settings(recipe, blocks), patched=True)


def _settings(recipe: Recipe, blocks: Sequence[str]) -> dict[str, str]:
    found = (patch.engine_settings(recipe, blocks) for patch in having(EngineSettings))
    return {key: value for settings in found for key, value in settings.items()}


@dataclass(frozen=True)
class Kind:
    """A kind of configuration file."""

    file: str
    ways: tuple[Sharding, ...]
    """How devices may share, the usual way first."""
    text: Callable[[str, Planned, Sharding], str]
    """(the engine's name, the plan, one of `ways`) -> the content of the file."""
    note: str = ""
    """Notes for the user beside the file."""


def check_kinds(names: Iterable[str]) -> tuple[str, ...]:
    """`names`, each once; a UsageError, which names the nearest kind, if one is no kind of file."""
    found = tuple(dict.fromkeys([names] if isinstance(names, str) else names))
    for name in found:
        if name not in KINDS:
            near = difflib.get_close_matches(name, KINDS, n=1, cutoff=0.5)
            hint = f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(KINDS)}."
            raise UsageError(f"--emit '{name}' is no engine.", hint)
    return found


def files_of(planned: Planned, kinds: Iterable[str]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """(file name -> content, for the recipe and the file of each of `kinds`; notes for the user). Raises a UsageError
    if a file cannot express the plan, which says which part of it, and what to do."""
    files = {RECIPE_FILE: dump_recipe(planned.recipe)}
    chosen = {name: KINDS[name] for name in check_kinds(kinds)}
    files |= {kind.file: kind.text(name, planned, planned.shared(name, *kind.ways)) for name, kind in chosen.items()}
    notes = tuple(kind.note for kind in chosen.values() if kind.note)
    return {name: text.encode() for name, text in files.items()}, notes


def files_named(kinds: Iterable[str]) -> tuple[str, ...]:
    """Names of the files that `files_of` makes for `kinds`."""
    return (RECIPE_FILE, *(KINDS[name].file for name in check_kinds(kinds)))


def file_names() -> frozenset[str]:
    """Every name that a file may have."""
    return frozenset({RECIPE_FILE, *(kind.file for kind in KINDS.values())})


def _trainer_name(engine: str, planned: Planned) -> str:
    """The Trainer's name for the optimizer; axolotl uses the same names."""
    optimizer = planned.setup.optimizer
    if optimizer not in TRAINER_NAMES:
        raise planned.refusal(engine, f"optimizer {optimizer}", f"Plan with one of: {', '.join(TRAINER_NAMES)}.")
    return TRAINER_NAMES[optimizer]


def _trainer(engine: str, planned: Planned, sharding: Sharding) -> str:
    precision = _mixed_precision(engine, planned, sharding)
    values: dict[str, Any] = {
        "per_device_train_batch_size": planned.step.batch,
        "gradient_accumulation_steps": planned.setup.accumulation,
        "optim": _trainer_name(engine, planned),
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "gradient_checkpointing": False,
    }
    if sharding == "fsdp":
        values |= {"fsdp": True, "fsdp_config": _FSDP}
    elif sharding.startswith("zero"):
        values["deepspeed"] = _deepspeed_values(planned, sharding)
    return _yaml(
        planned, "HfArgumentParser(TrainingArguments).parse_yaml_file(...), or --config of TRL's commands", values
    )


def _accelerate(engine: str, planned: Planned, sharding: Sharding) -> str:
    """accelerate's file. It cannot hold the batch, and the accumulation only under DeepSpeed: a comment names them."""
    kinds = {"none": "NO", "ddp": "MULTI_GPU", "fsdp": "FSDP"}
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kinds.get(sharding, "DEEPSPEED"),
        "mixed_precision": _mixed_precision(engine, planned, sharding),
    }
    if not planned.patched:
        values["num_processes"] = planned.setup.devices
    if sharding == "fsdp":
        values["fsdp_config"] = {f"fsdp_{key}": value for key, value in _FSDP.items()}
    elif sharding.startswith("zero"):
        stage = int(sharding[-1])
        values["deepspeed_config"] = {"zero_stage": stage, "gradient_accumulation_steps": planned.setup.accumulation}
    batch, setup = planned.step.batch, planned.setup
    own = f"Micro-batches of {batch}, {setup.accumulation} in a step, {setup.optimizer}: in your script."
    return _yaml(planned, "accelerate launch --config_file ...", values, own)


def _deepspeed_values(planned: Planned, sharding: str) -> dict[str, Any]:
    """Its 16-bit modes keep fp32 weights beside the 16-bit weights. The estimate for `--sharding zero*` counts both."""
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": planned.step.batch,
        "gradient_accumulation_steps": planned.setup.accumulation,
        "zero_optimization": {"stage": int(sharding[-1])},
    }
    precision, _, mixed = planned.step.precision.partition("-")
    if mixed:
        values["torch_autocast"] = {"enabled": True, "dtype": _DTYPES[precision]}
    elif precision in _DTYPES:
        values[precision] = {"enabled": True}
    return values


def _axolotl(engine: str, planned: Planned, sharding: Sharding) -> str:
    step, precision = planned.step, planned.step.precision
    if precision.endswith("mixed"):  # axolotl's `bf16: true` loads the weights in bf16 too
        hint = f"Use 16-bit weights: --precision {precision[:4]}."
        raise planned.refusal(engine, f"{precision}, fp32 weights under autocast", hint)
    values: dict[str, Any] = {
        "base_model": planned.model,
        "plugins": ["memopt.axolotl.Plugin"],
        "memopt_recipe": planned.recipe_file,
        "micro_batch_size": planned.step.batch,
        "gradient_accumulation_steps": planned.setup.accumulation,
        "optimizer": _trainer_name(engine, planned),
        "bf16": precision == "bf16-autocast",
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
        if step.lora_dropout:
            values["lora_dropout"] = step.lora_dropout
        if step.use_dora:
            values["peft_use_dora"] = True
        if step.modules_to_save:
            values["lora_modules_to_save"] = list(step.modules_to_save)
        if step.train == "qlora":
            values["load_in_4bit"] = True
    if sharding == "fsdp":
        values |= {"fsdp_version": 2, "fsdp_config": {k: v for k, v in _FSDP.items() if k != "version"}}
    elif sharding.startswith("zero"):
        values["deepspeed"] = _deepspeed_values(planned, sharding)
    return _yaml(planned, "axolotl train ..., after you have added your datasets", values, complete=True)


def _torchtitan(engine: str, planned: Planned, sharding: Sharding) -> str:
    """Arguments of torchtitan's command line, its only form of settings: one per line, the last one a sub-command."""
    step, setup, devices = planned.step, planned.setup, planned.setup.devices
    refuse = [
        (step.has_adapters, "LoRA", "Plan with --train full."),
        (setup.optimizer != "adamw-fused", f"optimizer {setup.optimizer}", "Plan with --optimizer adamw-fused."),
        (step.precision.startswith("fp16") or step.precision == "bf16-autocast", step.precision,
         "Plan with --precision bf16 or bf16-mixed."),
        (planned.checkpointed == "some", "activation checkpointing of chosen blocks (only of all or none)",
         "Give a recipe with checkpointing.method full or none."),
        (planned.attention not in (None, "sdpa"), f"attention by {planned.attention}", "Use sdpa."),
    ]  # fmt: skip
    for wrong, what, hint in refuse:
        if wrong:
            raise planned.refusal(engine, what, hint)
    values = {
        "training.local-batch-size": step.batch,
        "training.global-batch-size": step.batch * setup.accumulation * devices,
        **({} if step.seq is None else {"training.seq-len": step.seq}),
        "training.dtype": "bfloat16" if step.precision == "bf16" else "float32",
        "training.mixed-precision-param": "float32" if step.precision == "fp32" else "bfloat16",
        "parallelism.data-parallel-replicate-degree": devices if sharding == "ddp" else 1,
        "parallelism.data-parallel-shard-degree": devices if sharding == "fsdp" else 1,
    }
    lines = [f"--{key}={value}" for key, value in values.items()]
    return "\n".join([*lines, "activation-checkpoint:" + ("full" if planned.checkpointed == "all" else "none"), ""])


def _mixed_precision(engine: str, planned: Planned, sharding: str) -> str:
    """``no``, ``bf16`` or ``fp16``: autocast's dtype, as transformers and accelerate mean it; or DeepSpeed's mode."""
    precision, _, mixed = planned.step.precision.partition("-")
    if not sharding.startswith("zero"):
        return precision if mixed else "no"
    if mixed:
        hint = f"Use 16-bit weights (--precision {precision}), or --emit deepspeed."
        raise planned.refusal(engine, f"{planned.step.precision} under DeepSpeed", hint)
    return precision if precision in _DTYPES else "no"


def _yaml(planned: Planned, use: str, values: Mapping[str, Any], *own: str, complete: bool = False) -> str:
    """YAML under comments: how to use the file and, unless it is `complete`, the parts of the plan that it lacks."""
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
    "trainer": Kind("training_args.yaml", _ANY, _trainer),
    "accelerate": Kind("accelerate.yaml", _ANY, _accelerate),
    "deepspeed": Kind(
        "deepspeed.json",
        ("zero2", "zero1", "zero3"),
        lambda _, planned, sharding: json.dumps(_deepspeed_values(planned, sharding), indent=2) + "\n",
        "Give TrainingArguments(deepspeed=...) the batch, accumulation and bf16 or fp16 of deepspeed.json.",
    ),
    "fsdp": Kind("fsdp.yaml", ("fsdp",), _accelerate),
    "axolotl": Kind("axolotl.yaml", _ANY, _axolotl),
    "torchtitan": Kind(
        "torchtitan.args",
        ("none", "ddp", "fsdp"),
        _torchtitan,
        "torchtitan.args says batch, dtype, sharding and checkpointing; torchtitan trains modules of its own, "
        "and memopt does not patch them.",
    ),
}
