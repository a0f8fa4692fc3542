"""Fewer layers for towers that another library builds: timm's models in transformers, by name, with `model_args`."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig

from memopt.walk.models.shrink.depth import MIN_DEPTH
from memopt.walk.models.shrink.width import MAX_HEAD_DIM, MAX_HEADS

#: Arguments that make one kind of model or another smaller: the first layers of every stage, of which most models have
#: four; those with five would build with four, too, and not run.
_SMALLER: tuple[dict[str, Any], ...] = (
    {"depth": MIN_DEPTH},
    *({name: (1,) * stages} for name in ("depths", "layers") for stages in (5, 4)),
    {"channel_multiplier": 0.25},
)
_NARROW = {"depth": MIN_DEPTH, "embed_dim": MAX_HEADS * MAX_HEAD_DIM, "num_heads": MAX_HEADS}


def is_tower(node: PreTrainedConfig) -> bool:
    """Whether `node` names a model of another library, whose widths its fields repeat."""
    return isinstance(vars(node).get("architecture"), str) and "model_args" in vars(node)


def cut_tower(node: PreTrainedConfig) -> None:
    """Give `node`, in place, the first `model_args` of few layers that its library takes, if it takes any."""
    node.model_args = json.loads(_cut(node.to_json_string(use_diff=False)))


@functools.cache
def _cut(text: str) -> str:
    """The new ``model_args`` of the config in `text`, both as JSON."""
    settings = json.loads(text)
    given = settings["model_args"] or {}
    choices = [{**given, **smaller} for smaller in _SMALLER]
    if {"embed_dim", "depth"} <= given.keys():  # the rest of the model reads the width here
        choices.insert(0, {**given, **_NARROW})
    return json.dumps(next((choice for choice in choices if _builds(settings, choice)), given))


def _builds(settings: dict[str, Any], arguments: dict[str, Any]) -> bool:
    try:
        with torch.device("meta"):
            AutoModel.from_config(
                CONFIG_MAPPING[settings["model_type"]].from_dict({**settings, "model_args": arguments})
            )
    except Exception:  # a library may raise anything for arguments that it does not know
        return False
    return True
