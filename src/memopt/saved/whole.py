"""Which operations of a scope that compresses save their tensors whole.

A compressed tensor is right on average. So is a gradient that is linear in it, and almost one that is smooth in it. A
mask is not (a small positive element may be decoded as 0, the slope of a ReLU jumps there), and the quotient by an
element that is decoded near 0 is far off. Such operations get their tensors whole, and exactly: no handle stands for
them, because a handle would recompute them from compressed tensors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

#: Functions whose backward has a jump in what they save, without underscores at the ends of their names.
_JUMPS = """
    abs absolute amax amin celu clamp clamp_max clamp_min clip elu fmax fmin hardshrink hardsigmoid hardswish hardtanh
    huber_loss l1_loss leaky_relu max maximum min minimum prelu relu relu6 rrelu selu smooth_l1_loss softshrink
    threshold
"""
#: Functions whose backward has a pole in it.
_POLES = """
    acos acosh addcdiv arccos arccosh arcsin arctan2 arctanh asin atan2 atanh cdist cosine_similarity cumprod
    digamma div divide erfinv hypot idiv itruediv lgamma linalg_norm linalg_vector_norm log log10 log1p log2 logit
    norm normalize pairwise_distance prod rdiv reciprocal renorm rsqrt rtruediv softsign sqrt std std_mean
    true_divide truediv vector_norm xlogy
"""
_ROUGH = frozenset((_JUMPS + _POLES).split())
_POWERS = frozenset({"float_power", "ipow", "pow"})
#: Nodes that save their output, which the function that made it need not name.
_NODES = frozenset({"ReciprocalBackward0", "ReluBackward0", "RsqrtBackward0", "SqrtBackward0", "ThresholdBackward0"})


class _Saving(threading.local):
    whole = False


#: Whether the operation that runs in this thread saves its tensors whole: `whole`.
saving = _Saving()


@contextlib.contextmanager
def kept_whole() -> Iterator[None]:
    """Inside, scopes that compress keep saved tensors whole, except those of operations of PyTorch that need it not.
    Compiled code saves what the compiler decides, and would have a guard on the flag of the thread."""
    if is_compiling():
        yield
        return
    before, saving.whole = saving.whole, True
    try:
        yield
    finally:
        saving.whole = before


def is_kept_whole(tensor: Tensor) -> bool:
    """Whether the operation that saves `tensor` now needs it whole."""
    return saving.whole or (tensor.grad_fn is not None and tensor.grad_fn.name() in _NODES)


class FollowedHooks(saved_tensors_hooks):
    """Saved-tensor hooks of a scope that compresses. Inside, `saving` follows the functions of PyTorch that run."""

    def __enter__(self) -> None:
        super().__enter__()
        self._mode = _Following()
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
        super().__exit__(*error)


class _Following(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_compiling():
            return func(*args, **kwargs)
        before, saving.whole = saving.whole, _is_rough(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            saving.whole = before


def _is_rough(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the backward of this call has a jump or a pole in the tensors that it saves."""
    name = getattr(function, "__name__", "").partition(".")[0].strip("_")
    if name in _POWERS:
        exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
        return not isinstance(exponent, int | float) or (exponent < 2 and exponent != 1)
    return name in _ROUGH
