"""Making the widths of a config smaller: hidden sizes, head counts and sizes, intermediate sizes, rotary sections.

Widths that are equal or proportional remain so, also across nested configs (a projection from one tower into another).
Fields are recognised by their names and values, never by the config's class.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from memopt.walk.models.config import config_nodes, integer_field, integer_fields, is_integer, standard_name

MAX_HEADS = 4
MAX_HEAD_DIM = 32
MIN_INNER = 64

#: Names of the width of a config's blocks. If a config has two, ``hidden_size`` is the width of its output.
_HIDDEN = ("embed_dim", "hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "model_dim")
_HEADS = re.compile(r"(linear_)?(num_|n_)?((en|de)coder_)?(attention_)?heads?")
_KEY_VALUE_HEADS = re.compile(r"(num_|n_)?(key_value|kv)_(attention_)?heads(_per_layer)?|multi_query_group_num")
_STATE_SPACE_HEADS = re.compile(r"(mamba|ssm).*heads")
_STATE_SPACE_HEAD_DIM = re.compile(r"(mamba|ssm)_(d_head|headdim|head_dim)")
_ROTARY_PART = re.compile(r".*rope_head_dim")
_GROUPS = re.compile(r"((mamba|ssm)_)?(n|num)_groups")
_INNER = re.compile(r".*(intermediate|ffn|d_?ff|inner|mlp_dim|mlp_hidden|feed_forward|time_step_rank).*")
_WIDTH = re.compile(r".*(hidden|embd|embed|proj|d_model|model_dim|width|channels|dim)(_|$).*|.*_size")
_NO_WIDTH = re.compile(
    r".*(image|patch|vocab|position|window|kernel|length|stride|head_dim|chunk|crop|batch|codebook|max_|label).*"
)


@dataclass
class Widths:
    """How the widths of one config shrink; `links` maps old widths to new ones across all nested configs."""

    links: dict[int, int] = field(default_factory=dict)
    ratio: Fraction = Fraction(1)
    heads: tuple[int, int] | None = None
    head_dim: tuple[int, int] | None = None


def decide_widths(node: PreTrainedConfig, links: dict[int, int], *, keep_head_dim: bool) -> Widths:
    """New widths of `node`; widths that other configs must follow are added to `links`."""
    hidden = next(filter(None, (integer_field(node, name) for name in _HIDDEN)), None)
    heads = _attention_heads(node)
    if hidden is None:
        return Widths(links)
    if pyramid := _head_pyramid(node):
        common = math.gcd(hidden, *pyramid)
        return Widths(links, Fraction(1, common))
    if heads is None:
        new_hidden = links.setdefault(hidden, halved(hidden, MAX_HEADS * MAX_HEAD_DIM, multiple=4))
        return Widths(links, Fraction(new_hidden, hidden))
    explicit = integer_field(node, "head_dim")
    size = explicit or hidden // heads
    new_heads = min(heads, MAX_HEADS)
    # Rotary tables of two axes rotate quarters of a head, so 4 has to remain a divisor.
    new_size = size if keep_head_dim else halved(size, MAX_HEAD_DIM, multiple=4)
    tied = hidden == heads * size
    if hidden in links:
        new_hidden = links[hidden]
        if tied:
            new_heads = next(count for count in (MAX_HEADS, 2, 1) if new_hidden % (2 * count) == 0 or count == 1)
            new_size = new_hidden // new_heads
    elif tied:
        new_hidden = new_heads * new_size
    else:
        new_hidden = max(MAX_HEAD_DIM, _even(Fraction(hidden * new_heads * new_size, heads * size), multiple=8))
    new_hidden = links.setdefault(hidden, min(hidden, new_hidden))
    return Widths(links, Fraction(new_hidden, hidden), (heads, new_heads), (size, new_size))


def _attention_heads(node: PreTrainedConfig) -> int | None:
    standard = integer_field(node, "num_attention_heads")
    return standard or next(
        (value for name, value in integer_fields(node) if _HEADS.fullmatch(name) and value > 0), None
    )


def _head_pyramid(node: PreTrainedConfig) -> list[int]:
    """Head counts of the stages, where they are listed."""
    value = vars(node).get(standard_name(node, "num_attention_heads"))
    return [item for item in value if is_integer(item)] if isinstance(value, list | tuple) else []


def scale_widths(node: PreTrainedConfig, widths: Widths) -> None:
    """Write `widths` into every field of `node` that is a width."""
    before = dict(integer_fields(node))
    for name, value in before.items():
        new = _new_width(name, value, node, widths)
        if new is not None and new != value:
            setattr(node, name, new)
    settle_head_parts(node, before)
    _settle_state_space(node, before)
    for name, value in list(vars(node).items()):
        if isinstance(value, list | tuple) and value and all(is_integer(item) for item in value):
            if _INNER.fullmatch(name):
                setattr(node, name, type(value)(_inner(item, widths.ratio) for item in value))
            elif name == standard_name(node, "num_attention_heads"):
                setattr(node, name, type(value)(max(1, int(item * widths.ratio)) for item in value))
            elif _KEY_VALUE_HEADS.fullmatch(name) and widths.heads:
                setattr(node, name, type(value)(_key_value_heads(item, *widths.heads) for item in value))
            elif name.endswith("_channels") and value[-1] in widths.links:
                # The last width of these convolutions is the width of the tower after them.
                setattr(node, name, type(value)((*value[:-1], widths.links[value[-1]])))
    if widths.head_dim and widths.head_dim[0] != widths.head_dim[1]:
        for value in vars(node).values():
            if isinstance(value, dict):
                _scale_rotary(value, Fraction(widths.head_dim[1], widths.head_dim[0]))


def settle_head_parts(node: PreTrainedConfig, before: Mapping[str, Any]) -> None:
    """Keep a head size the sum of its parts with rotary positions and without, if it was their sum."""

    def parts(fields: Mapping[str, Any]) -> int:
        return sum(fields.get(name) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim"))

    if "qk_head_dim" in before and before["qk_head_dim"] == parts(before):
        node.qk_head_dim = parts(vars(node))


def _settle_state_space(node: PreTrainedConfig, before: dict[str, int]) -> None:
    """Keep heads x head size the inner width of a state space: adapt its field, else the head size."""
    heads = next((name for name in before if _STATE_SPACE_HEADS.fullmatch(name.removeprefix("n_"))), None)
    size = next((name for name in before if _STATE_SPACE_HEAD_DIM.fullmatch(name)), None)
    if heads is None or size is None:
        return
    fields, hidden, inner = vars(node), standard_name(node, "hidden_size"), before[heads] * before[size]
    if before.get("mamba_d_ssm") == inner:
        node.mamba_d_ssm = fields[heads] * fields[size]
    elif before.get("mamba_expand", 0) * before.get(hidden, 0) == inner:
        setattr(node, size, before["mamba_expand"] * fields[hidden] // fields[heads])


def _new_width(name: str, value: int, node: PreTrainedConfig, widths: Widths) -> int | None:
    if name == standard_name(node, "head_dim"):
        return widths.head_dim[1] if widths.head_dim else None
    if _ROTARY_PART.fullmatch(name) and widths.head_dim and value == widths.head_dim[0]:
        # Where heads have a part with rotary positions and one without, some configs call the first the head size.
        return widths.head_dim[1]
    if _KEY_VALUE_HEADS.fullmatch(name):
        return _key_value_heads(value, *widths.heads) if widths.heads else None
    if _HEADS.fullmatch(name) or name == standard_name(node, "num_attention_heads"):
        # A second head count (a decoder's) has to divide the first, so it takes the same value.
        return widths.heads[1] if widths.heads else None
    if _STATE_SPACE_HEADS.fullmatch(name):
        return max(1, int(value * widths.ratio))
    if _GROUPS.fullmatch(name) and widths.heads:
        return 1
    if name == "num_pos_feats" and 2 * value in widths.links:
        # Sines and cosines of positions, concatenated, are as wide as the features that they are added to.
        return widths.links[2 * value] // 2
    if _NO_WIDTH.fullmatch(name):
        return None
    if value in widths.links and (_WIDTH.fullmatch(name) or _is_hidden(name, node)):
        return widths.links[value]
    if _is_hidden(name, node):
        return _even(value * widths.ratio)
    if _INNER.fullmatch(name):
        return _inner(value, widths.ratio)
    return None


def _is_hidden(name: str, node: PreTrainedConfig) -> bool:
    return name == standard_name(node, "hidden_size") or name in (*_HIDDEN, "attention_hidden_size")


def _inner(value: int, ratio: Fraction) -> int:
    return min(value, max(MIN_INNER, _even(value * ratio))) if value >= MIN_INNER else value


def _key_value_heads(value: int, heads: int, new_heads: int) -> int:
    """New number of key-value heads; multi-head, grouped and multi-query attention keep their kind."""
    if value >= heads:
        return new_heads
    return min(value, 2) if value > 1 and new_heads % 2 == 0 and new_heads > 2 else 1


def _scale_rotary(parameters: dict[Any, Any], ratio: Fraction) -> None:
    """Fit rotary tables with one entry for each frequency to the head size."""
    for name, value in parameters.items():
        if isinstance(value, dict):
            _scale_rotary(value, ratio)
        elif isinstance(value, list | tuple) and name == "mrope_section":
            parameters[name] = fit_sections(value, int(sum(value) * ratio))
        elif isinstance(value, list | tuple) and str(name).endswith("_factor"):
            parameters[name] = value[: max(1, int(len(value) * ratio))]


def halved(value: int, target: int, *, multiple: int = 2) -> int:
    """`value`, halved until it is at most `target`, as long as it remains divisible by `multiple`."""
    while value > target and value % (2 * multiple) == 0:
        value //= 2
    return value


def _even(value: Fraction, multiple: int = 2) -> int:
    return max(multiple, round(value / multiple) * multiple)


def fit_sections(sections: Sequence[int], total: int) -> list[int]:
    """Integers in the proportions of `sections` that sum to `total`."""
    ends = [round(Fraction(sum(sections[: end + 1]) * total, sum(sections))) for end in range(len(sections))]
    return [end - start for start, end in pairwise([0, *ends])]


def fit_rotary(config: PreTrainedConfig, model: nn.Module) -> None:
    """Write into `config` the sections that fit the tables of `model`, which was built from it. If a config gives no
    sections, its class has default sections, which fit one head size only."""
    built: Any = model.config
    nodes = {id(own): node for own, node in zip(config_nodes(built), config_nodes(config), strict=False)}
    for module in model.modules():
        sections, frequencies = getattr(module, "mrope_section", None), getattr(module, "inv_freq", None)
        if not isinstance(sections, list | tuple) or not sections or not all(map(is_integer, sections)):
            continue
        parameters = getattr(nodes.get(id(getattr(module, "config", None))), "rope_parameters", None)
        if frequencies is not None and sum(sections) != len(frequencies) and isinstance(parameters, dict):
            parameters["mrope_section"] = fit_sections(sections, len(frequencies))
