"""Attention of a checkpointed block whose backward runs by groups of heads.

The backward of fused attention allocates fp32 sums of the queries' gradients and, if several query heads share a key
head, gradients of keys and values for each query head. Together these take as much as four 16-bit hidden states. Heads
are independent, so backward by groups needs only the memory of one group, and gives the same gradients.

The call itself shows which fused operator PyTorch runs. Attention with a mask, with dropout or in another operator is
left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memopt.kernels.base.autograd import as_leaf, batched_gradients, is_batched, refuse_double_backward
from memopt.torch_compat import FakeTensor, TorchDispatchMode

_PLAIN = (Tensor, FakeTensor)
#: Tensors of a head's size, in the dtype of the queries, that live during its backward: the gradient of the queries
#: before it is copied into place, copies of the output and of its gradient, and the gradients of keys and values.
_COPIES = 5
#: (gradient of the output, saved tensors, settings of the call) -> gradients of queries, keys and values.
_Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def _flash(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, causal: bool, scale: Any, *own: Tensor
) -> Any:
    statistics, seed, offset = own
    function = torch.ops.aten._scaled_dot_product_flash_attention_backward
    rows, columns = q.size(2), k.size(2)
    return function(
        gradient, q, k, v, output, statistics, None, None, rows, columns, 0.0, causal, seed, offset, scale=scale
    )


def _flash_on_cpu(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, causal: bool, scale: Any, *own: Tensor
) -> Any:
    function = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return function(gradient, q, k, v, output, *own, 0.0, causal, scale=scale)


#: Fused operator without a mask and without dropout -> its backward, and the places of the results that this needs
#: beside the output: statistics of the rows, seed and offset.
_OPERATORS: dict[Any, tuple[_Backward, tuple[int, ...]]] = {
    torch.ops.aten._scaled_dot_product_flash_attention: (_flash, (1, 6, 7)),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (_flash_on_cpu, (1,)),
}


class ByHeads(TorchFunctionMode):
    """While this mode is active, the backward of fused attention runs by groups of heads that take at most `room`
    bytes; the smallest group is one key head."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        self._calls = 0
        self._otherwise: dict[int, bool] = {}
        """Number of a call -> whether it is left as it is: the second run of the block must do the same."""

    def __enter__(self) -> ByHeads:
        self._calls = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return function(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Tensor:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, **others)

        three = query, key, value
        number, self._calls = self._calls, self._calls + 1
        group = 0 if attn_mask is not None or dropout_p else self._heads(*three)
        if group and torch.is_autocast_enabled(query.device.type):
            low = torch.get_autocast_dtype(query.device.type)
            three = tuple(each.to(low) for each in three)  # type: ignore[assignment]
        if not group or self._otherwise.setdefault(number, _form(*three) in _OTHERWISE):
            return call(*three)
        output: Tensor | None = _ByGroups.apply(call, group, is_causal, others.get("scale"), *three)  # type: ignore[no-untyped-call]
        if output is None:  # another operator ran
            _OTHERWISE.add(_form(*three))
            self._otherwise[number] = True
            return call(*three)
        return output

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> int:
        """Number of key heads in a group; 0 if attention is left as it is."""
        three = query, key, value
        if any(type(each) not in _PLAIN or each.dim() != 4 for each in three) or query.shape[-1] != value.shape[-1]:
            return 0
        if not torch.is_grad_enabled() or not any(each.requires_grad for each in three):
            return 0
        batch, heads, rows, width = query.shape
        of_head = batch * rows * width * (4 + _COPIES * query.element_size()) * (heads // key.size(1))
        group = max(self._room // max(of_head, 1), 1)
        return group if group < key.size(1) else 0


#: Forms of calls for which PyTorch ran another operator; they are not tried again.
_OTHERWISE: set[Any] = set()


def _form(*three: Tensor) -> Any:
    return three[0].device.type, three[0].dtype, *(tuple(each.shape) for each in three)


class _Seen(TorchDispatchMode):
    """Notes the fused operator that runs, its arguments and its results."""

    def __init__(self) -> None:
        super().__init__()
        self.operator: tuple[_Backward, tuple[int, ...]] | None = None
        self.args: tuple[Any, ...] = ()
        self.results: Any = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        found = _OPERATORS.get(function.overloadpacket)
        if found is not None:
            self.operator, self.args, self.results = found, args, results
        return results


class _ByGroups(torch.autograd.Function):
    """``call(query, key, value)``; None if it runs no operator of `_OPERATORS`, or runs it on other shapes."""

    @staticmethod
    def forward(
        ctx: Any, call: Callable[..., Tensor], group: int, causal: bool, scale: Any, *three: Tensor
    ) -> Tensor | None:
        with _Seen() as seen:
            output = call(*three)
        if seen.operator is None or any(
            mine.shape != its.shape for mine, its in zip(three, seen.args[:3], strict=True)
        ):
            return None
        ctx.backward_of, places = seen.operator
        ctx.save_for_backward(*three, output, *(seen.results[place] for place in places))
        ctx.settings, ctx.group, ctx.call = (causal, scale), group, call
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_double_backward()
        query, key, value, output, statistics, *random = ctx.saved_tensors
        if is_batched((gradient,)):
            with torch.enable_grad():
                leaves = [as_leaf(each) for each in (query, key, value)]
                output = ctx.call(*leaves)
            return None, None, None, None, *batched_gradients((output,), leaves, (gradient,))
        shared = query.size(1) // key.size(1)
        gradients = [torch.empty_like(each) for each in (query, key, value)]
        for first in range(0, key.size(1), ctx.group):
            of_keys = slice(first, first + ctx.group)
            of_queries = slice(first * shared, (first + ctx.group) * shared)
            q, grad, out, rows = (each[:, of_queries] for each in (query, gradient, output, statistics))
            parts = ctx.backward_of(grad, q, key[:, of_keys], value[:, of_keys], out, *ctx.settings, rows, *random)
            for whole, part, heads in zip(gradients, parts, (of_queries, of_keys, of_keys), strict=True):
                whole[:, heads] = part
            del parts, part
        return None, None, None, None, *gradients
