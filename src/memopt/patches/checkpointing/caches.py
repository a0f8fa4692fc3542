"""Caches among the arguments of a checkpointed block: the block would write its states into them twice."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from memopt.patches.swap import original_class

#: Arguments that transformers switches off in a checkpointed layer, if they are passed by keyword.
_NAMES = ("past_key_values", "layer_past", "use_cache")
#: Attribute of transformers layers that read a cache and never write it; releases without the name ignore it.
READS_CACHE = "_can_checkpoint_with_cache"


def without_caches(
    block: nn.Module, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """`function`, a forward of `block`, and its arguments without caches; None if a cache holds states to read."""
    keywords: dict[str, Any] = getattr(function, "keywords", {})
    names = (*_names(original_class(block).forward), *[""] * len(args))  # arguments in `*args` have no names
    given = [*keywords.items(), *zip(names, args, strict=False)]
    if reads_cache(block) or not any(value is not None and _is_cache(name, value) for name, value in given):
        return function, args
    places = {place for place in (getattr(each, "layer_idx", None) for each in block.modules()) if place is not None}
    if any(_is_cache(name, value) and _holds_states(value, places) for name, value in given):
        return None
    values = [value if not _is_cache(name, value) else False if value is True else None for name, value in given]
    function = functools.partial(function, **dict(zip(keywords, values, strict=False)))
    return function, tuple(values[len(keywords) :])


def reads_cache(block: nn.Module) -> bool:
    """Whether transformers marks `block` as reading a cache and never writing it."""
    return bool(vars(block).get(READS_CACHE, getattr(original_class(block), READS_CACHE, False)))


def _is_cache(name: str, value: Any) -> bool:
    return name in _NAMES or isinstance(value, Cache)


def _holds_states(cache: Any, places: set[int]) -> bool:
    """Whether `cache` holds a tensor for the layers with the indices `places`; for any layer if `places` is empty."""
    if isinstance(cache, Tensor):
        return cache.numel() > 1  # the cache of a sliding window has its length as a tensor of one element
    if isinstance(cache, (list, tuple)):
        return any(_holds_states(each, places) for each in cache)
    parts = [part for part in getattr(cache, "__dict__", {}).values() if isinstance(part, (Tensor, list, Cache))]
    if isinstance(cache, Cache) and places:
        parts = [[part[i] for i in places if i < len(part)] if isinstance(part, list) else part for part in parts]
    return _holds_states(parts, places)


@functools.cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments of a block's forward, without the block itself."""
    return tuple(inspect.signature(forward).parameters)[1:]
