"""Towers that another library builds, by name: timm's models, where it is installed; here, a library of this file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from memopt.walk.models.shrink.config import shrunken

WIDTH, BLOCKS = 1024, 40


class NamedConfig(PreTrainedConfig):
    model_type = "a_tower_by_its_name"

    def __init__(self, architecture: str = "deep", model_args: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.architecture, self.model_args = architecture, model_args
        self.hidden_size = (model_args or {}).get("embed_dim", WIDTH)
        super().__init__(**kwargs)


class NamedModel(PreTrainedModel):
    """A library: `deep` takes a depth, `staged` the depths of its stages, `fixed` nothing."""

    config_class = NamedConfig
    main_input_name = "inputs_embeds"

    def __init__(self, config: NamedConfig) -> None:
        super().__init__(config)
        width, blocks = self.blocks(config.architecture, **(config.model_args or {}))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.post_init()

    @staticmethod
    def blocks(architecture: str, embed_dim: int = WIDTH, num_heads: int = 16, **sizes: Any) -> tuple[int, int]:
        taken = {"deep": {"depth": BLOCKS}, "staged": {"depths": (BLOCKS // 4,) * 4}, "fixed": {}}[architecture]
        if not sizes.keys() <= taken.keys():
            raise TypeError("unexpected arguments")
        [size] = {**taken, **sizes}.values() or [BLOCKS]
        if isinstance(size, int):
            return embed_dim, size
        if len(size) != 4:
            raise IndexError("it has four stages")
        return embed_dim, sum(size)

    def forward(self, inputs_embeds: torch.Tensor) -> BaseModelOutput:
        for block in self.blocks:
            inputs_embeds = inputs_embeds + block(inputs_embeds)
        return BaseModelOutput(last_hidden_state=inputs_embeds)


AutoConfig.register(NamedConfig.model_type, NamedConfig, exist_ok=True)
AutoModel.register(NamedConfig, NamedModel, exist_ok=True)


@pytest.mark.parametrize(
    ("architecture", "given", "arguments", "width"),
    [
        ("deep", None, {"depth": 2}, WIDTH),
        ("deep", {"embed_dim": 2048, "depth": 24}, {"embed_dim": 128, "depth": 2, "num_heads": 4}, 2048),
        ("staged", None, {"depths": [1, 1, 1, 1]}, WIDTH),
    ],
)
def test_a_tower_named_in_a_library_gets_fewer_layers(
    architecture: str, given: Any, arguments: dict[str, Any], width: int
) -> None:
    config = NamedConfig(architecture, given)
    small = next(shrunken(config))
    assert small.model_args == arguments
    # The library decides its widths, which the rest of the model reads in these fields.
    assert small.hidden_size == width
    assert config.model_args == given


def test_a_tower_whose_library_takes_no_sizes_stays_as_it_is() -> None:
    small = [config.model_args or {} for config in shrunken(NamedConfig("fixed"))]
    assert small
    assert not any(small)
