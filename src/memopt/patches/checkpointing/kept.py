"""Outputs of attention in a block that runs again in backward: the second run takes them from the first.

At long context, attention is most of the work of a block's forward. Its output and the statistics of its rows are kept,
about one hidden state a block; its backward needs them anyway. Fused attention is one operator, which does not run
again. Attention in plain operations (softmax, then a product) runs again up to its probabilities, since backward needs
all of them; the product with the values does not run again.

An output whose memory is written into, or is still referred to when the block returns, is not kept: the second run
computes it again. So nothing can change a kept output, nor a copy of it to the CPU that has yet to run. Version
counters do not say it: an alias that an operator made (``aten::_unsafe_view``) has a counter of its own.

The operators are intercepted below autograd, so nodes, saved tensors and gradients equal those of a full second run.
Peers: `torch.utils.checkpoint.create_selective_checkpoint_contexts`, which compiled blocks use here.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memopt.patches.checkpointing.offload import keeps_layout
from memopt.torch_compat import (
    TorchDispatchMode,
    is_operator,
    is_traceable_wrapper_subclass,
    living_storage,
    operator_schema,
    storage_id,
    storage_use_count,
    tree_leaves,
    view_below_autograd,
    weak_storage,
)

_ATTENTION, _BACKWARD = re.compile("attn|attention|flash"), re.compile("backward|bwd")
_SOFTMAXES, _PRODUCTS = ("aten::_softmax", "aten::_safe_softmax"), frozenset({"aten::bmm", "aten::baddbmm"})
#: Operations between a softmax and the product with the values: casts, copies, views, a dropout.
_PASS_ON = re.compile(
    "aten::(_to_copy|clone|native_dropout|mul|div|view|_unsafe_view|expand|slice|detach|transpose|permute|unsqueeze)"
)


class Waiting(Protocol):
    """A tensor that is kept for backward."""

    def take(self) -> Tensor | None:
        """The tensor; None if it was changed in place."""


class KeptAttention(TorchDispatchMode):
    """Context manager: stores the outputs of attention in the first forward inside (by `store`, if given), and returns
    them in the next one. A third forward, for a second backward through a retained graph, computes them again."""

    supports_higher_order_operators = True

    def __init__(self, store: Callable[[Tensor], Waiting] | None = None) -> None:
        super().__init__()
        self._store = store or _Here
        self._calls: Counter[str] = Counter()
        self._kept: dict[tuple[str, int], _Output] = {}
        """(operator, number of its call) -> its result."""
        self._probabilities: dict[int, weakref.ref[Tensor]] = {}
        self._repeats = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def repeat(self) -> KeptAttention:
        self._repeats, self._probabilities = True, {}
        self._calls.clear()
        return self

    def forget(self) -> None:
        """Drop the outputs that are kept so far."""
        self._kept.clear()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if not self._repeats:
            self._keep_only(_Output.is_alone)

    def _keep_only(self, condition: Callable[[_Output], bool]) -> None:
        self._kept = {call: output for call, output in self._kept.items() if condition(output)}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = _name_of(function)
        is_product = name in _PRODUCTS and not _writes(function)
        if not is_product and not _is_attention(function):
            if self._kept and not self._repeats and (written := _written_by(function, args, kwargs or {})):
                self._keep_only(lambda output: output.storages.isdisjoint(written))
            result = function(*args, **(kwargs or {}))
            if not self._repeats:
                self._follow(name, args, result)
            return result
        self._calls[name] += 1
        call = name, self._calls[name]
        if self._repeats and call in self._kept and (kept := self._kept.pop(call).again()) is not None:
            return kept
        result = function(*args, **(kwargs or {}))
        if not self._repeats and (not is_product or any(map(self._is_probability, args))):
            self._kept[call] = _Output(result, self._store)
        return result

    def _follow(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Note `result` if it is the probabilities of attention."""
        if name in _SOFTMAXES or (any(map(self._is_probability, args)) and _PASS_ON.fullmatch(name)):
            first = result if isinstance(result, Tensor) else result[0]
            self._probabilities[id(first)] = weakref.ref(first)

    def _is_probability(self, value: Any) -> bool:
        known = self._probabilities.get(id(value))
        return known is not None and known() is value


class _Output:
    """The result of one operator: tensors and other values."""

    def __init__(self, result: Any, store: Callable[[Tensor], Waiting]) -> None:
        self._is_tensor = isinstance(result, Tensor)
        parts = [result] if self._is_tensor else [*result]
        tensors = {place: each for place, each in enumerate(parts) if isinstance(each, Tensor)}
        # Seeds and offsets of random numbers take few bytes, so they stay where they are.
        numbers = {at: each for at, each in tensors.items() if each.is_floating_point()}
        stored = {at for at, each in numbers.items() if keeps_layout(each)}
        found = list(_storages(numbers.values()))
        self.storages, self._memory = frozenset(map(storage_id, found)), list(map(weak_storage, found))
        before = self._owners()
        self._tensors = {at: (store if at in stored else _Here)(each) for at, each in tensors.items()}
        self._own = self._owners() - before
        self._others = {place: each for place, each in enumerate(parts) if not isinstance(each, Tensor)}

    def _owners(self) -> float:
        """How many tensors and other objects refer to the memory of the result."""
        alive = (storage for each in self._memory if (storage := living_storage(each)) is not None)
        return sum(storage_use_count(storage_id(storage)) - 1 for storage in alive)  # one is `storage` itself

    def is_alone(self) -> bool:
        """Whether nothing but this object refers to the memory of the result."""
        return self._owners() <= self._own

    def again(self) -> Any:
        """The result; None if it was changed in place."""
        parts = {**self._others}
        for place, waiting in self._tensors.items():
            if (tensor := waiting.take()) is None:
                return None
            parts[place] = view_below_autograd(tensor)
        return parts[0] if self._is_tensor else tuple(parts[place] for place in sorted(parts))


class _Here:
    """A tensor that is kept where it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = view_below_autograd(tensor)
        self._version = self._tensor._version

    def take(self) -> Tensor | None:
        return self._tensor if self._tensor._version == self._version else None


def _policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_attention(function) else CheckpointPolicy.PREFER_RECOMPUTE


compiled_contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
"""Makes the contexts of the two runs of a compiled block: compilers support only PyTorch's own policies."""


@functools.cache
def _name_of(function: Any) -> str:
    """The name of an operator, with its namespace."""
    return str(operator_schema(function).name if is_operator(function) else getattr(function, "_name", ""))


@functools.cache
def _is_attention(function: Any) -> bool:
    """Whether `function` is an operator that computes attention and writes into no argument."""
    name = _name_of(function)
    return bool(_ATTENTION.search(name)) and not _BACKWARD.search(name) and not _writes(function)


@functools.cache
def _writes(function: Any) -> bool:
    return is_operator(function) and operator_schema(function).is_mutable


def _written_by(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[int]:
    """The :func:`storage_id` of each storage that the call may write into."""
    places = _places_written(function)
    if places is None:
        tree: Any = args, kwargs
    else:
        tree = [args[at] if at < len(args) else kwargs.get(name) for at, name in places]
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)) if tree else ()
    return frozenset(map(storage_id, _storages(tensors)))


@functools.cache
def _places_written(function: Any) -> tuple[tuple[int, str], ...] | None:
    """Position and name of each argument that an operator writes into; None if it has no schema that says so."""
    if not is_operator(function):
        return None
    arguments = enumerate(operator_schema(function).arguments)
    return tuple((at, each.name) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write)


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors:
        wrapper: Any = tensor
        if type(tensor) is not Tensor and is_traceable_wrapper_subclass(wrapper):
            inner = [getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]]
            yield from _storages(each for each in inner if isinstance(each, Tensor))
        elif tensor.layout == torch.strided:
            yield tensor.untyped_storage()
