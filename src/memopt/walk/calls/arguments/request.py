"""A model that needs inputs: the arguments of its forward, the settings of its config, and random values."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from memopt.errors import ModelError
from memopt.torch_compat import compiled_module
from memopt.walk.models.config import config_nodes

BATCH = 2
LENGTH, ODD_LENGTH = 16, 13
PADDING = 5
MAX_VOCABULARY = 3000
#: Fields of a config with the id of the token that stands for an image, video or sound feature in text.
PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index", "image_pad_token_id", "media_placeholder_token_id"),
    "video": ("video_token_id", "video_token_index", "video_pad_token_id"),
    "audio": ("audio_token_id", "audio_token_index"),
}

Kwargs = dict[str, Any]
Forms = Iterator[tuple[str, Kwargs]]
"""(detail, arguments) of the ways to give a forward one kind of input, the likeliest first."""


def inner_model(model: nn.Module) -> nn.Module:
    """The model inside wrappers (PEFT, DDP, torch.compile), whose forward has named arguments."""
    while True:
        if callable(getter := getattr(model, "get_base_model", None)):
            wrapped = getter()
        else:
            wrapped = compiled_module(model)
            if wrapped is None and not parameters_of(model):
                wrapped = getattr(model, "module", None)
        if not isinstance(wrapped, nn.Module) or wrapped is model:
            return model
        model = wrapped


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Named parameters of the forward of the model inside wrappers."""
    return parameters_of(inner_model(model))


def parameters_of(model: nn.Module, method: str = "forward") -> dict[str, inspect.Parameter]:
    """Named parameters of a method of `model` itself."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {n: p for n, p in inspect.signature(getattr(model, method)).parameters.items() if p.kind not in kinds}


@dataclass(frozen=True)
class Size:
    """Size of the batch of a training step."""

    rows: int
    tokens: int | None = None
    """Tokens in each row; None where the model reads no tokens, or for the number that a walk uses."""
    images: int = 0
    """Images in each row of text; their features count as tokens of the row."""
    side: int | None = None
    """Height and width of an image in pixels; None for those in the config."""


@dataclass(frozen=True)
class Request:
    """A model that needs inputs, and the variant and size of the inputs."""

    model: nn.Module
    config: PreTrainedConfig
    names: Mapping[str, inspect.Parameter]
    main: str
    variant: str
    generator: torch.Generator
    method: str = "forward"
    size: Size | None = None
    """None: a few rows of a few tokens. Floating inputs of a given size are on meta, since they may be large."""

    @classmethod
    def of(cls, model: nn.Module, variant: str, seed: int, method: str = "", size: Size | None = None) -> Request:
        """The request for the forward of `model`, or for a `method`, whose first argument is then the main one."""
        inner = inner_model(model)
        config = getattr(inner, "config", None)
        if not isinstance(config, PreTrainedConfig):
            raise ModelError(
                f"No inputs can be made for {type(inner).__name__}: it has no transformers config.",
                "Pass a batch of your own.",
            )
        main = getattr(inner, "main_input_name", "input_ids")
        main = main if isinstance(main, str) else next(iter(main), "input_ids")
        names = parameters_of(inner, method or "forward")
        main = next(iter(names), main) if method else main
        generator = torch.Generator().manual_seed(seed)
        return cls(inner, config, names, main, variant, generator, method or "forward", size)

    @property
    def required(self) -> list[str]:
        return [name for name, parameter in self.names.items() if parameter.default is inspect.Parameter.empty]

    def first(self, *names: str) -> str:
        """The first of `names` that is an argument; empty where none is."""
        return next((name for name in names if name in self.names), "")

    @property
    def step(self) -> Size:
        """The size of the step; a few rows if none is given."""
        return self.size or Size(BATCH)

    @property
    def batch(self) -> int:
        return self.step.rows

    @property
    def length(self) -> int:
        if self.size and self.size.tokens:
            return self.size.tokens
        if self.variant.startswith("length "):
            return int(self.variant.removeprefix("length "))
        return ODD_LENGTH if self.variant == "odd" else LENGTH

    @property
    def decoder_length(self) -> int:
        """Tokens of a decoder, which may have positions for fewer than its encoder."""
        limit = self.whole("max_decoder_position_embeddings", "max_target_positions", default=0)
        return min(self.length, limit) if limit > 0 else self.length

    @property
    def hidden(self) -> int:
        return self.whole("hidden_size", "d_model", default=64)

    @property
    def first_width(self) -> int:
        """Width of the vectors that the model's first layer takes; 0 where it takes none."""
        first = next((module for module in self.model.modules() if module._parameters.get("weight") is not None), None)
        if isinstance(first, nn.Linear):
            return first.in_features
        if isinstance(first, nn.Conv1d | nn.ConvTranspose1d):
            return first.in_channels
        weight = None if first is None or isinstance(first, nn.Embedding) else first._parameters["weight"]
        return weight.shape[0] if weight is not None and weight.dim() == 1 else 0

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.whole("num_channels", "in_channels", "in_chans", default=3)

    @property
    def patch_side(self) -> int:
        return self.whole("patch_size", default=16)

    def setting(self, *names: str, default: Any = None) -> Any:
        """First value of one of `names`, in the config, else in a nested config; names may be the standard ones."""
        for node in config_nodes(self.config):
            for name in names:
                value = vars(node).get(type(node).attribute_map.get(name, name))
                if value is not None:
                    return value
        return default

    def whole(self, *names: str, default: int) -> int:
        value = self.setting(*names, default=default)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        return value if isinstance(value, int) else default

    def normal(self, *shape: int) -> torch.Tensor:
        if self.size:
            return torch.empty(*shape, device="meta")
        return torch.randn(*shape, generator=self.generator)

    def ids(self, length: int | None = None) -> torch.Tensor:
        """Ordinary token ids, (batch, length)."""
        return self.tokens(self.batch, length or self.length)

    def tokens(self, *shape: int) -> torch.Tensor:
        pool = torch.tensor(ordinary_ids(self.config))
        return pool[torch.randint(0, len(pool), shape, generator=self.generator)]

    def ones(self, name: str, *shape: int) -> torch.Tensor:
        """A mask that masks nothing, of the dtype in the annotation of argument `name`."""
        boolean = name in self.names and "Bool" in str(self.names[name].annotation)
        return torch.ones(*shape, dtype=torch.bool if boolean else torch.long)

    def mask(self, length: int | None = None) -> torch.Tensor:
        mask = torch.ones(self.batch, length or self.length, dtype=torch.long)
        if self.variant == "padded":
            mask[-1, -PADDING:] = 0
        return mask


def ordinary_ids(config: PreTrainedConfig) -> list[int]:
    """Token ids that every vocabulary of the model has, without special ones."""
    special: set[int] = {0, 1, 2, 3}
    sizes = [MAX_VOCABULARY]
    for node in config_nodes(config):
        for name, value in vars(node).items():
            if name.endswith("vocab_size") and not name.startswith("type_") and isinstance(value, int) and value > 0:
                sizes.append(value)
            elif "token" in name or name.endswith(("_id", "_ids")):
                special.update(v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, int))
    return [token for token in range(min(sizes)) if token not in special] or list(range(min(sizes)))
