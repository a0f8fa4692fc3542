"""Reduces the layers in a config to as many as show each kind of layer of the built model.

The first n layers are kept, so that every remaining name means the same layer as before. Towers that another library
builds (timm's models in transformers, by name, with `model_args`) get fewer layers by the arguments of that library.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig

from memopt.errors import ModelError
from memopt.walk.models.build import instantiate
from memopt.walk.models.config import config_nodes, integer_fields, is_integer, standard_name
from memopt.walk.models.shrink.width import MAX_HEAD_DIM, MAX_HEADS

MIN_DEPTH = 2
MAX_DEPTH = 12
"""Most layers that are kept; kinds of layers are looked for in the first layers, up to this number."""

_DEPTH = re.compile(r"(num_|n_)?((en|de)coder_)?(num_)?(hidden_)?(layers?|depth)")
_LAYER_COUNT = re.compile(r".*_layers")
_LAYER_INDICES = re.compile(r".*(_layers|_indices|_indexes|_idx|_layer_ids)")
#: Arguments that make one kind of model or another smaller: the first layers of every stage, of which most models have
#: four; those with five would build with four, too, and not run.
_SMALLER: tuple[dict[str, Any], ...] = (
    {"depth": MIN_DEPTH},
    *({name: (1,) * stages} for name in ("depths", "layers") for stages in (5, 4)),
    {"channel_multiplier": 0.25},
)
_NARROW = {"depth": MIN_DEPTH, "embed_dim": MAX_HEADS * MAX_HEAD_DIM, "num_heads": MAX_HEADS}


def cut_depth(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of `config` with as few layers as show every kind; at least `MIN_DEPTH` where it has so many."""
    probe = with_depth(config, MAX_DEPTH)
    return with_depth(probe, _needed_depth(probe))


def with_depth(config: PreTrainedConfig, depth: int) -> PreTrainedConfig:
    """A copy of `config` with at most `depth` layers in every stack; fields that count or list layers fit that."""
    small = copy.deepcopy(config)
    for node in config_nodes(small):
        _cut_node(node, depth)
    return small


def _cut_node(node: PreTrainedConfig, depth: int) -> None:
    standard = standard_name(node, "num_hidden_layers")
    main = {name: value for name, value in integer_fields(node) if name == standard or _DEPTH.fullmatch(name)}
    if isinstance(depths := vars(node).get("depths"), list | tuple):
        # A pyramid keeps its stages, since its widths and consumers are listed by stage; each stage has fewer layers.
        main = {name: value for name, value in main.items() if value != len(depths)}
    # Nemotron-H counts no layers: it lists their types.
    longest = max(main.values(), default=len(vars(node).get(standard_name(node, "layer_types")) or ()))
    # A count that equals the length of a list counts that list's items (the convolutions before the layers).
    lengths = {len(value) for value in vars(node).values() if isinstance(value, list | tuple)} - {longest}
    for name, value in main.items():
        setattr(node, name, min(value, depth))
    for name, value in list(vars(node).items()):
        if name in main or name.startswith("_"):
            continue
        if name == "depths" and isinstance(value, list | tuple):
            setattr(node, name, type(value)(min(item, MIN_DEPTH) for item in value))
        elif name == "stage_names" and isinstance(value, list) and len(value) == longest + 1 > depth + 1:
            _cut_stages(node, value[: depth + 1])
        elif longest > depth and not (is_integer(value) and value in lengths):
            new = _cut_layer_field(name, value, longest, depth)
            if new is not value:
                setattr(node, name, new)


def _cut_stages(node: PreTrainedConfig, names: list[str]) -> None:
    """Keep the first stages of a backbone, `names`, and the number of its outputs, on which its consumers rely."""
    count = len(vars(node)["stage_names"])
    old = [index % count for index in _output_stages(node)]
    new = [min(index, len(names) - left) for index, left in zip(old, range(len(old), 0, -1), strict=True)]
    node.stage_names = names
    if new and new[0] >= 0:
        node._out_indices, node._out_features = new, [names[index] for index in new]


def _output_stages(node: PreTrainedConfig) -> list[int]:
    """Indices of the layers whose outputs a backbone returns."""
    indices = vars(node).get("_out_indices")
    return list(indices) if isinstance(indices, list | tuple) else []


def _cut_layer_field(name: str, value: Any, longest: int, depth: int) -> Any:
    """New value of a field, not the depth itself, that counts, lists or points to layers."""
    if is_integer(value) and MIN_DEPTH < value <= longest and _LAYER_COUNT.fullmatch(name):
        # "The first 3 are dense" is kept, "15 of 30 share" is scaled.
        return min(value, depth) if "dense" in name or "first" in name else max(1, value * depth // longest)
    if isinstance(value, str) and len(value) == longest and "pattern" in name:
        return value[:depth]
    if not isinstance(value, list | tuple) or not value:
        return value
    if len(value) == longest and (longest > 4 or "layer" in name):
        return value[:depth]
    if _LAYER_INDICES.fullmatch(name) and all(is_integer(item) and item < longest + 1 for item in value):
        return type(value)(item for item in value if item < depth) or type(value)([depth - 1])
    return value


def _needed_depth(config: PreTrainedConfig) -> int:
    """Layers needed to see each kind once, by the built modules; at least `MIN_DEPTH`."""
    try:
        model = instantiate(config, device="meta")
    except ModelError:
        return MIN_DEPTH
    needed = max(MIN_DEPTH, *(len(_output_stages(node)) for node in config_nodes(config)))
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            kinds = [_kind(layer) for layer in module]
            # A list in which every entry differs (stages of a pyramid) is no stack of layers.
            if len(set(kinds)) < len(kinds):
                needed = max(needed, *(kinds.index(kind) + 1 for kind in set(kinds)))
    return min(needed, MAX_DEPTH)


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """A key that is equal for layers of one kind: parameters, classes of modules, and their settings."""
    parameters = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    modules = tuple((name, type(module), _settings(module)) for name, module in layer.named_modules())
    return parameters, modules


def _settings(module: nn.Module) -> tuple[tuple[str, object], ...]:
    # Of numbers only the presence counts: layer indices and drop rates differ between layers of one kind.
    return tuple(
        (name, value if isinstance(value, str | bool) else value is None)
        for name, value in sorted(vars(module).items())
        if isinstance(value, str | bool | int | None) and name != "training"
    )


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
