"""The training step of a report, as a user requests it and as it is traced: plain data, without torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from memopt.errors import ModelError, UsageError, check_choice, first_of
from memopt.walk.models.attention import Implementation

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from memopt.plan.recipe import Recipe
    from memopt.walk.calls.batch import Batch
    from memopt.walk.sites import Sites

Precision = Literal["fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed", "bf16-autocast"]
Train = Literal["full", "lora", "qlora"]
Checkpointing = Literal["none", "full"]
AdapterDtype = Literal["fp32", "base"]

ALL_LINEAR = "all-linear"


def has_16_bits(precision: Precision) -> bool:
    """Whether the weights are in 16 bits."""
    return precision in ("bf16", "fp16", "bf16-autocast")


@dataclass(frozen=True)
class Training:
    """The settings of training that change the bytes that are saved for backward."""

    batch: int = 1
    seq: int | None = 2048
    """Tokens in a row; None for models that read none."""
    precision: Precision = "bf16"
    """``mixed``: fp32 weights under autocast; ``bf16-autocast``: weights in bf16 under autocast."""
    train: Train = "full"
    """``qlora``: LoRA on linears that bitsandbytes holds in 4 bits."""
    lora_rank: int = 8
    lora_targets: tuple[str, ...] = (ALL_LINEAR,)
    """Or names of linears: the last part of their module name, or its beginning (``q`` for ``q_proj`` or ``query``), or
    whole module names."""
    lora_dropout: float = 0.0
    checkpointing: Checkpointing = "none"
    dropout: bool = True
    """False: eval mode, so that no dropout saves a mask."""
    cuda_kernels: bool = True
    """False: attention and dropout as the CPU runs them, to compare with a measurement there."""
    attention: Implementation | None = None
    """None: the attention that transformers chooses."""
    adapter_fp32: bool = False
    """LoRA weights in fp32 beside 16-bit base weights, PEFT's default; beside 4-bit ones they always are."""
    images: int = 0
    """Images in each row of text, whose features count as tokens of the row."""
    image_side: int | None = None
    """Height and width of an image in pixels; None for those in the config."""
    frozen: tuple[str, ...] = ()
    """Modules and parameters that full tuning does not train: whole names, or else parts between dots, where * stands
    for any characters: ``model.visual``, ``layers.[0-7]``, ``*norm*``."""
    modules_to_save: tuple[str, ...] = ()
    """As PEFT's: modules that are trained in full beside the adapters, by the ends of their names."""
    gathers_16_bits: bool = False
    """Whether the forward of a mixed step gets its fp32 weights in autocast's dtype, as FSDP's mixed precision."""
    use_dora: bool = False
    """As PEFT's: whether the adapters are DoRA's, which normalise each adapted weight in every forward."""

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained, and nothing else."""
        return self.train != "full"

    @property
    def is_under_autocast(self) -> bool:
        """Whether the step runs under autocast."""
        return self.precision.endswith(("mixed", "autocast"))

    def notes(self) -> list[str]:
        """Notes for readers of the bytes: which casts autocast makes, and the dtype of adapters."""
        if self.is_under_autocast:
            weights = "fp32 weights, whose 16-bit copies are listed as weight copies"
            if self.gathers_16_bits or not self.precision.endswith("mixed"):
                weights = "16-bit weights"
            return [f"Autocast: PyTorch's CPU rules, with the norms and softmax that CUDA runs in fp32; {weights}."]
        if self.precision == "fp32" or not self.has_adapters:
            return []
        if self.train == "qlora":
            return [
                "QLoRA: adapters in fp32, as PEFT makes them (TRL casts them to bf16), which save fp32 copies of their "
                "inputs in the stock model; not under autocast (bf16=True of a trainer: --precision bf16-autocast, and "
                "bf16-mixed as after prepare_model_for_kbit_training)."
            ]
        if self.adapter_fp32:
            return [
                "LoRA: adapters in fp32, as PEFT makes them, which save fp32 copies of their inputs in the stock "
                "model; under autocast (bf16=True of a trainer, TRL's default) they save 16-bit ones (--precision "
                "bf16-autocast), and in the dtype of the base weights none (--lora-dtype base, "
                "get_peft_model(autocast_adapter_dtype=False))."
            ]
        return ["LoRA: adapters in the dtype of the base weights (autocast_adapter_dtype=False)."]

    def __str__(self) -> str:
        words = [f"batch {self.batch}" + (f" x {self.seq} tokens" if self.seq else ""), self.precision]
        if self.images or self.image_side:
            count = f"{self.images} image{'s' * (self.images > 1)} a row" if self.images else "images"
            words.insert(1, count + (f" of {self.image_side} x {self.image_side}" if self.image_side else ""))
        if self.has_adapters:
            kind = "QLoRA" if self.train == "qlora" else "DoRA" if self.use_dora else "LoRA"
            dropout = f", dropout {self.lora_dropout:g}" if self.lora_dropout else ""
            saved = f", {first_of(self.modules_to_save, 3)} in full" if self.modules_to_save else ""
            words.append(f"{kind} rank {self.lora_rank} on {', '.join(self.lora_targets)}{dropout}{saved}")
        else:
            words.append("full fine-tuning" + (f" but for {first_of(self.frozen, 3)}" if self.frozen else ""))
        words.append("activation checkpointing" if self.checkpointing == "full" else "no activation checkpointing")
        words += [f"attention by {self.attention}"] if self.attention else []
        return ", ".join(words)


@dataclass(frozen=True)
class Request:
    """A training step as a user requests it, with nothing loaded; the fields are the arguments of `memopt.report`."""

    model: str | Path
    recipe: str | Path | Recipe | None = None
    batch: int | None = None
    seq: int | None = None
    precision: Precision = "bf16"
    train: Train = "full"
    lora_rank: int = 8
    lora_targets: Sequence[str] = (ALL_LINEAR,)
    lora_dtype: AdapterDtype = "fp32"
    lora_dropout: float = 0.0
    use_dora: bool = False
    modules_to_save: Sequence[str] = ()
    freeze: Sequence[str] = ()
    checkpointing: Checkpointing = "none"
    attention: Implementation | None = None
    overrides: Sequence[str] = ()
    inputs: Mapping[str, Any] | str | Path | None = None
    images: int | None = None
    image_side: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Check the values: a command line has checked them, a caller in Python has not. Raises a UsageError if an
        argument has a value that it cannot have, or that has no effect."""
        for each in fields(self):
            choices = get_args(globals().get(str(each.type).removesuffix(" | None")))  # of a Literal
            value = getattr(self, each.name)
            if choices and (value is not None or each.default is not None):
                check_choice(each.name, value, choices)
        if self.inputs is not None and (self.images or self.image_side):
            raise UsageError(
                "images and inputs cannot go together: the batch says which images there are.", "Leave out one."
            )
        for name in ("batch", "seq", "lora_rank", "images", "image_side"):
            value = getattr(self, name)
            if hasattr(value, "__index__") and type(value) is not bool:  # NumPy's integers too
                object.__setattr__(self, name, value := int(value))
            if (value is not None or name == "lora_rank") and (type(value) is not int or not 1 <= value < 1 << 53):
                raise UsageError(f"{name} is {value!r}, and has to be a whole number from 1 to 2^53.")
        if not isinstance(self.lora_dropout, int | float) or not 0 <= self.lora_dropout <= 1:
            raise UsageError(f"lora_dropout is {self.lora_dropout!r}, and has to be a number from 0 to 1.")
        if isinstance(self.overrides, str):
            object.__setattr__(self, "overrides", (self.overrides,))
        for name in ("lora_targets", "modules_to_save", "freeze"):
            if isinstance(text := getattr(self, name), str):  # as PEFT's target_modules
                object.__setattr__(self, name, tuple(each.strip() for each in text.split(",") if each.strip()))
        if self.modules_to_save and self.train == "full":
            hint = "Leave out --modules-to-save (modules_to_save), or use train 'lora'."
            raise UsageError("Full tuning trains every module: modules_to_save has no effect.", hint)
        if self.use_dora and self.train == "full":
            hint = "Leave out --use-dora (use_dora), or use train 'lora'."
            raise UsageError("Full tuning has no adapters: use_dora has no effect.", hint)
        if self.freeze and self.train != "full":
            hint = "Leave out --freeze (freeze), or use train 'full'."
            raise UsageError("Adapters leave all other weights frozen: freeze has no effect.", hint)
        if self.lora_dtype == "base" and self.train == "qlora":
            hint = "Leave out --lora-dtype (lora_dtype), or use train 'lora'."
            raise UsageError("Adapters on 4-bit weights are in fp32: 'base' has no effect.", hint)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Request:
        """A request from the `locals()` of a function that has an argument for each field (tests compare them)."""
        return cls(**{each.name: arguments[each.name] for each in fields(cls)})

    @property
    def training(self) -> Training:
        """The settings: without `batch` one row, without targets every linear; config or `inputs` may change sizes."""
        return Training(
            batch=self.batch or 1,
            images=self.images or 0,
            image_side=self.image_side,
            precision=self.precision,
            train=self.train,
            lora_rank=self.lora_rank,
            lora_targets=tuple(self.lora_targets) or (ALL_LINEAR,),
            lora_dropout=self.lora_dropout if self.train != "full" else 0.0,
            checkpointing=self.checkpointing,
            attention=self.attention,
            modules_to_save=tuple(self.modules_to_save),
            frozen=tuple(self.freeze),
            adapter_fp32=self.train != "full" and self.lora_dtype == "fp32" and has_16_bits(self.precision),
            use_dora=bool(self.use_dora),
        )


@dataclass(frozen=True)
class Adapters:
    """The adapters of PEFT on a live model. Names of parameters are those inside the transformers model."""

    configs: Mapping[str, Any]
    """PEFT's configs by the names of the adapters, as in ``peft_config``."""
    active: tuple[str, ...]
    trained: frozenset[str]
    """Names of the trained parameters."""
    are_alike: bool
    """Whether alike blocks have alike adapters."""


@dataclass(frozen=True)
class Step:
    """How a model is patched and trained. Only the config of the model is read."""

    config: PreTrainedConfig
    training: Training
    """``cuda_kernels=False`` traces the step of a CPU."""
    sites: Sites
    """The sites of this model (`memopt.walk.observe.walk_config`)."""
    recipe: Recipe | None = None
    """The recipe by which the model is patched; None for the stock model."""
    folded: Collection[str] = frozenset()
    """Norms whose affine is folded in the checkpoint."""
    inputs: Batch | None = None
    """A batch of the size in `training`; None: inputs of that size are made."""
    notes: tuple[str, ...] = ()
    adapters: Adapters | None = None
    """The adapters of a live model; None: those that `training` describes."""

    @property
    def stock(self) -> Step:
        """This step, of the model without patches."""
        return replace(self, recipe=None, folded=frozenset())

    @property
    def rules(self) -> Recipe:
        """The recipe of the step, which must have one."""
        assert self.recipe is not None, "the stock model has no recipe"
        return self.recipe

    def trained(self, **changes: Any) -> Step:
        """This step with other fields of `training`."""
        return replace(self, training=replace(self.training, **changes))


def check_peft() -> None:
    """Raises a ModelError if peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ModelError("A report for LoRA needs peft, which is not installed.", "pip install peft")
