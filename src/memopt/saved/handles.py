"""Objects that autograd saves in place of tensors: handles of tensors that can be recomputed, and smaller tensors that
others repeat, e.g. grouped keys and values repeated for each query head."""

from __future__ import annotations

import math
import threading
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from memopt.recompute.expression import Expression, Step, after
from memopt.recompute.graph import reads_parts, repeated_from
from memopt.recompute.operations import rounds_anew
from memopt.recompute.rules import Node
from memopt.recompute.specs import Recomputed, recomputed_of
from memopt.recompute.steps import padded
from memopt.saved.pinned import Packed
from memopt.torch_compat import FakeTensor, storage_id


class _Remaking(threading.local):
    """Whether this thread is recomputing a tensor (and not running a node's backward): `depth` is not 0."""

    depth = 0


remaking = _Remaking()


_Form = tuple[tuple[Step, ...], tuple[int, ...], torch.device]
"""The steps after a node's output, and the strides and the device of the result."""


class Handle:
    """Stands for a tensor that can be recomputed. It counts as a reader after `taken`."""

    __slots__ = (
        "_counted", "_expression", "_form", "_offset", "_recomputed", "_shared", "_size", "_stride", "memopt_unpack",
    )  # fmt: skip
    memopt_unpack: object

    def __init__(self, expression: Expression, tensor: Tensor, base: Tensor, *, shared_by: Node | None) -> None:
        """`expression` gives `base`; `tensor` is `base` or a view of it. `shared_by` is the node that made `base`; None
        if the reader may write into a tensor of an unproved expression."""
        self._expression = expression
        for function, args, _ in expression.steps:
            if function is padded:
                args[-1].read(base)
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset() - base.storage_offset()
        self._form: _Form = (expression.steps, base.stride(), tensor.device)
        self._recomputed = recomputed_of(expression.node)
        self._shared: Recomputed | None = self._recomputed
        self._counted = [self._recomputed]
        """The recomputed outputs that this handle reads."""
        if expression.to_prove:  # the first node's cache would own nodes that the steps read, and they own that node
            self._shared = None if shared_by is None else recomputed_of(shared_by)
            if self._shared is not None:
                self._counted.append(self._shared)

    def taken(self) -> Handle:
        """The handle itself, which autograd is about to hold."""
        for each in self._counted:
            each.readers += 1
        return self

    @property
    def has_others(self) -> bool:
        """Whether autograd holds handles of this node's output."""
        return self._recomputed.readers > 0

    @property
    def may_be_coded(self) -> bool:
        """Whether the node's own slot can replace its input by a code, if no handle recomputes the node's output."""
        return getattr(self._expression.node, "slot", None) is not None

    def unpack(self) -> Tensor:
        shared = self._shared
        value = None if shared is None else shared.values.get(self._form)
        if value is None:
            value = self._make()
            if shared is not None:
                shared.values[self._form] = value
        for each in self._counted:
            each.count()
        return value.as_strided(self._size, self._stride, value.storage_offset() + self._offset)

    @property
    def is_shared(self) -> bool:
        """Whether autograd holds another handle of the same tensor."""
        return self._shared is not None and self._shared.readers > 0

    def gives(self, base: Tensor) -> bool:
        """Whether the recomputed tensor equals `base` bit by bit; this synchronises with the device. False where the
        node's output rounds anew, which weights of 1 would hide. Of fake and meta tensors, which have no values, True.
        False while a CUDA graph is captured."""
        if rounds_anew(self._expression.node):
            return False
        if isinstance(base, FakeTensor) or base.device.type == "meta":
            return True
        if base.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        try:
            value = self._make(keeps=False)
        except RuntimeError:  # a tensor that it reads was changed in place
            return False
        return value.dtype == base.dtype and value.shape == base.shape and torch.equal(*map(_bits, (value, base)))

    def _make(self, *, keeps: bool = True) -> Tensor:
        """Recompute the tensor. With `keeps`, the node's output is kept for other readers of its parts."""
        steps, stride, device = self._form
        value = self._recomputed.as_produced()
        remaking.depth += 1
        try:
            # The result must not depend on whether backward runs inside an autocast region.
            with torch.no_grad(), _without_autocast(device):
                if value is None:
                    value = self._expression.first()
                    if keeps and reads_parts(steps):
                        self._recomputed.keep(value)
                first, value = storage_id(value.untyped_storage()), after(value, steps)
        finally:
            remaking.depth -= 1
        value = value.to(device)
        is_its_own = self._shared is not None or storage_id(value.untyped_storage()) != first
        if value.stride() != stride or not is_its_own:
            laid_out = torch.empty_strided(value.size(), stride, dtype=value.dtype, device=device)
            value = laid_out.copy_(value)
        return value


def _bits(tensor: Tensor) -> Tensor:
    """The bits of `tensor` as integers, in which NaNs with equal bits are equal."""
    tensor = tensor.detach()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(_INTEGERS[tensor.itemsize])


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


class Once:
    """Stands for a contiguous tensor that repeats a smaller one, and holds the smaller one."""

    __slots__ = ("_packed", "_shape", "_view")

    def __init__(self, packed: Packed, shape: tuple[int, ...], tensor: Tensor) -> None:
        """`shape` is the shape of the repeated tensor, of which `tensor` is a view."""
        self._packed, self._shape = packed, shape
        self._view = tensor.size(), tensor.stride()

    def unpack(self) -> Tensor:
        return self._packed.unpack().expand(self._shape).contiguous().as_strided(*self._view)


def once_in(tensor: Tensor, base: Tensor, node: Node) -> tuple[Tensor, tuple[int, ...]] | None:
    """A copy of the smaller tensor that `tensor` (`base` or a view of all of it) repeats, and the repeated shape. None
    if `node`, which made `base`, repeated nothing, or if `tensor` was changed in place since."""
    found = repeated_from(node)
    if found is None or tensor._version != 0 or tensor.numel() != base.numel():
        return None
    shape, once = found
    if not base.is_contiguous() or base.storage_offset() or 2 * math.prod(once) > base.numel():
        return None
    with torch.no_grad():
        kept = base.detach().view(shape)
        for dim, (size, repeated) in enumerate(zip(once, shape, strict=True)):
            if size < repeated:
                kept = kept.narrow(dim, 0, 1)
        return kept.clone(), shape
