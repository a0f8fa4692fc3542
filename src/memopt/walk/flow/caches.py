"""Keys and values that one part of a forward leaves in a cache, and another part reads there (PI0's action expert).

Or a caller reads them there: DiffusionGemma's encoder returns a cache, so transformers checkpoints none of its layers.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from memopt.walk.sites import is_inside


class CacheReads:
    """Notes, of modules with a layer of a cache, which ones read what others have left in theirs."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = {n: m for n, m in model.named_modules() if isinstance(getattr(m, "layer_idx", None), int)}
        self._writers: dict[tuple[int, int], list[str]] = defaultdict(list)
        self._caches: list[Cache] = []  # alive, so that each has an id of its own
        self._read: set[tuple[str, str]] = set()
        self._returned: set[int] = set()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Install hooks on these modules."""
        with contextlib.ExitStack() as hooks:
            for name, module in self._modules.items():
                hooks.enter_context(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            if getattr(self._model, "supports_gradient_checkpointing", False):
                hooks.enter_context(self._model.register_forward_hook(self._leave))
            yield

    def of(self, blocks: Iterable[str]) -> tuple[str, ...]:
        """The members of `blocks` whose keys and values another block, or another call of the block, reads; or that the
        model returns in a cache, if transformers' own checkpointing leaves the block out."""

        def is_read(block: str, writer: str, reader: str) -> bool:
            # Of one call, cross-attention may look into the cache that self-attention has just written.
            return is_inside(writer, block) and (reader == writer or not is_inside(reader, block))

        def is_returned(block: str) -> bool:
            switched = isinstance(self._model.get_submodule(block), GradientCheckpointingLayer)
            caches = (
                cache for (cache, _), writers in self._writers.items() if any(is_inside(w, block) for w in writers)
            )
            return not switched and not self._returned.isdisjoint(caches)

        return tuple(
            block for block in blocks if any(is_read(block, *each) for each in self._read) or is_returned(block)
        )

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        place: Any = module.layer_idx
        for cache in (each for each in (*args, *kwargs.values()) if isinstance(each, Cache)):
            writers = self._writers[id(cache), place]
            if writers and cache.get_seq_length(place):
                self._read.update((writer, name) for writer in writers)
            writers.append(name)
            self._caches.append(cache)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
        self._returned.update(id(each) for each in values if isinstance(each, Cache))
