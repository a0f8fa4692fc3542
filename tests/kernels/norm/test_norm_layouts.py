"""Norms of tensors in any layout: values, strides and gradients are stock's, and readers share the norm's one tensor.

The Triton kernels run the same checks in tests/triton/test_norm_layouts.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memopt.kernels.linear.function import linear
from memopt.kernels.norm import ops as norm_ops
from memopt.kernels.norm.function import NormSpec, ms_norm
from memopt.trace.account import live_bytes

BATCH, TOKENS, HIDDEN = 3, 5, 16
#: From (BATCH, 2 * TOKENS * HIDDEN) elements to (BATCH, TOKENS, HIDDEN).
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda base: base[:, : TOKENS * HIDDEN].reshape(BATCH, TOKENS, HIDDEN),
    "permuted, as behind a convolution": lambda base: (
        base[:, : TOKENS * HIDDEN].reshape(BATCH, HIDDEN, TOKENS).permute(0, 2, 1)
    ),
    "sequence first": lambda base: base[:, : TOKENS * HIDDEN].reshape(TOKENS, BATCH, HIDDEN).transpose(0, 1),
    "a slice of the columns": lambda base: base.view(BATCH, TOKENS, 2 * HIDDEN)[..., HIDDEN:],
    "a slice of permuted columns": lambda base: base.view(BATCH, 2 * HIDDEN, TOKENS)[:, :HIDDEN].permute(0, 2, 1),
    "every second column": lambda base: base.view(BATCH, TOKENS, 2 * HIDDEN)[..., ::2],
    "expanded rows": lambda base: base[:1, :HIDDEN].view(1, 1, HIDDEN).expand(BATCH, TOKENS, HIDDEN),
    "expanded columns": lambda base: base[:, :TOKENS].unsqueeze(-1).expand(BATCH, TOKENS, HIDDEN),
}
KINDS = {"rms": ("rms", True), "layer": ("layer", True), "bare rms": ("rms", False), "bare layer": ("layer", False)}
DTYPES = [torch.float32, torch.bfloat16]


def make(layout: str, kind: str, dtype: torch.dtype, device: str) -> tuple[Tensor, list[Tensor], NormSpec]:
    """x, the affine, and the norm."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    name, has_affine = KINDS[kind]
    affine = [draw(HIDDEN).requires_grad_() for _ in range((1 + (name == "layer")) * has_affine)]
    x = LAYOUTS[layout](draw(BATCH, 2 * TOKENS * HIDDEN)).requires_grad_()
    return x, affine, NormSpec("rms" if name == "rms" else "layer", 1e-5, cast="before" if name == "rms" else "after")


def ours(x: Tensor, affine: list[Tensor], spec: NormSpec, residual: Tensor | None = None) -> Tensor:
    weight, bias = [*affine, None, None][:2]
    if residual is not None:
        return ms_norm(x, weight, bias, spec, x.dtype, residual=residual)
    return ms_norm(x, weight, bias, spec, x.dtype)


def stock(x: Tensor, affine: list[Tensor], spec: NormSpec) -> Tensor:
    """nn.LayerNorm, and the RMS norm as transformers' modules write it."""
    if spec.kind == "layer":
        return nn.functional.layer_norm(x, (HIDDEN,), *affine, eps=spec.eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.eps)).to(x.dtype)
    return affine[0] * y if affine else y


def check_readers_share_one_tensor(layout: str, kind: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Beside x_hat live a number a row and the copy of the affine."""
    x, affine, spec = make(layout, kind, dtype, device)
    readers = [nn.Parameter(torch.ones(4, HIDDEN, dtype=dtype, device=device)) for _ in range(3)]

    def run() -> list[Tensor]:
        y = ours(x, affine, spec)
        return [linear(y, weight, None) for weight in readers]

    rows = BATCH * TOKENS
    assert live_bytes(run) == (rows + len(affine)) * HIDDEN * dtype.itemsize + 4 * rows


def check_as_stock(
    layout: str, kind: str, dtype: torch.dtype, device: str = "cpu", *, summed: bool, allowed: float
) -> None:
    """Strides are stock's; values and gradients differ by `allowed` at most from those of a contiguous copy's norm."""
    x, affine, spec = make(layout, kind, dtype, device)
    residual = torch.ones_like(x, memory_format=torch.contiguous_format).requires_grad_() if summed else None
    weight = nn.Parameter(torch.linspace(-1, 1, 4 * HIDDEN, device=device).to(dtype).view(4, HIDDEN))
    dy = torch.linspace(-1, 1, BATCH * TOKENS * 4, device=device).to(dtype).view(BATCH, TOKENS, 4)

    def run(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        y = ours(x, affine, spec, residual)
        inputs = [x, *affine, weight, *([] if residual is None else [residual])]
        return y, [y, *torch.autograd.grad(linear(y, weight, None), inputs, dy)]

    y, found = run(x)
    assert y.stride() == stock(x if residual is None else x + residual, affine, spec).stride()
    for one, other in zip(found, run(x.detach().contiguous().requires_grad_())[1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=allowed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_readers_of_a_norm_save_its_one_tensor_in_every_layout(layout, kind, dtype):
    check_readers_share_one_tensor(layout, kind, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("summed", [False, True], ids=["", "of a sum"])
def test_values_gradients_and_strides_are_stocks_in_every_layout(layout, kind, summed):
    # The reference sums in the order of the memory: two sums of 16 terms below 10 are 2 * 16 * 16 * eps * 10 apart.
    check_as_stock(layout, kind, torch.float64, summed=summed, allowed=5120 * torch.finfo(torch.float64).eps)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_that_is_read_in_part_lets_its_rows_go_with_its_own_backward(layout, kind):
    """A reader whose backward never runs must not keep what another one recomputed."""
    x, affine, spec = make(layout, kind, torch.float32, "cpu")
    read, unread = (nn.Parameter(torch.ones(4, HIDDEN)) for _ in range(2))
    y = ours(x, affine, spec)
    first, second = linear(y, read, None), linear(y, unread, None)
    torch.autograd.grad(first.sum(), [x, read])
    recomputed = second.grad_fn.spec[1] if hasattr(second.grad_fn, "spec") else None
    assert recomputed is None or recomputed.as_produced() is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_a_norm_returns_counts_as_changed_in_place(layout, kind, dtype):
    x, affine, spec = make(layout, kind, dtype, "cpu")
    weight, bias = [*affine, None, None][:2]
    with torch.no_grad():
        y, x_hat, _ = norm_ops.forward(x, weight, bias, spec.in_dtype(dtype))
    assert x_hat._version == 0
    assert y is None or y._version == 0
