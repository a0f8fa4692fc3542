"""Makes a small config from a config of any transformers class; it has the same kinds of layers and names.

Fields are recognised by their names and values (depth, width, heads, experts, vocabulary, token ids), through the
config's own ``attribute_map``, so one set of rules serves every class. The rules for widths are in
`memopt.walk.models.shrink.width`, the rules for layers in `memopt.walk.models.shrink.depth`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from memopt.errors import ModelError
from memopt.walk.models.build import instantiate
from memopt.walk.models.config import (
    config_nodes,
    integer_field,
    integer_fields,
    is_integer,
    model_class,
    one_line,
    standard_name,
)
from memopt.walk.models.shrink.depth import MAX_DEPTH, cut_depth, cut_tower, is_tower, with_depth
from memopt.walk.models.shrink.rest import cut_rest
from memopt.walk.models.shrink.width import decide_widths, fit_rotary, scale_widths

MAX_PARAMETERS = 30_000_000
LIGHT_PARAMETERS = 10_000_000
"""Configs up to this size are tried first: a proof runs the model hundreds of times."""
LARGE_PARAMETERS = 60_000_000
"""Configs up to this size are tried last, if no smaller one runs."""
TINY_PARAMETERS = 2_000_000
VOCABULARY = 512
EXPERTS = 8
WINDOW = 8
CHUNK = 16
"""Tokens in a chunk of a state-space layer, to which shorter sequences are padded."""
AUDIO_POSITIONS = 64
PATCHES_PER_SIDE = 8
IMAGE_SIDE = 128


class ShrinkError(ModelError):
    """No small config of this class builds."""


def shrunken(config: PreTrainedConfig, *, depth: int | None = None, sizes: bool = True) -> Iterator[PreTrainedConfig]:
    """Every small config that builds, in the order of the recipes; configs above `LIGHT_PARAMETERS` after the others.

    Configs above `MAX_PARAMETERS`, up to `LARGE_PARAMETERS`, come last.

    Args:
        config: the config to shrink; it is not changed.
        depth: number of layers, at most those of `config`; by default as many as show every kind of layer.
        sizes: also shrink the sizes of inputs, the sides of images and the length of sounds.

    Raises:
        ModelError: transformers has no model class for this config.
        ShrinkError: no recipe gives a config; the message has the failure of each recipe.
    """
    model_class(config)
    failures: list[str] = []
    found = False
    heavy: list[PreTrainedConfig] = []
    large: list[PreTrainedConfig] = []
    for recipe in _RECIPES:
        try:
            small = _apply(config, recipe, depth, sizes)
            model = instantiate(small, device="meta")
        except Exception as error:  # config and model classes raise anything on a combination that they refuse
            failures.append(f"{recipe.name}: {one_line(error)}")
            continue
        fit_rotary(small, model)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if parameters > recipe.max_parameters:
            if parameters <= LARGE_PARAMETERS and recipe.max_parameters == MAX_PARAMETERS:
                large.append(small)
            failures.append(f"{recipe.name}: still {parameters / 1e6:.0f} M parameters")
            continue
        found = True
        if parameters > LIGHT_PARAMETERS:
            heavy.append(small)
        else:
            yield small
    yield from heavy
    yield from large
    if not found and not large:
        raise ShrinkError(
            f"Model type '{config.model_type}' has no small form that builds ({'; '.join(failures)}).",
            "Without one no rewrite of this model can be proved.",
        )


@dataclass(frozen=True)
class _Recipe:
    name: str
    depth: bool = True
    width: bool = True
    keep_head_dim: bool = False
    vocabulary: bool = True
    max_parameters: int = MAX_PARAMETERS
    rest: bool = False
    layers: int | None = None
    """Number of layers; None for as many as show every kind of layer."""


_RECIPES = (
    _Recipe("as it is", depth=False, width=False, vocabulary=False, max_parameters=TINY_PARAMETERS),
    _Recipe("depth, heads and head size"),
    _Recipe("depth and heads", keep_head_dim=True),
    _Recipe("depth", width=False),
    _Recipe("heads", depth=False, keep_head_dim=True),
    _Recipe("unchanged", depth=False, width=False, vocabulary=False),
    _Recipe("every size", rest=True),
    _Recipe("every size but the head size", keep_head_dim=True, rest=True),
    _Recipe("heads and head size, more layers", layers=MAX_DEPTH),
)

_EXPERTS = re.compile(r"(num_|n_|moe_num_)(local_|routed_)?experts")
_TOP_K = re.compile(r".*(experts_per_tok(en)?|top_?k|top_?k_experts|moe_k)")
TOKEN_ID = re.compile(r".*(_token|_token_ids?|_token_index|_ids?)")
_IMAGE_TOKENS = re.compile(r"mm_tokens_per_image|image_(seq_length|token_num|tokens)|num_image_tokens")
_PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)")
_WINDOW = re.compile(r"sliding_window(_size)?|attention_chunk_size")
_CHUNK = re.compile(r"(mamba_|ssm_)?chunk_size")
_SOUND, _VOCABULARY = re.compile("max_source_positions"), re.compile(".*vocab_size.*")


def _apply(config: PreTrainedConfig, recipe: _Recipe, depth: int | None, sizes: bool) -> PreTrainedConfig:
    small = copy.deepcopy(config)
    towers = [node for node in config_nodes(small) if is_tower(node)]
    nodes = [node for node in config_nodes(small) if not is_tower(node)]
    name_placeholders(small)
    if recipe.width:
        before = [dict(vars(node)) for node in nodes]
        links = _cut_widths(nodes, recipe.keep_head_dim)
        if recipe.rest:
            cut_rest(nodes, before, links)
        for node in nodes:
            _cut_experts(node)
        if sizes:
            _cut_images(nodes)
            _cut_unpatched_images(nodes)
    if recipe.vocabulary:
        for node in nodes:
            _limit(node, _VOCABULARY, VOCABULARY)
        _move_token_ids(nodes)
    if recipe.depth:
        for node in towers:
            cut_tower(node)
        for node in nodes:
            _limit(node, _WINDOW, WINDOW)
            _limit(node, _CHUNK, CHUNK)
            if sizes and integer_field(node, "num_mel_bins"):
                _limit(node, _SOUND, AUDIO_POSITIONS)
    if chosen := depth or recipe.layers:
        return with_depth(small, chosen)
    return cut_depth(small) if recipe.depth else small


def _cut_widths(nodes: list[PreTrainedConfig], keep_head_dim: bool) -> dict[int, int]:
    """Old width -> new width, for all nodes."""
    links: dict[int, int] = {}
    # Two passes: a projection into another config's width can only follow once every width is decided.
    widths = [decide_widths(node, links, keep_head_dim=keep_head_dim) for node in nodes]
    for node, width in zip(nodes, widths, strict=True):
        scale_widths(node, width)
    return links


def _cut_experts(node: PreTrainedConfig) -> None:
    fields = [(name, value) for name, value in integer_fields(node) if _EXPERTS.fullmatch(name) and value > EXPERTS]
    if not fields:
        return
    for name, _ in fields:
        setattr(node, name, EXPERTS)
    for name, value in integer_fields(node):
        if name == standard_name(node, "n_group"):
            setattr(node, name, min(value, 2))
        elif name == standard_name(node, "topk_group"):
            setattr(node, name, 1)
        elif _TOP_K.fullmatch(name) and value > 2:
            setattr(node, name, 2)
    per_token = standard_name(node, "num_experts_per_tok")
    if vars(node).get(per_token, 0) is None:
        setattr(node, per_token, 2)


def name_placeholders(config: PreTrainedConfig) -> None:
    """Placeholder tokens (of images in text) that have no id get the last ids of the vocabulary."""
    sizes = [size for node in config_nodes(config) if (size := integer_field(node, "vocab_size"))]
    names = [name for name, value in vars(config).items() if _PLACEHOLDER.fullmatch(name) and value is None]
    for token, name in enumerate(names, start=1):
        if sizes and min(sizes) > token:
            setattr(config, name, min(sizes) - token)


def _move_token_ids(nodes: list[PreTrainedConfig]) -> None:
    """Ids beyond the new vocabulary move to its top, the same old id to the same new one in every config."""
    fields = [
        (node, name, value)
        for node in nodes
        for name, value in vars(node).items()
        if TOKEN_ID.fullmatch(name) and not name.startswith("_")
    ]
    kept = {token for _, _, value in fields for token in _tokens(value) if token < VOCABULARY}
    free = (token for token in range(VOCABULARY - 1, 3, -1) if token not in kept)
    moved: dict[int, int] = {}
    for node, name, value in fields:
        for token in _tokens(value):
            if token >= VOCABULARY and token not in moved:
                moved[token] = next(free)
        if is_integer(value) and value in moved:
            setattr(node, name, moved[value])
        elif isinstance(value, list | tuple) and any(token in moved for token in _tokens(value)):
            setattr(node, name, type(value)(moved.get(item, item) for item in value))


def _tokens(value: Any) -> list[int]:
    return [item for item in (value if isinstance(value, list | tuple) else [value]) if is_integer(item)]


def _limit(node: PreTrainedConfig, pattern: re.Pattern[str], most: int) -> None:
    """Let no integer field whose name matches exceed `most`."""
    for name, value in integer_fields(node):
        if pattern.fullmatch(name) and value > most:
            setattr(node, name, most)


def _counted(nodes: list[PreTrainedConfig]) -> bool:
    """Whether the config states a number of image features."""
    return any(_IMAGE_TOKENS.fullmatch(name) for node in nodes for name, _ in integer_fields(node))


def _cut_unpatched_images(nodes: list[PreTrainedConfig]) -> None:
    """Shrink the images of convolutional networks, which have no patches and take any size."""
    owners = [node for node in nodes if "image_size" in vars(node)]
    if len(owners) != 1 or any(name.startswith(("patch", "tubelet")) for name in vars(owners[0])):
        return
    if sides := _numbers(owners[0].image_size):
        owners[0].image_size = _divided(owners[0].image_size, _factor(sides, 1, IMAGE_SIDE))


def _cut_images(nodes: list[PreTrainedConfig]) -> None:
    """Divide the sides of large images by a power of two, and adapt the fields that count their features."""
    for node in nodes:
        sides, patch = _numbers(vars(node).get("image_size")), _patch_side(node)
        if not sides or not patch or "depths" in vars(node):
            continue
        factor = _factor(sides, patch, PATCHES_PER_SIDE)
        if factor > 1:
            node.image_size = _divided(node.image_size, factor)
            _cut_features(nodes, node, sides[0] // patch, factor)
        elif is_integer(node.image_size) and min(sides) // patch >= 2 * PATCHES_PER_SIDE and not _counted(nodes):
            node.image_size = PATCHES_PER_SIDE * patch


def _factor(sides: list[int], unit: int, fewest: int) -> int:
    """Largest power of two by which `sides` can be divided into at least `fewest` whole units each."""
    factor = 1
    while all(side % (2 * factor * unit) == 0 and side // (2 * factor * unit) >= fewest for side in sides):
        factor *= 2
    return factor


def _patch_side(node: PreTrainedConfig) -> int:
    """Pixels from one patch to the next; 0 if the config does not say."""
    for name in ("patch_stride", "patch_size"):
        if numbers := _numbers(vars(node).get(name)):
            return max(numbers)
    return 0


def _numbers(value: Any) -> list[int]:
    """A side, or a list of sides; empty if it is neither."""
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    return numbers if all(is_integer(number) for number in numbers) else []


def _divided(value: Any, factor: int) -> Any:
    """An integer, or integers in lists, divided by `factor`."""
    return type(value)(_divided(item, factor) for item in value) if isinstance(value, list | tuple) else value // factor


def _cut_features(nodes: list[PreTrainedConfig], node: PreTrainedConfig, side: int, factor: int) -> None:
    """Adapt fields that count features of an image of `node`, whose `side` patches a side were divided by `factor`."""
    if vars(node).get("image_embedding_size") == side:
        node.image_embedding_size = side // factor
    for other in nodes:
        for name, value in list(vars(other).items()):
            if name.endswith("feature_sizes") and isinstance(value, list | tuple):
                sizes = [number for size in value for number in _numbers(size)]
                if sizes and all(number % factor == 0 for number in sizes):
                    setattr(other, name, _divided(value, factor))
            elif is_integer(value) and _IMAGE_TOKENS.fullmatch(name) and value % factor**2 == 0:
                setattr(other, name, value // factor**2)
