"""A config of any transformers class -> a small config of the same make: same kinds of layers, same names, little of it.

Fields are recognised by what their names and values say (depth, width, heads, experts, vocabulary, token ids), through
the config's own ``attribute_map``, so one set of rules serves every class. Nothing here knows an architecture.
Widths of a config that are equal or proportional stay so, also across nested configs.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from memopt.errors import ModelError
from memopt.walk.config import config_nodes
from memopt.walk.instantiate import instantiate

MAX_PARAMETERS = 30_000_000
TINY_PARAMETERS = 2_000_000
MIN_DEPTH = 2
MAX_DEPTH = 12
"""Layers looked at, and kept at most, to see each kind of layer once."""
VOCABULARY = 512
HEADS = 4
HEAD_DIM = 32
EXPERTS = 8
WINDOW = 8
AUDIO_POSITIONS = 64


class ShrinkError(ModelError):
    """No small config of this make can be built."""


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """The smallest of the recipes' configs that builds and has at most `MAX_PARAMETERS`; `config` is not changed.

    A config that is tiny already is returned as a copy.

    Raises:
        ShrinkError: no recipe gives such a config; says what each one failed on.
    """
    return next(shrunken(config))


def shrunken(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Every small config that builds, strongest recipe first.

    Raises:
        ShrinkError: there is not even one.
    """
    failures: list[str] = []
    found = False
    for recipe in _RECIPES:
        try:
            small = _apply(config, recipe)
            parameters = _count_parameters(small)
        except Exception as error:  # A config class may object to a combination in any way it likes.
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            failures.append(f"{recipe.name}: {reason}")
            continue
        if parameters > recipe.max_parameters:
            failures.append(f"{recipe.name}: still {parameters / 1e6:.0f} M parameters")
            continue
        found = True
        yield small
    if not found:
        raise ShrinkError(
            f"Model type '{config.model_type}' has no small form that builds ({'; '.join(failures)}).",
            "Without one no rewrite of this model can be proved.",
        )


@dataclass(frozen=True)
class _Recipe:
    name: str
    depth: bool = True
    width: bool = True
    head_dim: bool = True
    vocabulary: bool = True
    max_parameters: int = MAX_PARAMETERS


_RECIPES = (
    _Recipe("as it is", depth=False, width=False, vocabulary=False, max_parameters=TINY_PARAMETERS),
    _Recipe("depth, heads and head size"),
    _Recipe("depth and heads", head_dim=False),
    _Recipe("depth", width=False),
    _Recipe("heads", depth=False, head_dim=False),
    _Recipe("unchanged", depth=False, width=False, vocabulary=False),
)

_DEPTH = re.compile(r"(num_|n_)?((en|de)coder_)?(num_)?(hidden_)?(layers?|depth)")
_LAYER_COUNT = re.compile(r".*_layers")
_LAYER_INDICES = re.compile(r".*(_layers|_indices|_indexes|_idx|_layer_ids)")
_HEADS = re.compile(r"(num_|n_)?((en|de)coder_)?(attention_)?heads?")
_KEY_VALUE_HEADS = re.compile(r"(num_|n_)?(key_value|kv)_heads|multi_query_group_num")
_STATE_SPACE_HEADS = re.compile(r"(mamba|ssm).*heads")
_GROUPS = re.compile(r"((mamba|ssm)_)?(n|num)_groups")
_INNER = re.compile(r".*(intermediate|ffn|d_ff|inner|mlp_dim|mlp_hidden|feed_forward|time_step_rank).*")
_WIDTH = re.compile(r".*(hidden|embd|embed|proj|d_model|model_dim|width|channels|attention_head_size|dim)(_|$).*|.*_size")
_NO_WIDTH = re.compile(
    r".*(image|patch|vocab|position|window|kernel|length|stride|head_dim|chunk|crop|batch|codebook|max_|label).*"
)
_EXPERTS = re.compile(r"(num_|n_|moe_num_)(local_|routed_)?experts")
_TOP_K = re.compile(r".*(experts_per_tok(en)?|top_?k|top_?k_experts|moe_k)")
_TOKEN_ID = re.compile(r".*(_token|_token_ids?|_token_index|_ids?)")
_WINDOW = re.compile(r"sliding_window(_size)?|attention_chunk_size")
_MIN_INNER = 64


@dataclass
class _Widths:
    """How the widths of one config shrink; `links` maps old widths to new ones across all nested configs."""

    links: dict[int, int] = field(default_factory=dict)
    ratio: Fraction = Fraction(1)
    heads: tuple[int, int] | None = None
    head_dim: tuple[int, int] | None = None


def _apply(config: PreTrainedConfig, recipe: _Recipe) -> PreTrainedConfig:
    small = copy.deepcopy(config)
    nodes = list(config_nodes(small))
    links: dict[int, int] = {}
    # Two passes: a projection into another config's width can only follow once every width is decided.
    widths = [_decide_widths(node, recipe, links) for node in nodes]
    for node, width in zip(nodes, widths, strict=True):
        if recipe.width:
            _scale_widths(node, width)
            _cut_experts(node)
        if recipe.vocabulary:
            _cut_vocabulary(node)
        if recipe.depth:
            _cut_windows(node)
    if recipe.vocabulary:
        _move_token_ids(nodes)
    if recipe.depth:
        probe = _with_depth(small, MAX_DEPTH)
        small = _with_depth(probe, _needed_depth(probe))
    return small


def _standard(node: PreTrainedConfig, name: str) -> str:
    """Name under which the standard field `name` is stored in `node` (``n_embd`` for ``hidden_size`` in GPT-2)."""
    return type(node).attribute_map.get(name, name)


def _integer(node: PreTrainedConfig, name: str) -> int | None:
    value = vars(node).get(_standard(node, name))
    return value if _is_int(value) else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integers(node: PreTrainedConfig) -> Iterator[tuple[str, int]]:
    """(name, value) of the whole-number fields of `node`."""
    yield from [(name, value) for name, value in vars(node).items() if _is_int(value) and not name.startswith("_")]


# --- width ------------------------------------------------------------------------------------------------------


def _decide_widths(node: PreTrainedConfig, recipe: _Recipe, links: dict[int, int]) -> _Widths:
    hidden, heads = _hidden_size(node), _attention_heads(node)
    if not recipe.width or hidden is None:
        return _Widths(links)
    if heads is None:
        new_hidden = links.setdefault(hidden, _halved(hidden, HEADS * HEAD_DIM))
        return _Widths(links, Fraction(new_hidden, hidden))
    explicit = _integer(node, "head_dim")
    size = explicit or hidden // heads
    new_heads = min(heads, HEADS)
    new_size = _halved(size, HEAD_DIM) if recipe.head_dim else size
    tied = hidden == heads * size
    if hidden in links:
        new_hidden = links[hidden]
        if tied:
            new_heads = next(count for count in (HEADS, 2, 1) if new_hidden % (2 * count) == 0 or count == 1)
            new_size = new_hidden // new_heads
    elif tied:
        new_hidden = new_heads * new_size
    else:
        new_hidden = max(HEAD_DIM, _even(Fraction(hidden * new_heads * new_size, heads * size), multiple=8))
    new_hidden = links.setdefault(hidden, min(hidden, new_hidden))
    return _Widths(links, Fraction(new_hidden, hidden), (heads, new_heads), (size, new_size))


def _hidden_size(node: PreTrainedConfig) -> int | None:
    names = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "model_dim")
    return next((value for value in (_integer(node, name) for name in names) if value), None)


def _attention_heads(node: PreTrainedConfig) -> int | None:
    standard = _integer(node, "num_attention_heads")
    return standard or next((value for name, value in _integers(node) if _HEADS.fullmatch(name) and value > 0), None)


def _scale_widths(node: PreTrainedConfig, widths: _Widths) -> None:
    for name, value in _integers(node):
        new = _new_width(name, value, node, widths)
        if new is not None and new != value:
            setattr(node, name, new)
    for name, value in list(vars(node).items()):
        if isinstance(value, list | tuple) and value and all(_is_int(item) for item in value):
            if _INNER.fullmatch(name):
                setattr(node, name, type(value)(_inner(item, widths.ratio) for item in value))
            elif _KEY_VALUE_HEADS.fullmatch(name) and widths.heads:
                setattr(node, name, type(value)(_key_value_heads(item, *widths.heads) for item in value))
    if widths.head_dim and widths.head_dim[0] != widths.head_dim[1]:
        for value in vars(node).values():
            if isinstance(value, dict):
                _scale_rotary(value, Fraction(widths.head_dim[1], widths.head_dim[0]))


def _new_width(name: str, value: int, node: PreTrainedConfig, widths: _Widths) -> int | None:
    if name == _standard(node, "head_dim"):
        return widths.head_dim[1] if widths.head_dim else None
    if _KEY_VALUE_HEADS.fullmatch(name):
        return _key_value_heads(value, *widths.heads) if widths.heads else None
    if _HEADS.fullmatch(name) or name == _standard(node, "num_attention_heads"):
        # A second head count of the config (a decoder's) keeps to divisors of the first.
        return widths.heads[1] if widths.heads else None
    if _STATE_SPACE_HEADS.fullmatch(name):
        return max(1, int(value * widths.ratio))
    if _GROUPS.fullmatch(name) and widths.heads:
        return 1
    if _NO_WIDTH.fullmatch(name):
        return None
    if value in widths.links and (_WIDTH.fullmatch(name) or _is_hidden(name, node)):
        return widths.links[value]
    if _INNER.fullmatch(name):
        return _inner(value, widths.ratio)
    return None


def _is_hidden(name: str, node: PreTrainedConfig) -> bool:
    return name in (_standard(node, "hidden_size"), "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "model_dim")


def _inner(value: int, ratio: Fraction) -> int:
    return min(value, max(_MIN_INNER, _even(value * ratio))) if value >= _MIN_INNER else value


def _key_value_heads(value: int, heads: int, new_heads: int) -> int:
    """Multi-head, grouped and multi-query attention stay what they are."""
    if value >= heads:
        return new_heads
    return min(value, 2) if value > 1 and new_heads % 2 == 0 and new_heads > 2 else 1


def _scale_rotary(parameters: dict[Any, Any], ratio: Fraction) -> None:
    """Rotary tables that have one entry a frequency follow the head size."""
    for name, value in parameters.items():
        if isinstance(value, dict):
            _scale_rotary(value, ratio)
        elif isinstance(value, list | tuple) and name == "mrope_section":
            parameters[name] = type(value)(int(item * ratio) for item in value)
        elif isinstance(value, list | tuple) and str(name).endswith("_factor"):
            parameters[name] = value[: max(1, int(len(value) * ratio))]


def _halved(value: int, target: int) -> int:
    while value > target and value % 4 == 0:
        value //= 2
    return value


def _even(value: Fraction, multiple: int = 2) -> int:
    return max(multiple, round(value / multiple) * multiple)


# --- experts, vocabulary, windows -------------------------------------------------------------------------------


def _cut_experts(node: PreTrainedConfig) -> None:
    fields = [(name, value) for name, value in _integers(node) if _EXPERTS.fullmatch(name) and value > EXPERTS]
    if not fields:
        return
    for name, _ in fields:
        setattr(node, name, EXPERTS)
    for name, value in _integers(node):
        if name == "n_group":
            setattr(node, name, min(value, 2))
        elif name == "topk_group":
            setattr(node, name, 1)
        elif _TOP_K.fullmatch(name) and value > 2:
            setattr(node, name, 2)


def _cut_vocabulary(node: PreTrainedConfig) -> None:
    for name, value in _integers(node):
        if name.endswith("vocab_size") and value > VOCABULARY:
            setattr(node, name, VOCABULARY)


def _move_token_ids(nodes: list[PreTrainedConfig]) -> None:
    """Ids beyond the new vocabulary move to its top, the same old id to the same new one in every config."""
    fields = [
        (node, name, value)
        for node in nodes
        for name, value in vars(node).items()
        if _TOKEN_ID.fullmatch(name) and not name.startswith("_")
    ]
    kept = {token for _, _, value in fields for token in _tokens(value) if token < VOCABULARY}
    free = (token for token in range(VOCABULARY - 1, 3, -1) if token not in kept)
    moved: dict[int, int] = {}
    for node, name, value in fields:
        for token in _tokens(value):
            if token >= VOCABULARY and token not in moved:
                moved[token] = next(free)
        if _is_int(value) and value in moved:
            setattr(node, name, moved[value])
        elif isinstance(value, list | tuple) and any(token in moved for token in _tokens(value)):
            setattr(node, name, type(value)(moved.get(item, item) for item in value))


def _tokens(value: Any) -> list[int]:
    return [item for item in (value if isinstance(value, list | tuple) else [value]) if _is_int(item)]


def _cut_windows(node: PreTrainedConfig) -> None:
    for name, value in _integers(node):
        if _WINDOW.fullmatch(name) and value > WINDOW:
            setattr(node, name, WINDOW)
        elif name == "max_source_positions" and value > AUDIO_POSITIONS and _integer(node, "num_mel_bins"):
            setattr(node, name, AUDIO_POSITIONS)


# --- depth ------------------------------------------------------------------------------------------------------


def _with_depth(config: PreTrainedConfig, depth: int) -> PreTrainedConfig:
    small = copy.deepcopy(config)
    for node in config_nodes(small):
        _cut_depth(node, depth)
    return small


def _cut_depth(node: PreTrainedConfig, depth: int) -> None:
    standard = _standard(node, "num_hidden_layers")
    main = {name: value for name, value in _integers(node) if name == standard or _DEPTH.fullmatch(name)}
    longest = max(main.values(), default=0)
    for name, value in main.items():
        setattr(node, name, min(value, depth))
    for name, value in list(vars(node).items()):
        if name in main or name.startswith("_"):
            continue
        if name == "depths" and isinstance(value, list | tuple):
            setattr(node, name, type(value)(min(item, MIN_DEPTH) for item in value))
        elif longest > depth:
            new = _cut_layer_field(name, value, longest, depth)
            if new is not value:
                setattr(node, name, new)


def _cut_layer_field(name: str, value: Any, longest: int, depth: int) -> Any:
    """A field beside the depth that counts, lists or points to layers, for the new depth."""
    if _is_int(value) and MIN_DEPTH < value <= longest and _LAYER_COUNT.fullmatch(name):
        # "The first 3 are dense" stays; "15 of 30 share" becomes the same part.
        return min(value, depth) if "dense" in name or "first" in name else max(1, value * depth // longest)
    if isinstance(value, str) and len(value) == longest and "pattern" in name:
        return value[:depth]
    if not isinstance(value, list | tuple) or not value:
        return value
    if len(value) == longest and (longest > 4 or "layer" in name):
        return value[:depth]
    if _LAYER_INDICES.fullmatch(name) and all(_is_int(item) and item < longest + 1 for item in value):
        return type(value)(item for item in value if item < depth) or type(value)([depth - 1])
    return value


def _needed_depth(config: PreTrainedConfig) -> int:
    """Layers needed to see each kind once, judged by the modules themselves; at least `MIN_DEPTH`."""
    try:
        model = instantiate(config, device="meta")
    except ModelError:
        return MIN_DEPTH
    needed = MIN_DEPTH
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            kinds = [_kind(layer) for layer in module]
            # A list in which every entry differs is no stack of layers (stages of a pyramid): it tells no depth.
            if len(set(kinds)) < len(kinds):
                needed = max(needed, *(kinds.index(kind) + 1 for kind in set(kinds)))
    return min(needed, MAX_DEPTH)


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """What tells one kind of layer from another: its parameters, its modules' classes, and their named settings."""
    parameters = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    modules = tuple((name, type(module), _settings(module)) for name, module in layer.named_modules())
    return parameters, modules


def _settings(module: nn.Module) -> tuple[tuple[str, object], ...]:
    # Numbers are left out but for their presence: layer indices and drop rates differ everywhere and tell no kind.
    return tuple(
        (name, value if isinstance(value, str | bool) else value is None)
        for name, value in sorted(vars(module).items())
        if isinstance(value, str | bool | int | None) and name != "training"
    )


def _count_parameters(config: PreTrainedConfig) -> int:
    return sum(parameter.numel() for parameter in instantiate(config, device="meta").parameters())
