"""Blocks that run again in backward: each checkpoints in its own forward, as the plan says.

Layers of transformers read an attribute of the instance, whether to checkpoint. On a patched block it is a property
that says no. Values that other code sets (``gradient_checkpointing_enable``, the Trainer) are stored, and hold once the
block is unpatched. A yes would let PEFT make embeddings require gradients, which only reentrant checkpointing needs.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from memopt.patches.checkpointing.heads import ByHeads
from memopt.patches.checkpointing.kept import KeptAttention, compiled_contexts
from memopt.patches.checkpointing.offload import InputsOfThreads
from memopt.patches.checkpointing.state import BlockState, RunsTwice
from memopt.patches.compiled import is_being_compiled
from memopt.patches.scope import ScopeRewrite, run_scoped
from memopt.patches.swap import original_class, states_in, steps_aside, swap_forward, with_attributes, wraps_any_forward
from memopt.torch_compat import BATCH_NORM_CLASSES, is_checkpointed_region

_NOT_OFFLOADED = "checkpointing.offload is off: inputs of checkpointed blocks stay on the device"
_RUNS_ONCE_COMPILED = "blocks with batch norms are not checkpointed, since a second run would count batches again"
_FLAG = "gradient_checkpointing"
_STAYS: AbstractContextManager[Any] = nullcontext()
#: Arguments that transformers switches off in a checkpointed layer, if they are passed by keyword.
_NAMES = ("past_key_values", "layer_past", "use_cache")
#: Attribute of transformers layers that read a cache and never write it; releases without the name ignore it.
READS_CACHE = "_can_checkpoint_with_cache"
#: Caches that blocks have left empty, with the ids of these blocks.
_LEFT_EMPTY: weakref.WeakKeyDictionary[Cache, set[int]] = weakref.WeakKeyDictionary()
_NO_STATES = (
    "A block got one cache twice in training. Checkpointed blocks leave no states in a cache, so a text that comes in "
    "chunks would be trained as texts of their own: patch with checkpointing.method=none. Where one forward of the "
    "model calls its blocks several times, pass use_cache=False."
)

_RUNS_ONCE = (
    "memopt: blocks that the recipe checkpoints run only once, without this saving, since they get a cache with states "
    "(of a prefix that is tuned, or of earlier text); gradients are the same."
)


@dataclass(frozen=True)
class BlockRewrite:
    """State of a patched block: its level, and what its forward reads."""

    scope: ScopeRewrite | None
    """The scope of the block, inside the checkpointed region."""
    is_checkpointed: bool
    inputs: InputsOfThreads | None
    """The inputs of checkpointed blocks in CPU memory; None: the block's input stays on its device."""
    keeps_attention: bool = False
    """Whether outputs of attention are kept together with the block's input, so that attention runs only once."""
    room: int = 0
    """Bytes that attention's backward by groups of heads may take; 0: all heads at once."""
    counts_batches: bool = False
    """Whether a batch norm is inside: a compiled second run would update its statistics again."""
    state: BlockState = field(default_factory=BlockState, compare=False, repr=False)

    def run_again(self, block: nn.Module, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, the forward of `block`, which runs again in backward, from `args`."""
        if torch.compiler.is_compiling():
            if self.counts_batches:
                is_being_compiled(off=_RUNS_ONCE_COMPILED)
                return function(*args)
            is_being_compiled(off="" if self.inputs is None else _NOT_OFFLOADED)
            function, args = without_caches(block, function, args) or (function, args)
            contexts: dict[str, Any] = {"context_fn": compiled_contexts} if self.keeps_attention else {}
            return checkpoint(function, *args, use_reentrant=False, **contexts)
        without = without_caches(block, function, args)
        if without is None:
            _say_runs_once()
            return function(*args)
        function, args = without
        if is_checkpointed_region() or steps_aside(without_gradients=False):  # other code checkpoints around the block
            return function(*args)
        place = None if self.inputs is None else self.inputs.here.of_a_block()
        kept = KeptAttention(None if place is None else place.wait) if self.keeps_attention else None
        by_heads = ByHeads(self.room) if self.room else None
        with _STAYS if place is None else place.hooks():
            twice = RunsTwice(self.state, block, function, args, kept, by_heads)
            return checkpoint(twice, *args, use_reentrant=False)


def patch_block(
    block: nn.Module,
    scope: ScopeRewrite | None,
    is_checkpointed: bool,
    inputs: InputsOfThreads | None,
    keeps_attention: bool = False,
    room: int = 0,
) -> None:
    """Let `block` be checkpointed or not, whatever the model's own switch is; the other arguments are as in
    :class:`BlockRewrite`. Raises a ValueError if the block cannot be swapped, or a second run would wait for other
    processes."""
    if is_checkpointed and any(isinstance(each, nn.SyncBatchNorm) for each in block.modules()):
        raise ValueError("a batch norm inside waits for the other processes, and would do so in backward again")
    counts = any(isinstance(each, BATCH_NORM_CLASSES) for each in block.modules())
    rewrite = BlockRewrite(scope, is_checkpointed, inputs, keeps_attention, room, counts)
    swap_forward(block, _run_switched_off if has_switch(block) else _run, rewrite)


def has_switch(block: nn.Module) -> bool:
    """Whether `block` is one of transformers' layers, which look up at each call whether to checkpoint."""
    return isinstance(block, GradientCheckpointingLayer)


def overruled(model: nn.Module) -> int:
    """Number of patched blocks of `model` that are not checkpointed although the model's own switch is on."""
    blocks = states_in(model, BlockRewrite)
    return sum(bool(vars(block).get(_FLAG)) and not rewrite.is_checkpointed for _, block, rewrite in blocks)


def switched_on(model: nn.Module) -> int:
    """Number of layers of `model` that only transformers' switch checkpoints."""
    patched = {id(module) for _, module, _ in states_in(model, BlockRewrite)}
    layers = (module for module in model.modules() if has_switch(module) and id(module) not in patched)
    return sum(bool(getattr(layer, _FLAG)) for layer in layers)


def _switch(module: nn.Module) -> bool:
    state = vars(module).get("_memopt")
    return not isinstance(state, BlockRewrite) and bool(vars(module).get(_FLAG, False))


def _note(module: nn.Module, value: object) -> None:
    vars(module)[_FLAG] = value


@wraps_any_forward
def _run(stock: Callable[..., Any], rewrite: BlockRewrite, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    run: Callable[..., Any] = functools.partial(run_scoped, stock, rewrite.scope, module, **kwargs)
    # Without gradients there is nothing to run again, and generation in training mode (TRL) needs its cache.
    if not module.training or not torch.is_grad_enabled():
        return run(*args)
    if rewrite.is_checkpointed:
        return rewrite.run_again(module, run, *args)
    # Checkpointed blocks leave no states in a cache: one with the states of some blocks would be wrong to read.
    run, args = without_caches(module, run, args) or (run, args)
    return run(*args)


@with_attributes(**{_FLAG: property(_switch, _note)})
@wraps_any_forward
def _run_switched_off(stock: Callable[..., Any], rewrite: BlockRewrite, *args: Any, **kwargs: Any) -> Any:
    return _run(stock, rewrite, *args, **kwargs)


def without_caches(
    block: nn.Module, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """`function`, a forward of `block`, and its arguments without caches; None if a cache holds states to read. Both
    runs of a checkpointed block would write their states into a cache. Raises a RuntimeError if `block` has left a
    cache empty before, whose states it should read now."""
    keywords: dict[str, Any] = getattr(function, "keywords", {})
    names = (*_names(original_class(block).forward), *[""] * len(args))  # arguments in `*args` have no names
    given = [*keywords.items(), *zip(names, args, strict=False)]
    if reads_cache(block) or not any(value is not None and _is_cache(name, value) for name, value in given):
        return function, args
    places = {place for place in (getattr(each, "layer_idx", None) for each in block.modules()) if place is not None}
    if any(_is_cache(name, value) and _holds_states(value, places) for name, value in given):
        return None
    if not torch.compiler.is_compiling() and not is_checkpointed_region():
        _note_left_empty(block, {value for _, value in given if isinstance(value, Cache)})
    values = [value if not _is_cache(name, value) else False if value is True else None for name, value in given]
    function = functools.partial(function, **dict(zip(keywords, values, strict=False)))
    return function, tuple(values[len(keywords) :])


@functools.cache
def _say_runs_once() -> None:
    warnings.warn(_RUNS_ONCE, stacklevel=2)


def _note_left_empty(block: nn.Module, caches: set[Cache]) -> None:
    for cache in caches:
        blocks = _LEFT_EMPTY.setdefault(cache, set())
        if id(block) in blocks:
            raise RuntimeError(_NO_STATES)
        blocks.add(id(block))


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
