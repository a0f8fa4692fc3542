"""Shrinks fields that `memopt.walk.models.shrink.width` leaves: ranks, tables, channels of convolutions, inner stacks.

It is used for configs of which no lighter form runs. These fields are recognised by their names alone, so a field that
depends on one of them may be missed; then the model does not build or run, and the caller tries another config.
"""

from __future__ import annotations

import math
import re
from typing import Any

from transformers import PreTrainedConfig

from memopt.walk.models.config import integer_fields, is_integer, standard_name
from memopt.walk.models.shrink.width import halved, settle_head_parts

TABLE = 512
RANK = 64
WIDTH = 128
PYRAMID_WIDTH = 32
HEAD_DIM = 32
HEADS = 4
POSITIONS = 1024
LAYERS = 2

_TABLE = re.compile(r".*(vocab|num_embed(ding)?s|codebook_size).*")
_POSITIONS = re.compile(r"max_.*(position|embeddings).*|n_positions|.*max_seq_len.*")
_RANK = re.compile(r".*_rank")
_HEAD_DIM = re.compile(r".*head_dim")
_HEADS = re.compile(r".*_heads")
_FEW_HEADS = re.compile(r".*(kv|key_value).*")
_LAYERS = re.compile(r"((num|n)_(.*_)?(blocks|layers|attends)|num_.*_per_block|.*_depth)")
_NO_LAYERS = re.compile(r".*(dense|first|shared|feature|level|stage|every|interval|conv|downsampl|upsampl).*")
_WIDTH = re.compile(
    r".*(hidden|channels?|filters|embed|embd|width|latents|proj|dim)(_|$).*|.*(hidden|inner|out)_(size|dim).*"
)
_NO_WIDTH = re.compile(
    r".*(image|patch|position|window|kernel|length|stride|chunk|crop|batch|head_dim|label|mel|num_lat|input|feature|downsampl|samples|sampling|conv).*"
)
#: Fields whose name says that they equal another width: the groups of a depthwise convolution.
_FOLLOWS = re.compile(r".*groups|.*_features")
_RATES = re.compile(r".*(up|down)sampl.*(ratios|rates|factors)")
_FIRST_WIDTH = re.compile(r".*filters|base_(channels|dim)")
_MULTIPLIERS = re.compile(r".*mult(iplier)?s?")
_COEFFICIENT = re.compile(r"(width|depth)_(coefficient|mult(iplier)?)")


def cut_rest(nodes: list[PreTrainedConfig], before: list[dict[str, Any]], links: dict[int, int]) -> None:
    """Shrink, in place, every field of `nodes` that still has its value of `before` and is recognised by its name.
    `links` maps old widths to new ones across all nodes; widths decided here are added."""
    pairs = list(zip(nodes, before, strict=True))
    for node, old in pairs:
        if not _cut_coefficients(node, old, links):
            _cut_width_lists(node, old, links)
    for node, old in pairs:
        counted = {len(value) for value in vars(node).values() if isinstance(value, list | tuple)}
        # A backbone's outputs are named after its layers: `memopt.walk.models.shrink.depth` cuts both.
        staged = standard_name(node, "num_hidden_layers") if "stage_names" in vars(node) else ""
        for name, value in integer_fields(node):
            if old.get(name) == value and name != staged:
                setattr(node, name, _smaller(name, value, links, _target(name, node), counted))
    for node, old in pairs:
        for name, value in integer_fields(node):
            if _FOLLOWS.fullmatch(name) and value in links:
                setattr(node, name, links[value])
        settle_head_parts(node, old)


def _smaller(name: str, value: int, links: dict[int, int], target: int, counted: set[int]) -> int:
    """The new value of an integer field."""
    if _TABLE.fullmatch(name):
        return min(value, TABLE)
    if _POSITIONS.fullmatch(name):
        return min(value, POSITIONS)
    if _RANK.fullmatch(name):
        return halved(value, RANK)
    if _HEAD_DIM.fullmatch(name):
        # The rotated part of a head, and an indexer's head, which contains such a part, keep their size.
        return value if name == "head_dim" or re.search("rope|index", name) else halved(value, HEAD_DIM)
    if _HEADS.fullmatch(name):
        return min(value, HEADS // 2 if _FEW_HEADS.fullmatch(name) else HEADS)
    if _LAYERS.fullmatch(name) and not _NO_LAYERS.fullmatch(name):
        return value if value in counted else min(value, LAYERS)
    if _WIDTH.fullmatch(name) and not _NO_WIDTH.fullmatch(name) and value > target:
        return links.setdefault(value, halved(value, target))
    return value


def _target(name: str, node: PreTrainedConfig) -> int:
    """Largest value of the width `name`, where widths double or halve from stage to stage."""
    lists = {name: value for name, value in vars(node).items() if isinstance(value, list | tuple)}
    stages: int = max((len(value) for name, value in lists.items() if _RATES.fullmatch(name)), default=0)
    if stages:
        return max(4, 2 * WIDTH >> stages) if _FIRST_WIDTH.fullmatch(name) else max(PYRAMID_WIDTH, 4 << stages)
    return PYRAMID_WIDTH if any(_MULTIPLIERS.fullmatch(name) for name in lists) else WIDTH


def _cut_coefficients(node: PreTrainedConfig, old: dict[str, Any], links: dict[int, int]) -> bool:
    """Set width and depth coefficients to 1, and adapt the fields that count channels."""
    coefficients = {
        name: value
        for name, value in vars(node).items()
        if _COEFFICIENT.fullmatch(name) and isinstance(value, float) and value > 1
    }
    for name, value in coefficients.items():
        setattr(node, name, 1.0)
        if not name.startswith("width"):
            continue
        for field, channels in old.items():
            if field in ("hidden_dim", "hidden_size") and is_integer(channels):
                setattr(node, field, int(channels / value))
            elif field == "out_channels" and isinstance(channels, list | tuple) and channels:
                links.setdefault(int(channels[-1] * value), channels[-1])
    return bool(coefficients)


def _cut_width_lists(node: PreTrainedConfig, old: dict[str, Any], links: dict[int, int]) -> None:
    """Divide the widths of stages by one power of two, as long as each remains a multiple of its heads and of 4. A
    hidden size that equals the first stage's width stays equal to it."""
    lists = {
        name: list(value)
        for name, value in vars(node).items()
        if isinstance(value, list | tuple)
        and value
        and all(is_integer(item) for item in value)
        and max(value) > WIDTH
        and (_WIDTH.fullmatch(name) or re.fullmatch(r".*(hidden_sizes|channels?(_list)?|dims?|embed_dim.*)", name))
        and not _NO_WIDTH.fullmatch(name)
    }
    if not lists:
        return
    multiples = [
        list(value)
        for name, value in vars(node).items()
        if re.fullmatch(r".*(heads|groups).*", name) and isinstance(value, list | tuple)
    ]
    factor = 1
    while max(map(max, lists.values())) // factor > WIDTH and all(
        _divides(2 * factor, widths, multiples) for widths in lists.values()
    ):
        factor *= 2
    for name, widths in lists.items():
        setattr(node, name, type(vars(node)[name])(width // factor for width in widths))
        links.update({width: width // factor for width in widths if width // factor and width > WIDTH})
        hidden = standard_name(node, "hidden_size")
        if old.get(hidden) == widths[0]:
            setattr(node, hidden, widths[0] // factor)


def _divides(factor: int, widths: list[int], multiples: list[list[int]]) -> bool:
    units = [4] * len(widths)
    for heads in multiples:
        if len(heads) == len(widths):
            units = [math.lcm(unit, count) for unit, count in zip(units, heads, strict=True)]
    return all(width % (factor * unit) == 0 for width, unit in zip(widths, units, strict=True))
