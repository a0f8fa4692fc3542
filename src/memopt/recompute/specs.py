"""Recompute specs: what an output is recomputed from, carried by the output itself to the linears that read it.

A producer that saves less than its output (a norm, act(z), act(gate) * up) attaches a spec to that output. A linear
that finds one saves the spec's tensors, which the producer saves anyway, instead of its input, and recomputes the input
in backward, once for all its readers. Everything is saved by ``save_for_backward`` of the function that needs it, so
activation checkpointing, offloading and sharding see it like any other saved tensor; no saved-tensor hook is needed.

The spec is an attribute of one tensor object: a view, a cast, a copy or a dropout of the output has none, and its
readers save it as usual. Readers that cannot use a spec are served by a `memopt.saved.RecomputeScope`.
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

#: The output from tensors that its producer saved (None where it has none in that place); more are left out.
Recompute = Callable[..., Tensor]
#: (dh, inputs, use, given_once) -> gradient of each input: the backward of the producer, which calls ``use(h)`` with
#: its output, if there is a `use`. It calls ``dh()`` once, for the gradient of h, which nobody else reads: it may be
#: overwritten, and with `given_once` what `memopt.kernels.base.autograd.may_be_overwritten` allows of the inputs.
Differentiate = Callable[
    [Callable[[], Tensor], tuple[Tensor, ...], Callable[[Tensor], None] | None, bool], tuple[Tensor, ...]
]

SPEC_ATTRIBUTE, _METADATA_KEY = "_memopt_recompute_spec", "memopt"


class Recomputed:
    """The recomputed output of one node while its readers need it. Refers to no node."""

    __slots__ = ("_rows", "_value", "for_node", "function", "of_cast", "readers", "served", "spec", "values")

    def __init__(self, function: Recompute | None = None) -> None:
        self.function = function
        """The output from the tensors that the node saved, for nodes of memopt's operators."""
        self.for_node = False
        """The node's own backward reads the output where a reader has recomputed it: then it is kept until then."""
        self.readers = 0
        """Linears and handles that will need the output in backward."""
        self.served = 0
        self._value: Tensor | None = None
        self._rows: Tensor | None = None
        """The output, and the same as a matrix, for linears."""
        self.values: dict[Any, Tensor] = {}
        """(steps from the output, strides, device) -> the result, for handles and for linears of other dtypes."""
        self.of_cast: Recomputed | None = None
        """That of the cast which linears share (`RecomputeSpec.cast`)."""
        self.spec: weakref.ref[RecomputeSpec] | None = None
        """It gives up its tensors when the node's backward runs."""

    def as_produced(self) -> Tensor | None:
        """The output as its node produced it, if it is there."""
        if self._value is not None or not self.values:
            return self._value
        return next((value for (steps, *_), value in self.values.items() if not steps), None)

    def keep(self, value: Tensor) -> None:
        """Keep the output as its node produced it for the readers to come."""
        self._value = value

    def rows(self, saved: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
        """The output in `dtype` as a matrix of rows, for one of its readers; the last one lets it go."""
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
        """One reader more has been served."""
        self.served += 1
        if self.served >= self.readers and not self.for_node:
            self.release()

    def release(self, *_: object) -> None:
        """Let the output go: every reader comes before the node in backward."""
        self.served = 0
        self._value = self._rows = None
        if self.values:
            self.values.clear()

    def finish(self) -> None:
        """The node's own backward runs: let the output go, and what an output that outlives the graph would hold."""
        self.release()
        spec = None if self.spec is None else self.spec()
        if spec is not None:
            spec.saved = spec.cast = None
        if self.of_cast is not None:
            self.of_cast.finish()


def recomputed_of(node: Node) -> Recomputed:
    """What the readers of the output of `node` share."""
    own: Recomputed | None = getattr(node, "recomputed", None)  # released by the node's own backward
    if own is not None:
        return own
    recomputed: Recomputed | None = node.metadata.get(_METADATA_KEY)
    if recomputed is None:
        recomputed = node.metadata[_METADATA_KEY] = Recomputed()
        # All readers come before the node in backward: when its turn comes, nothing needs the value any more.
        node.register_prehook(recomputed.release)
    return recomputed


class RecomputeSpec:
    """What one output is recomputed from. Lives as long as the output, or until the producer's backward has run."""

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
        """Scopes find from the graph of the tensors in `saved` how to recompute these."""
        recomputed.spec = weakref.ref(self)

    def __reduce__(self) -> tuple[type[set[Any]], tuple[()]]:
        # A saved tensor has no graph. Neither None nor any class of ours is loaded by torch.load's weights_only.
        return set, ()

    def take(self) -> Sequence[Tensor | None]:
        """The tensors for a reader to save, which needs the output once in backward."""
        self.recomputed.readers += 1
        assert self.saved is not None
        if self.versions is None or self.is_recomputed:
            return self.saved
        # Not the tensors in the graph: they would own it.
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
    """Say that ``recomputed.function(*saved)`` is `output`.

    Args:
        saved: tensors that the producer saves anyway.
        recomputed: that of the producer's node, whose backward calls its `finish`.
        are_private: nobody else can change `saved` in place.
        differentiate: the producer's backward, for a reader that takes its place; `saved` are then its inputs.
        narrow: as that function, in the dtype that autocast had at the producer, which is not that of `output`. Readers
            that would cast the output to it share one cast (:func:`shared_cast`).
    """
    if not output.requires_grad:
        return
    top = top_saved_tensors_hooks(False)
    hook = None
    if top is not None:
        if hasattr(top[0], "memopt_outer_pack"):  # a scope may follow what is made of it
            with_witness(output)
        hook = getattr(top[0], "memopt_outer_pack", top[0])
        # A spec of an output that outlives its block would keep a scope from compressing its tensors. And what leaves a
        # region that is run twice must not hold what was saved inside; what an activation feeds stays inside.
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
    """The spec of this very tensor, unless the tensor or what it is recomputed from was changed in place.

    Nor where saved tensors go through other hooks than at the producer: checkpointing of the reader alone would find no
    spec in its second run.
    """
    spec: RecomputeSpec | None = getattr(x, SPEC_ATTRIBUTE, None)
    if not spec or x._version or spec.saved is None:  # type: ignore[attr-defined]
        return None
    top = top_saved_tensors_hooks(False)
    if spec.hook is not (None if top is None else getattr(top[0], "memopt_outer_pack", top[0])):
        return None
    return None if spec.versions is not None and spec.versions != versions_of(spec.saved) else spec


def shared_cast(x: Tensor, autocast_dtype: Callable[[Tensor], torch.dtype | None]) -> Tensor:
    """`x` for a reader that casts it to autocast's dtype at once: the cast that all such readers share.

    It is made by the first of them, and has a spec of its own. `x` itself where its producer offers none.
    """
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
    """No reader takes the place of the producer's backward: somebody wants `output` with its place in the graph."""
    spec: RecomputeSpec | None = getattr(output, SPEC_ATTRIBUTE, None)
    if spec:
        spec.differentiate = None


class Region:
    """Context manager around one call of a block.

    Under foreign hooks (activation checkpointing, offloading), outputs carry specs inside such a region only, and lose
    them where they leave it: an output holds the tensors of its spec.
    """

    __slots__ = ("_before", "_hook", "_repeats")

    def __init__(self, *, repeats: bool = True) -> None:
        """With `repeats`, a second run of the block (checkpointing) gives the same tensors to the same modules."""
        self._repeats = repeats

    def __enter__(self) -> Region:
        hook = _foreign_pack_hook()
        self._hook = None if getattr(hook, "memopt_observer", False) else hook
        self._before, _region.hook = _region.hook, self._hook if self._repeats else None
        return self

    def __exit__(self, *error: object) -> None:
        _region.hook = self._before

    def leaves(self, output: object) -> None:
        """`output` is what the block returns."""
        if self._hook is not None:
            _drop_specs(output)


class _Innermost(threading.local):
    hook: object = None
    """The foreign pack hook of the innermost region; None where there is none."""


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
    """The innermost saved-tensor pack hook that is no scope's; None where there is none."""
    top = top_saved_tensors_hooks(False)
    return None if top is None else getattr(top[0], "memopt_outer_pack", top[0])
