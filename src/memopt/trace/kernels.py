"""What kernels of other packages save for backward, as their own code says: they cannot run where a step is traced.

Transients inside of a kernel are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memopt.walk.models.plain import STANDS_FOR_KERNEL, kernels_of

#: The distribution of a package, and the version whose code was read.
_READ = {"fla": ("flash-linear-attention", "0.6.0")}
_CHUNK = 64
"""Tokens of a chunk, for each of which a row of a triangular matrix is saved."""


class _Kernel(torch.autograd.Function):
    """Returns and saves new tensors of these shapes and dtypes, and inputs where a number says which one."""

    @staticmethod
    def forward(ctx: Any, returned: Sequence[Any], saved: Sequence[Any], *tensors: Tensor) -> Any:
        like = tensors[0]
        ctx.save_for_backward(*(tensors[each] if isinstance(each, int) else _new(like, *each) for each in saved))
        ctx.forms = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return tuple(each and _new(like, *each) for each in returned)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        like = next(each for each in gradients if each is not None)
        needs = ctx.needs_input_grad[2:]
        return (None, None, *(_new(like, *form) if need else None for form, need in zip(ctx.forms, needs, strict=True)))


def _new(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return like.new_empty(tuple(shape), dtype=dtype)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """fla.ops.gated_delta_rule.chunk: inputs are made contiguous, q and k normalised, g summed up in fp32."""
    rows, tokens, heads, width = value.shape
    state = ((rows, heads, key.size(-1), width), torch.float32) if output_final_state else None
    roots = [(each.shape[:-1], torch.float32) for each in (query, key) if use_qk_l2norm_in_kernel]
    vectors = [
        place if each.is_contiguous() and not (use_qk_l2norm_in_kernel and place < 2) else (each.shape, each.dtype)
        for place, each in enumerate((query, key, value))
    ]
    saved = [*vectors, *roots, (g.shape, torch.float32), 4, ((rows, tokens, heads, _CHUNK), key.dtype)]
    returned = [(value.shape, query.dtype), state]
    result: tuple[Tensor, Tensor | None] = _Kernel.apply(returned, saved, query, key, value, g, beta)  # type: ignore[no-untyped-call]
    return result


#: Kernel -> what stands for it while a step is traced.
STAND_INS: Mapping[str, Callable[..., Any]] = {"chunk_gated_delta_rule": _delta_rule}
for _function in STAND_INS.values():
    setattr(_function, STANDS_FOR_KERNEL, True)


def notes_of(model: nn.Module) -> list[str]:
    """Which kernels a trace of `model` assumes, and which it could not."""
    found = kernels_of(model)
    notes = []
    for package in dict.fromkeys(found.values()):
        name, version = _READ.get(package, (package, ""))
        known = [kernel for kernel, of in found.items() if of == package and kernel in STAND_INS]
        others = [kernel for kernel, of in found.items() if of == package and kernel not in STAND_INS]
        if known:
            notes.append(f"Assumes {name} for {', '.join(known)}: what it saves is that of version {version}.")
        if others:
            notes.append(
                f"Of {name}, {', '.join(others)} would count as transformers' plain functions, which save more."
            )
    return notes
