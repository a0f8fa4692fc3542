"""Every kernel of the launch table as calls of its real launcher, on tensors of a chosen size, dtype and device.

One list for those that compile them (tests, table of resources, tuner) or time them on a GPU. Imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memopt.kernels.activation import function_triton as activation_triton
from memopt.kernels.gated_mlp import function_triton as gated_triton
from memopt.kernels.loss import function_triton as loss_triton
from memopt.kernels.loss.reference import RowFactors
from memopt.kernels.norm import forward_triton as norm_triton
from memopt.kernels.norm.function import NormSpec
from memopt.torch_compat.activations import ACTIVATIONS

Call = Callable[[], object]


@dataclass(frozen=True)
class CallShape:
    """The tensors of one call: (rows, hidden) each."""

    rows: int
    hidden: int
    dtype: torch.dtype
    device: str
    strided: bool = False
    """Whether rows have gaps between them, as in the halves of one tensor."""

    def tensor(self) -> Tensor:
        if not self.strided:
            return torch.randn(self.rows, self.hidden, dtype=self.dtype, device=self.device)
        return torch.randn(self.rows, 2 * self.hidden, dtype=self.dtype, device=self.device)[:, self.hidden :]

    def vector(self) -> Tensor:
        return torch.randn(self.hidden, dtype=self.dtype, device=self.device)

    def statistics(self) -> Tensor:
        return torch.rand(self.rows, 1, dtype=torch.float32, device=self.device)


@dataclass(frozen=True)
class Variant:
    """One way to call a launcher, with a binary of its own."""

    kernel: str
    """Its name in the launch table."""
    name: str
    prepare: Callable[[CallShape], Call]
    """Allocates the tensors; the result launches the kernel on them."""
    heaviest: bool = False
    """Whether it takes the most registers of its kernel; the tuner compiles it."""

    def __str__(self) -> str:
        return f"{self.kernel}, {self.name}"


_RMS, _LAYER = NormSpec("rms", 1e-6), NormSpec("layer", 1e-5)


def _norm_forward(
    spec: NormSpec, *, weight: bool, bias: bool, residual: bool = False, keeps_input: bool = False
) -> Callable[[CallShape], Call]:
    def prepare(shape: CallShape) -> Call:
        x, added = shape.tensor(), shape.tensor() if residual else None
        gamma, beta = shape.vector() if weight else None, shape.vector() if bias else None
        copies = x.new_empty((weight + bias) * x.size(-1)) if weight or bias else None
        arguments = replace(spec.in_dtype(x.dtype), keeps_input=keeps_input)
        return lambda: norm_triton.launch_forward(x, gamma, beta, arguments, added, copies)

    return prepare


def _norm_affine(spec: NormSpec, *, bias: bool) -> Callable[[CallShape], Call]:
    def prepare(shape: CallShape) -> Call:
        x_hat, gamma, beta = shape.tensor(), shape.vector(), shape.vector() if bias else None
        return lambda: norm_triton.launch_affine(x_hat, gamma, beta, spec.in_dtype(x_hat.dtype))

    return prepare


def _norm_backward(
    spec: NormSpec, *, weight: bool, needs: tuple[bool, bool, bool], keeps_input: bool = False
) -> Callable[[CallShape], Call]:
    def prepare(shape: CallShape) -> Call:
        dy, x_hat, rstd = shape.tensor(), shape.tensor(), shape.statistics()
        gamma = shape.vector() if weight else None
        arguments = replace(spec.in_dtype(x_hat.dtype), keeps_input=keeps_input)
        return lambda: norm_triton.launch_backward(dy, x_hat, rstd, gamma, arguments, needs, x_hat.dtype)

    return prepare


def _activation_forward(kind: str) -> Callable[[CallShape], Call]:
    def prepare(shape: CallShape) -> Call:
        z = shape.tensor()
        return lambda: activation_triton.launch_forward(z, kind)

    return prepare


def _activation_backward(kind: str, *, recompute: bool) -> Callable[[CallShape], Call]:
    def prepare(shape: CallShape) -> Call:
        dh, z = shape.tensor(), shape.tensor()
        return lambda: activation_triton.launch_backward(dh, z, kind, recompute)

    return prepare


def _gated_forward(kind: str) -> Callable[[CallShape], Call]:
    def prepare(shape: CallShape) -> Call:
        gate, up = shape.tensor(), shape.tensor()
        return lambda: gated_triton.launch_forward(gate, up, kind)

    return prepare


def _gated_backward(kind: str, *, recompute: bool) -> Callable[[CallShape], Call]:
    def prepare(shape: CallShape) -> Call:
        dh, gate, up = shape.tensor(), shape.tensor(), shape.tensor()
        return lambda: gated_triton.launch_backward(dh, gate, up, kind, recompute, None)

    return prepare


def _loss_forward(*, full: bool, gradient: bool = False) -> Callable[[CallShape], Call]:
    def prepare(shape: CallShape) -> Call:
        logits, weight = shape.tensor(), shape.vector().float() if full else None
        statistics = torch.zeros(shape.rows, 4, device=shape.device)
        target = torch.zeros(shape.rows, dtype=torch.int64, device=shape.device)
        numbers = shape.statistics()[:, 0]
        factors, out = RowFactors(numbers, numbers if full else None, numbers[0]), torch.empty_like(logits)
        written = (factors, out) if gradient else ()
        return lambda: loss_triton.launch_statistics(logits, statistics, weight, full, target, *written)

    return prepare


def _loss_backward(*, full: bool) -> Callable[[CallShape], Call]:
    def prepare(shape: CallShape) -> Call:
        logits, target = shape.tensor(), torch.zeros(shape.rows, dtype=torch.int64, device=shape.device)
        numbers, lse = shape.statistics()[:, 0], torch.cat((shape.statistics(),) * 2, 1)
        weight, out = shape.vector().float() if full else None, torch.empty_like(logits)
        factors = RowFactors(numbers, numbers if full else None, numbers[0])
        return lambda: loss_triton.launch_gradient(logits, target, lse, factors, weight, out)

    return prepare


VARIANTS: tuple[Variant, ...] = (
    Variant("norm_forward", "rms", _norm_forward(_RMS, weight=False, bias=False)),
    Variant("norm_forward", "rms, weight", _norm_forward(_RMS, weight=True, bias=False)),
    Variant("norm_forward", "rms, weight, input", _norm_forward(_RMS, weight=True, bias=False, keeps_input=True)),
    Variant("norm_forward", "layer", _norm_forward(_LAYER, weight=False, bias=False)),
    Variant("norm_forward", "layer, weight, bias", _norm_forward(_LAYER, weight=True, bias=True), heaviest=True),
    Variant(
        "norm_forward", "layer, weight, bias, residual", _norm_forward(_LAYER, weight=True, bias=True, residual=True)
    ),
    Variant("norm_affine", "rms, weight", _norm_affine(_RMS, bias=False)),
    Variant("norm_affine", "layer, weight, bias", _norm_affine(_LAYER, bias=True), heaviest=True),
    Variant("norm_backward", "rms", _norm_backward(_RMS, weight=False, needs=(True, False, False))),
    Variant("norm_backward", "rms, weight", _norm_backward(_RMS, weight=True, needs=(True, True, False))),
    Variant(
        "norm_backward",
        "rms, weight, input",
        _norm_backward(_RMS, weight=True, needs=(True, True, False), keeps_input=True),
    ),
    Variant("norm_backward", "layer", _norm_backward(_LAYER, weight=False, needs=(True, False, False))),
    Variant(
        "norm_backward",
        "layer, weight, bias",
        _norm_backward(_LAYER, weight=True, needs=(True, True, True)),
        heaviest=True,
    ),
    *(Variant("activation_forward", kind, _activation_forward(kind), heaviest=kind == "mish") for kind in ACTIVATIONS),
    *(Variant("activation_backward", kind, _activation_backward(kind, recompute=False)) for kind in ACTIVATIONS),
    *(
        Variant("activation_backward", f"{kind}, recompute", _activation_backward(kind, recompute=True), kind == "mish")
        for kind in ACTIVATIONS
    ),
    *(Variant("gated_forward", kind, _gated_forward(kind), heaviest=kind == "mish") for kind in ACTIVATIONS),
    *(Variant("gated_backward", kind, _gated_backward(kind, recompute=False)) for kind in ACTIVATIONS),
    *(
        Variant("gated_backward", f"{kind}, recompute", _gated_backward(kind, recompute=True), heaviest=kind == "mish")
        for kind in ACTIVATIONS
    ),
    Variant("loss_forward", "plain", _loss_forward(full=False)),
    Variant("loss_forward", "weights, smoothing", _loss_forward(full=True), heaviest=True),
    Variant("loss_forward", "gradient", _loss_forward(full=False, gradient=True)),
    Variant("loss_forward", "gradient, weights, smoothing", _loss_forward(full=True, gradient=True), heaviest=True),
    Variant("loss_backward", "plain", _loss_backward(full=False)),
    Variant("loss_backward", "weights, smoothing", _loss_backward(full=True), heaviest=True),
)
