"""The recomputed output of one node, which all its readers share in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memopt.recompute.expression import cast
from memopt.recompute.rules import Node

if TYPE_CHECKING:
    from memopt.recompute.specs import RecomputeSpec

#: The output from tensors that its producer saved (None where it has none in that place); more are left out.
Recompute = Callable[..., Tensor]

_METADATA_KEY = "memopt"


class Recomputed:
    """The recomputed output of one node while its readers need it. Refers to no node."""

    __slots__ = ("_rows", "_spec", "_value", "function", "of_cast", "readers", "served", "values")

    def __init__(self, function: Recompute | None = None) -> None:
        self.function = function
        """The output from the tensors that the node saved, for nodes of ours (`memopt.recompute.rules.recomputes`)."""
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
        self._spec: weakref.ref[RecomputeSpec] | None = None

    def belongs_to(self, spec: RecomputeSpec) -> None:
        """`spec` gives up its tensors when the node's backward runs."""
        self._spec = weakref.ref(spec)

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
            steps = (cast(dtype),)
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
        if self.served >= self.readers:
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
        spec = None if self._spec is None else self._spec()
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
