"""Ways to train a tiny model on the emulated device: every model, training, checkpointing and precision together.

A way is four words. :func:`pairwise` chooses few ways in which every two words that go together meet.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import memopt
from memopt.plan.recipe import Recipe, load_recipe
from tests.factories import tiny_inputs, tiny_model

MODELS = ("llama", "bert", "roberta", "t5", "vit", "gpt2", "whisper", "mixtral", "gemma2")
TRAINING = ("full", "lora")
CHECKPOINTING = ("none", "non-reentrant", "reentrant", "levels", "offload", "long context")
PRECISION = ("fp32", "bf16", "autocast outside", "autocast inside")

#: How blocks run again by a recipe; the other words of `CHECKPOINTING` are switches of transformers.
_RECIPES = {
    "levels": ("exact-levels", ()),
    "offload": ("exact-levels", ("checkpointing.n=1", "checkpointing.offload=input")),
    "long context": ("long-context", ("tiles.tokens=8",)),
}


@dataclass(frozen=True)
class Way:
    model: str
    training: str = "full"
    checkpointing: str = "none"
    precision: str = "fp32"

    def __str__(self) -> str:
        return f"{self.model}, {self.training}, {self.checkpointing}, {self.precision}"

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def computed_in(self) -> torch.dtype:
        """Of most products."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    @property
    def recipe(self) -> Recipe | None:
        """What the model is patched with; None for the default."""
        name, settings = _RECIPES.get(self.checkpointing, (None, ()))
        return None if name is None else load_recipe(name, list(settings))


def pairwise(ways: list[Way]) -> list[Way]:
    """Few of `ways`, in which every two words that are together in some way are together in one of them."""

    def pairs(way: Way) -> set[Any]:
        return set(itertools.combinations(vars(way).items(), 2))

    wanted, chosen = set().union(*map(pairs, ways)), []
    while wanted:
        chosen.append(max(ways, key=lambda way: len(pairs(way) & wanted)))
        wanted -= pairs(chosen[-1])
    return chosen


@functools.cache
def every_way() -> tuple[Way, ...]:
    return tuple(itertools.starmap(Way, itertools.product(MODELS, TRAINING, CHECKPOINTING, PRECISION)))


def built(way: Way, device: str = "cuda") -> Any:
    """The stock model of a way, in train mode."""
    model: Any = tiny_model(way.model, way.dtype).to(device)
    if way.training == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        # PEFT has no default for these.
        targets = ["q_proj", "v_proj"] if way.model in ("vit", "mixtral", "whisper") else None
        model = get_peft_model(model, LoraConfig(target_modules=targets))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:  # zeros would hide every gradient of A
                    parameter.normal_(std=0.1)
    return checkpointed(way, model).train()


def checkpointed(way: Way, model: Any) -> Any:
    """`model`, with transformers' checkpointing switched on where the way has it."""
    if way.checkpointing.endswith("reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": way.checkpointing == "reentrant"})
    if way.training != "full" and way.checkpointing != "none" and hasattr(model, "enable_input_require_grads"):
        with contextlib.suppress(NotImplementedError):  # a model of images has no embedding of tokens
            model.enable_input_require_grads()
    return model


def batch(way: Way, device: str = "cuda", seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch on the device, with labels of which some are ignored where there are many."""
    inputs = tiny_inputs(way.model, 2, 8, seed, way.dtype)
    if inputs["labels"].dim() > 1:
        inputs["labels"][:, :2] = -100
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def patched(way: Way, model: nn.Module) -> None:
    memopt.patch(model, *([] if way.recipe is None else [way.recipe]))


@contextlib.contextmanager
def _autocast(way: Way, enabled: bool) -> Iterator[None]:
    with torch.autocast("cuda", torch.bfloat16, enabled=enabled and way.precision.startswith("autocast")):
        yield


def step(way: Way, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Forward and backward as the way says; returns the loss on the device."""
    with _autocast(way, True):
        loss: torch.Tensor = model(**inputs).loss
        if way.precision == "autocast inside":
            loss.backward()
    if way.precision != "autocast inside":
        loss.backward()
    return loss.detach()
