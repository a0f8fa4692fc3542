"""Handles: what stands for a tensor that can be recomputed."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from memopt.recompute.expression import Expression, Step, after
from memopt.recompute.graph import padded, reads_parts
from memopt.recompute.specs import recomputed_of


class _Remaking(threading.local):
    """Whether this thread is recomputing a tensor (and not running a node's backward)."""

    depth = 0


remaking = _Remaking()


_Form = tuple[tuple[Step, ...], tuple[int, ...], torch.device]
"""What was done to a node's output, and how the result lies in memory."""


class Handle:
    """Stands for a tensor that can be recomputed. It counts as a reader from `taken` on."""

    __slots__ = ("_expression", "_form", "_offset", "_recomputed", "_size", "_stride", "memopt_unpack")
    memopt_unpack: object

    def __init__(self, expression: Expression, tensor: Tensor, base: Tensor) -> None:
        """`tensor` is `base` or a view of it, which is what `expression` gives."""
        self._expression = expression
        for function, args, _ in expression.steps:
            if function is padded:
                args[-1].read(base)
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset() - base.storage_offset()
        self._form: _Form = (expression.steps, base.stride(), tensor.device)
        self._recomputed = recomputed_of(expression.node)

    def taken(self) -> Handle:
        """The handle itself, which autograd is about to hold."""
        self._recomputed.readers += 1
        return self

    @property
    def has_others(self) -> bool:
        """Whether autograd holds handles of the same node's output."""
        return self._recomputed.readers > 0

    @property
    def may_be_coded(self) -> bool:
        """Whether the node keeps less as long as nobody makes its output again (`memopt.saved.slots`)."""
        return getattr(self._expression.node, "slot", None) is not None

    def unpack(self) -> Tensor:
        recomputed = self._recomputed
        value = recomputed.values.get(self._form)
        if value is None:
            value = recomputed.values[self._form] = self._make()
        recomputed.count()
        return value.as_strided(self._size, self._stride, value.storage_offset() + self._offset)

    def _make(self) -> Tensor:
        steps, stride, device = self._form
        value = self._recomputed.as_produced()
        remaking.depth += 1
        try:
            # Whether backward is run inside an autocast region must not matter.
            with torch.no_grad(), _without_autocast(device):
                if value is None:
                    value = self._expression.first()
                    if reads_parts(steps):
                        self._recomputed.keep(value)
                value = after(value, steps)
        finally:
            remaking.depth -= 1
        value = value.to(device)
        if value.stride() != stride:
            laid_out = torch.empty_strided(value.size(), stride, dtype=value.dtype, device=device)
            value = laid_out.copy_(value)
        return value


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
