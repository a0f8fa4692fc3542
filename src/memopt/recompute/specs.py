"""Recompute specs: an output carries the tensors and the function that recompute it to the linears that read it.

A producer that saves less than its output (a norm, act(z), act(gate) * up) attaches a spec to that output. A linear
that finds a spec saves the spec's tensors, which the producer saves anyway, instead of its input. Backward recomputes
the input once for all its readers. Every function saves its tensors with ``save_for_backward``, so activation
checkpointing, offloading and sharding handle them like other saved tensors, and no saved-tensor hook is needed.

The spec is an attribute of one tensor object. A view, a cast, a copy or a dropout of the output has no spec, and its
readers save it as usual. Readers that cannot use a spec save a handle inside a `memopt.saved.RecomputeScope`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memopt.recompute.expression import cast_to
from memopt.recompute.rules import LINEAR, NORMALISED, Node, rule_of
from memopt.recompute.versions import versions_of, with_witness
from memopt.torch_compat import top_saved_tensors_hooks

#: Computes the output from the tensors that its producer saved (None for a missing one); it ignores further tensors.
Recompute = Callable[..., Tensor]
#: (dh, inputs, use, given_once) -> gradient of each input: the backward of the producer, which calls ``use(h)`` with
#: its output, if there is a `use`. It calls ``dh()`` once, for the gradient of h, and may overwrite that tensor; with
#: `given_once` also inputs for which `memopt.kernels.base.autograd.may_be_overwritten` is true.
Differentiate = Callable[
    [Callable[[], Tensor], tuple[Tensor, ...], Callable[[Tensor], None] | None, bool], tuple[Tensor, ...]
]

SPEC_ATTRIBUTE, _METADATA_KEY = "_memopt_recompute_spec", "memopt"


class Recomputed:
    """The recomputed output of one node, for as long as its readers need it. Refers to no node."""

    __slots__ = ("_rows", "_value", "for_node", "function", "of_cast", "readers", "served", "spec", "values")

    def __init__(self, function: Recompute | None = None) -> None:
        self.function = function
        """The output from the tensors that the node saved, for nodes of memopt's operators."""
        self.for_node = False
        """Whether the node's own backward reads the output too: if a reader recomputes it, it is kept until then."""
        self.readers = 0
        """Linears and handles that will need the output in backward."""
        self.served = 0
        self._value: Tensor | None = None
        self._rows: Tensor | None = None
        """The output as a matrix, for linears; `_value` is the output in its own shape."""
        self.values: dict[Any, Tensor] = {}
        """(steps from the output, strides, device) -> the result, for handles and for linears of other dtypes."""
        self.of_cast: Recomputed | None = None
        """The recomputed output of the cast that linears share (`RecomputeSpec.cast`)."""
        self.spec: weakref.ref[RecomputeSpec] | None = None
        """The spec of the output, which drops its tensors when the node's backward runs."""

    def as_produced(self) -> Tensor | None:
        """The output as its node produced it, if it is in memory."""
        if self._value is not None or not self.values:
            return self._value
        return next((value for (steps, *_), value in self.values.items() if not steps), None)

    def keep(self, value: Tensor) -> None:
        """Keep the output, as its node produced it, for later readers."""
        self._value = value

    def rows(self, saved: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        """The output in `dtype` as a matrix of rows, for one of its readers; after the last reader it is freed."""
        rows = self._rows
        if rows is None:
            value = self.as_produced()
            if value is None:
                assert self.function is not None
                value = self.function(*saved)
            self._value = value
            self._rows = rows = value.reshape(-1, value.size(-1))
        if rows.dtype != dtype:
            steps = (cast_to(dtype),)
            narrow = next((each for (done, *_), each in self.values.items() if done == steps), None)
            if narrow is None:
                assert self._value is not None
                narrow = self.values[steps, None, None] = self._value.to(dtype)
            rows = narrow.reshape(rows.shape)
        self.count()
        return rows

    def count(self) -> None:
        """Count one reader that has got the output; after the last one, release the output."""
        self.served += 1
        if self.served >= self.readers and not self.for_node:
            self.release()

    def release(self, *_: object) -> None:
        """Free the output. Safe in the node's backward: the backwards of all readers run before it."""
        self.served = 0
        self._value = self._rows = None
        if self.values:
            self.values.clear()

    def finish(self) -> None:
        """Called by the node's own backward: free the output and the spec's tensors, as a user may hold the output."""
        self.release()
        spec = None if self.spec is None else self.spec()
        if spec is not None:
            spec.saved = spec.cast = None
        if self.of_cast is not None:
            self.of_cast.finish()


def recomputed_of(node: Node) -> Recomputed:
    """The object that all readers of the output of `node` share."""
    own: Recomputed | None = getattr(node, "recomputed", None)  # released by the node's own backward
    if own is not None:
        return own
    recomputed: Recomputed | None = node.metadata.get(_METADATA_KEY)
    if recomputed is None:
        recomputed = node.metadata[_METADATA_KEY] = Recomputed()
        # The backwards of all readers run before the node's, so nothing needs the value any more when that begins.
        node.register_prehook(recomputed.release)
    return recomputed


class RecomputeSpec:
    """How to recompute one output. Lives as long as the output; drops its tensors in the producer's backward."""

    __slots__ = (
        "__weakref__", "cast", "differentiate", "hook", "is_recomputed", "narrow", "recomputed", "saved", "versions",
    )  # fmt: skip

    def __init__(
        self,
        saved: tuple[Tensor | None, ...],
        recomputed: Recomputed,
        differentiate: Differentiate | None,
        versions: list[int] | None,
        hook: object,
        is_recomputed: bool,
        narrow: Recompute | None,
    ) -> None:
        self.saved: tuple[Tensor | None, ...] | None = saved
        self.recomputed, self.differentiate, self.versions = recomputed, differentiate, versions
        self.hook, self.narrow = hook, narrow
        self.cast: Tensor | None = None
        """The output in autocast's dtype, which all linears share that read it; None until the first one does."""
        self.is_recomputed = is_recomputed
        """Whether a tensor in `saved` can itself be recomputed: it is not detached, since scopes need its graph."""
        recomputed.spec = weakref.ref(self)

    def __reduce__(self) -> tuple[type[set[Any]], tuple[()]]:
        # A pickled tensor has no graph, so no spec. An empty set: weights_only loads neither None nor our classes.
        return set, ()

    def take(self) -> Sequence[Tensor | None]:
        """The tensors for one more reader to save; it must use the recomputed output once in backward."""
        self.recomputed.readers += 1
        assert self.saved is not None
        if self.versions is None or self.is_recomputed:
            return self.saved
        # Detach them: a tensor with a grad_fn would keep the graph alive.
        return [None if tensor is None else tensor.detach() for tensor in self.saved]


def attach_spec(
    output: Tensor,
    saved: tuple[Tensor | None, ...],
    recomputed: Recomputed,
    *,
    are_private: bool = False,
    differentiate: Differentiate | None = None,
    narrow: Recompute | None = None,
) -> None:
    """Attach to `output` the spec that ``recomputed.function(*saved)`` computes it.

    Args:
        saved: tensors that the producer saves anyway.
        recomputed: the object of the producer's node; the node's backward calls its `finish`.
        are_private: nothing else can change `saved` in place.
        differentiate: the producer's backward, for a reader that runs it itself; `saved` are then its inputs.
        narrow: like ``recomputed.function``, with the result in autocast's dtype at the producer, if `output` has
            another dtype. Readers that cast the output to it share one cast (:func:`shared_cast`).
    """
    if not output.requires_grad:
        return
    top = top_saved_tensors_hooks(False)
    hook = None
    if top is not None:
        if hasattr(top[0], "memopt_outer_pack"):  # a scope may follow tensors that are made from the output
            with_witness(output)
        hook = getattr(top[0], "memopt_outer_pack", top[0])
        # A spec of an output that outlives its block would keep a scope from compressing the spec's tensors. And the
        # output of a checkpointed block must not keep the block's saved tensors alive; an activation's stays inside.
        is_inside = hook is None or hook is _region.hook or getattr(hook, "memopt_observer", False)
        if differentiate is None and (not is_inside or getattr(top[0], "compressor", None) is not None):
            return
    versions = None if are_private else versions_of(saved)
    is_recomputed = top is not None and not are_private and any(map(_is_recomputed, saved))
    spec = RecomputeSpec(saved, recomputed, differentiate, versions, hook, is_recomputed, narrow)
    setattr(output, SPEC_ATTRIBUTE, spec)


def _is_recomputed(tensor: Tensor | None) -> bool:
    node = None if tensor is None else tensor.grad_fn
    rule = None if node is None else rule_of(node)
    return rule is not None and rule.family in (LINEAR, NORMALISED)


def spec_of(x: object) -> RecomputeSpec | None:
    """The spec of this tensor object; None if the tensor, or one that it is recomputed from, was changed in place,
    or if saved tensors go through other hooks than at the producer: a checkpointed reader's second run would find no
    spec."""
    spec: RecomputeSpec | None = getattr(x, SPEC_ATTRIBUTE, None)
    if not spec or x._version or spec.saved is None:  # type: ignore[attr-defined]
        return None
    top = top_saved_tensors_hooks(False)
    if spec.hook is not (None if top is None else getattr(top[0], "memopt_outer_pack", top[0])):
        return None
    return None if spec.versions is not None and spec.versions != versions_of(spec.saved) else spec


def shared_cast(x: Tensor, autocast_dtype: Callable[[Tensor], torch.dtype | None]) -> Tensor:
    """For a reader that would cast `x` to autocast's dtype: the cast that all such readers share. The first reader
    makes the cast, which has a spec of its own. `x` itself if its spec has no `narrow`."""
    spec: RecomputeSpec | None = getattr(x, SPEC_ATTRIBUTE, None)
    if not spec or spec.narrow is None or x._version or not torch.is_grad_enabled():
        return x
    dtype, cast = autocast_dtype(x), spec.cast
    if cast is None:
        if dtype is None or spec_of(x) is None:
            return x
        assert spec.saved is not None
        spec.cast = cast = x.to(dtype)
        spec.recomputed.of_cast = own = Recomputed(spec.narrow)
        setattr(cast, SPEC_ATTRIBUTE, RecomputeSpec(spec.saved, own, None, None, spec.hook, False, None))
    return cast if cast.dtype is dtype else x


def keep_producer(output: Tensor) -> None:
    """Let no reader run the producer's backward itself: `output` is needed with its own autograd node."""
    spec: RecomputeSpec | None = getattr(output, SPEC_ATTRIBUTE, None)
    if spec:
        spec.differentiate = None


class Region:
    """Context manager around one call of a block. Under foreign hooks (activation checkpointing, offloading), outputs
    carry specs only inside a region. The block's outputs lose their specs, since they would keep the tensors of the
    specs alive."""

    __slots__ = ("_before", "_hook", "_repeats")

    def __init__(self, *, repeats: bool = True) -> None:
        """With `repeats`, a second run of the block (checkpointing) passes equal tensors to the same modules."""
        self._repeats = repeats

    def __enter__(self) -> Region:
        hook = _foreign_pack_hook()
        self._hook = None if getattr(hook, "memopt_observer", False) else hook
        self._before, _region.hook = _region.hook, self._hook if self._repeats else None
        return self

    def __exit__(self, *error: object) -> None:
        _region.hook = self._before

    def leaves(self, output: object) -> None:
        """Called with the block's output: drops its specs."""
        if self._hook is not None:
            _drop_specs(output)


class _Innermost(threading.local):
    hook: object = None
    """The foreign pack hook of the innermost region, or None."""


_region = _Innermost()


def _drop_specs(output: object) -> None:
    if isinstance(output, Tensor):
        output.__dict__.pop(SPEC_ATTRIBUTE, None)
    elif isinstance(output, (tuple, list)):
        for each in output:
            _drop_specs(each)
    elif isinstance(output, dict):
        for each in output.values():
            _drop_specs(each)


def is_under_foreign_hooks() -> bool:
    """Whether saved tensors go through a hook that is neither a scope's nor an observer's."""
    hook = _foreign_pack_hook()
    return hook is not None and not getattr(hook, "memopt_observer", False)


def _foreign_pack_hook() -> object:
    """The innermost saved-tensor pack hook that is no scope's, or None."""
    top = top_saved_tensors_hooks(False)
    return None if top is None else getattr(top[0], "memopt_outer_pack", top[0])
