"""Attention's softmax, called as a function in a module's forward: its output is recomputed in backward.

While such a module runs, a function mode follows the results of matrix products through later operations
(`memopt.recompute.calls`). If a softmax's input can be recomputed from tensors that are saved anyway or are smaller, no
operation saves its output. Fused attention, checkpointed blocks and blocks with quantised tensors stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.kernels.base.autograd import autocast_dtype
from memopt.kernels.softmax.function import recomputed_softmax, recomputed_tanh
from memopt.patches.functions import FollowingMode
from memopt.patches.swap import steps_aside
from memopt.recompute.calls import GATHERS, PRODUCTS, STEPS, Followed, costs_less_than
from memopt.recompute.expression import Expression
from memopt.recompute.rules import PROBABILITIES
from memopt.saved.scope import applies, saving_shape_of
from memopt.torch_compat import FakeTensor

#: Calls after which a module without a softmax to recompute is observed again.
LOOK_AGAIN = 64
_CAPS = frozenset({torch.tanh, Tensor.tanh})
_SOFTMAXES = frozenset({F.softmax, torch.softmax, Tensor.softmax})
_PLAIN_TYPES = frozenset({Tensor, FakeTensor})


class RecomputedSoftmaxes:
    """Makes the contexts around the calls of one module. A copy of the module starts without findings."""

    __slots__ = ("_calls_without",)

    def __init__(self) -> None:
        self._calls_without = 0
        """Calls since the last observed one, itself included, if that found no softmax to recompute; otherwise 0."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RecomputedSoftmaxes, ()

    def __call__(self, module: nn.Module, given: Sequence[Any]) -> AbstractContextManager[object]:
        if steps_aside() or not applies(PROBABILITIES):
            return nullcontext()
        if 0 < self._calls_without < LOOK_AGAIN:
            self._calls_without += 1
            return nullcontext()
        return _Following(self, given)

    def note(self, found: bool) -> None:
        """Record whether the observed call, which has ended, found a softmax to recompute."""
        self._calls_without = 0 if found else 1


class _Following(FollowingMode):
    def __init__(self, calls: RecomputedSoftmaxes, given: Sequence[Any]) -> None:
        super().__init__()
        self._calls, self._found, self._followed = calls, False, Followed(given)
        self._is_behind = False  # whether the next product multiplies probabilities and values

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            self._calls.note(self._found)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SOFTMAXES:
            return self._softmax(func, args, kwargs)
        if func in PRODUCTS:
            output = func(*args, **kwargs)
            if not self._is_behind:
                self._followed.product(func, args, output)
            self._is_behind = False
            return output
        if func not in STEPS or self._followed.is_empty:
            return func(*args, **kwargs)
        known = self._followed.among(args)
        if func in _CAPS and known is not None and (capped := self._capped(*known)) is not None:
            return capped
        # The node of a gather saves the gather's input, but backward reads only its shape.
        of_shape = func in GATHERS and known is not None and applies(PROBABILITIES)
        self._found = self._found or of_shape
        with saving_shape_of(args[0]) if of_shape else nullcontext():
            output = func(*args, **kwargs)
        if known is not None:
            self._followed.step(func, args, kwargs, *known, output)
        return output

    def _capped(self, scores: Expression, x: Tensor) -> Tensor | None:
        """The tanh of scores, recomputed in backward; None if its output has to be saved."""
        # Without gradients, this is the tanh inside an operator that the mode of a module inside has put there.
        if not torch.is_grad_enabled() or not applies(PROBABILITIES) or not costs_less_than(x.nbytes, scores.reads):
            return None
        output = recomputed_tanh(x, scores._replace(reads=()).value, [each.tensor for each in scores.reads])
        self._followed.made_by_a_rule(output)
        return output

    def _softmax(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        recomputed = self._recomputed(*args, **kwargs) if applies(PROBABILITIES) else None
        if recomputed is not None:
            self._found = self._is_behind = True
            return recomputed
        output: Tensor = func(*args, **kwargs)
        return output

    def _recomputed(
        self, input: Any, dim: Any = None, *more: Any, dtype: torch.dtype | None = None, **others: Any
    ) -> Tensor | None:
        """The softmax, recomputed in backward; None if its output has to be saved."""
        if type(input) not in _PLAIN_TYPES or not input.requires_grad or not isinstance(dim, int):
            return None
        if more or others.keys() - {"_stacklevel"}:  # `out`, for one
            return None
        if dtype is None:
            autocast = autocast_dtype(input)
            dtype = input.dtype if autocast is None else _autocast_to(input.device, input.dtype, autocast)
        if dtype.itemsize < input.itemsize:
            return None
        nbytes = input.numel() * dtype.itemsize
        scores = self._followed.of(input)
        if scores is not None and costs_less_than(nbytes, scores.reads):
            read = [each.tensor for each in scores.reads]
            return recomputed_softmax(input, dim, dtype, scores._replace(reads=()).value, read)
        if 2 * input.nbytes <= nbytes:
            return recomputed_softmax(input, dim, dtype, itemgetter(0), [input.detach()])
        return None


@functools.cache
def _autocast_to(device: torch.device, dtype: torch.dtype, _: torch.dtype) -> torch.dtype:
    """The dtype of a softmax's output under the active autocast, which computes it in fp32 on some devices."""
    return torch.softmax(torch.zeros(1, dtype=dtype, device=device), 0).dtype
