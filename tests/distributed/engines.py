"""One training loop under DDP, FSDP2 and DeepSpeed, and what each needs said in its own words.

A case runs in both ranks of a `tests.distributed.pair.Pair`. Every rank has its own batches and its own generator.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import memopt
from tests.factories import tiny_inputs, tiny_model

Kind = Literal["ddp", "fsdp2", "zero2", "zero3"]
Precision = Literal["fp32", "bf16", "fp16"]

#: Different batches of a rank, seen again and again so that there is something to learn.
BATCHES, ROWS, TOKENS = 4, 2, 16


@dataclass(frozen=True)
class Case:
    """How a tiny model is trained."""

    kind: Kind
    name: str = "llama"
    precision: Precision = "fp32"
    """``bf16``, ``fp16``: compute dtype beside fp32 weights, by the engine's own means."""
    checkpointing: bool = False
    accumulation: int = 1
    lora_dropout: float | None = None
    """None: full tuning."""
    overflows: tuple[int, ...] = ()
    """Steps whose loss is too large for gradients in fp16."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Of the model's config."""
    overrides: tuple[str, ...] = ()
    """Of the recipe."""
    rate: float = 0.005
    adam: bool = False
    """AdamW, whose states a checkpoint has to hold; it blows up the rounding of gradients that are nothing else."""

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(parameters, self.rate)
        return torch.optim.SGD(parameters, self.rate, momentum=0.9)

    def model(self) -> nn.Module:
        """The stock model, adapters included, with the same weights in every rank."""
        model: Any = tiny_model(self.name, use_cache=False, **dict(self.settings))
        if self.lora_dropout is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                config = LoraConfig(r=4, lora_dropout=self.lora_dropout, target_modules="all-linear")
                model = get_peft_model(model, config)
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:  # zeros would hide what happens to A
                        nn.init.normal_(parameter, std=0.1)
        return model

    def patched(self) -> nn.Module:
        """The same, patched."""
        return memopt.patch(self.model(), memopt.load_recipe("exact-unfolded", self.overrides))


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a tiny Llama or BERT, inside whatever wraps it."""
    return [module for module in model.modules() if type(module).__name__.endswith(("DecoderLayer", "BertLayer"))]


class Engine:
    """A model under an engine: what it takes to train it, to look at it and to save it."""

    def __init__(self, case: Case, model: Any) -> None:
        self.case, self.inner = case, model
        if case.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            if case.lora_dropout is not None:
                model.enable_input_require_grads()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def backward(self, loss: Tensor, *, last: bool) -> None:
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        """Whole parameters, in fp32 where the engine has such; all ranks have to ask."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        raise NotImplementedError

    def state(self) -> dict[str, Any] | None:
        """The whole state dict, in rank 0 at least; None where the model's own is whole."""
        return None

    def save_pretrained(self, folder: Path) -> None:
        """As accelerate's `get_state_dict` and the Trainer do it."""
        state = self.state()
        if torch.distributed.get_rank() == 0:
            self.inner.save_pretrained(folder, state_dict=state)

    def close(self) -> None:
        """Free what the engine holds beside the model."""


class TorchEngine(Engine):
    """DDP with autocast, or FSDP2 with its mixed precision; both with PyTorch's loss scaling in fp16."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        super().__init__(case, model)
        self.autocast: Any = contextlib.nullcontext()
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision)
        if case.kind == "ddp":
            self.model: Any = DistributedDataParallel(model)
            if dtype is not None:
                self.autocast = torch.autocast("cpu", dtype)
        else:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            for module in (*blocks(model), model):
                fully_shard(module, mp_policy=policy)
            self.model = model
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = case.optimizer(self.trained)
        self.scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=25, enabled=case.precision == "fp16")
        self.scales: list[float] = []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        with self.autocast:
            return self.model(**batch).loss

    def backward(self, loss: Tensor, *, last: bool) -> None:
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = last  # what `no_sync` sets
        else:
            self.model.set_requires_gradient_sync(last)
        self.scaler.scale(loss / self.case.accumulation).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {n: whole_of(p).detach().clone() for n, p in self.inner.named_parameters()}

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.inner, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.inner, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.inner, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def state(self) -> dict[str, Any] | None:
        return get_model_state_dict(self.inner, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


class DeepSpeed(Engine):
    """ZeRO-2 or ZeRO-3, with its own mixed precision."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        super().__init__(case, model)
        # Shared memory beside gloo is compiled at first use, for minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad])
        self.model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=zero_config(case))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.model.backward(loss)  # which divides it by the number of micro-batches
        if not last:
            self.model.step()  # counts micro-batches

    def step(self) -> None:
        self.model.step()

    def weights(self) -> dict[str, Tensor]:
        full = deepspeed.utils.safe_get_full_fp32_param
        found = {}
        for name, parameter in self.inner.named_parameters():
            if parameter.requires_grad:
                found[name] = full(parameter).clone()
        return found

    def save(self, folder: Path) -> None:
        self.model.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        path, _ = self.model.load_checkpoint(str(folder))
        assert path is not None

    def state(self) -> dict[str, Any] | None:
        return self.model._zero3_consolidated_16bit_state_dict() if self.case.kind == "zero3" else None

    def close(self) -> None:
        self.model.destroy()


def zero_config(case: Case) -> dict[str, Any]:
    """The settings of `case` in DeepSpeed's words; buckets of a size that tiny models fill."""
    zero = {
        "stage": int(case.kind[-1]),
        "reduce_bucket_size": 20_000,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 10_000,
    }
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.0,
        "gradient_accumulation_steps": case.accumulation,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return {**config, "bf16": {"enabled": True}} if case.precision == "bf16" else config


def engine(case: Case, model: nn.Module) -> Engine:
    """`model` under the engine of `case`."""
    return (DeepSpeed if case.kind.startswith("zero") else TorchEngine)(case, model)


@dataclass
class Trajectory:
    """What a run leaves behind."""

    losses: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    scales: list[float] = field(default_factory=list)

    def distance(self, other: Trajectory) -> float:
        """Largest relative difference of a loss or of a final parameter tensor; NaN counts as infinite."""
        assert self.parameters.keys() == other.parameters.keys()
        of_losses = [abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True)]
        of_parameters = [
            float((mine - other.parameters[name]).norm() / other.parameters[name].norm())
            for name, mine in self.parameters.items()
        ]
        distances = [*of_losses, *of_parameters]
        return max(distances) if all(map(math.isfinite, distances)) else math.inf


def trained(case: Case, running: Engine, rank: int, steps: int, *, first: int = 0) -> Trajectory:
    """Train for `steps` steps, the first of which is number `first` of the run."""
    found = Trajectory()
    torch.manual_seed(100 * first + rank)
    for step in range(first, first + steps):
        total = 0.0
        for part in range(case.accumulation):
            loss = running.forward(batch(case, rank, step * case.accumulation + part))
            too_large = 2.0**60 if step in case.overflows else 1.0
            running.backward(loss * too_large, last=part == case.accumulation - 1)
            total += float(loss.detach())
        running.step()
        found.losses.append(total / case.accumulation)
    found.parameters = running.weights()
    found.scales = getattr(running, "scales", [])
    return found


def batch(case: Case, rank: int, number: int) -> dict[str, Tensor]:
    """Batch `number` of a rank."""
    inputs = tiny_inputs(case.name, ROWS, TOKENS, seed=number % BATCHES * 2 + rank)
    inputs["attention_mask"][0, TOKENS - 3 :] = 0  # padding
    return inputs


@contextlib.contextmanager
def closing(running: Engine) -> Iterator[Engine]:
    try:
        yield running
    finally:
        running.close()


def whole_of(parameter: Any) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
