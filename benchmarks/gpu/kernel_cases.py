"""The operators that benchmarks/gpu/kernels.py times: their floors, and every provider's way to compute them.

`stock` is what transformers runs today: the formulas of its LlamaRMSNorm, of its MLPs and of its activation modules,
and PyTorch's own LayerNorm. Providers other than memopt get the very same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.kernels.activation.function import recomputed_activation
from memopt.kernels.derivative_codes.codes import derivative_code
from memopt.kernels.derivative_codes.function import coded_activation
from memopt.kernels.gated_mlp.function import gated_product, gated_product_fused
from memopt.kernels.norm.function import NormSpec, ms_norm

EPS = 1e-6
FORWARD, RECOMPUTE, BACKWARD, BACKWARD_RECOMPUTE = "forward", "recompute", "backward", "backward + recompute"

#: direction -> a call that launches one kernel and returns the tensors of `Op.truth`.
Launchers = dict[str, Callable[[], tuple[Tensor | None, ...]]]


@dataclass(frozen=True)
class Op:
    """An operator over (tokens, hidden)."""

    name: str
    passes: dict[str, int]
    """direction -> tensors of tokens x hidden that any implementation reads or writes, each once."""
    stock: Callable[..., Tensor]
    memopt: Callable[..., Tensor]
    launchers: Callable[[tuple[Tensor, ...], Tensor], Launchers]
    liger: Callable[..., Tensor] | None = None
    widths: tuple[int, ...] = (1,)
    """Columns of the inputs that have a row for every token, in units of hidden."""
    vectors: int = 0
    """Inputs of shape (hidden,) after those: weight, bias."""
    row_scalars: int = 0
    """fp32 numbers a row that forward writes and backward reads."""
    rowwise: bool = field(default=False)
    """Rows are reduced, so the hidden size decides how the kernel runs."""
    bits: int = 0
    """Of a code for each element, which forward writes and backward reads."""
    definition: Callable[..., Tensor] | None = None
    """What memopt's way computes, where its gradient is another than the stock one."""

    def floor(self, direction: str, tokens: int, hidden: int, itemsize: int) -> int:
        """The fewest bytes through device memory."""
        backward = direction in (BACKWARD, BACKWARD_RECOMPUTE)
        # Backward reads the weight and writes a gradient for each vector.
        vectors = self.vectors + min(self.vectors, 1) * backward
        scalars = 0 if direction == RECOMPUTE else self.row_scalars
        codes = tokens * hidden * self.bits // 8
        return (self.passes[direction] * tokens + vectors) * hidden * itemsize + 4 * scalars * tokens + codes

    def inputs(self, tokens: int, hidden: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        """Random inputs that require gradients. Zeros would flatter: they are faster and hide faults."""
        generator = torch.Generator(device).manual_seed(0)
        shapes = [(tokens, width * hidden) for width in self.widths] + [(hidden,)] * self.vectors
        return tuple(
            torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_() for shape in shapes
        )

    def truth(
        self, inputs: tuple[Tensor, ...], dy: Tensor, rows: int, ours: bool = True
    ) -> dict[str, tuple[Tensor, ...]]:
        """fp64 values of the first `rows` rows, for each direction: of memopt's way, or of the stock one."""
        first = [tensor.detach()[:rows] if tensor.dim() == 2 else tensor.detach() for tensor in inputs]
        leaves = [tensor.double().requires_grad_() for tensor in first]
        y = (self.definition if ours and self.definition is not None else self.stock)(*leaves)
        gradients = torch.autograd.grad(y, leaves[: len(self.widths)], dy[:rows].double())
        out = (y.detach(),)
        return {FORWARD: out, RECOMPUTE: out, BACKWARD: gradients, BACKWARD_RECOMPUTE: (*gradients, *out)}


# --- norms ---------------------------------------------------------------------------------------------------------


def _rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """As transformers' LlamaRMSNorm writes it."""
    hidden = x.to(torch.promote_types(x.dtype, torch.float32))
    variance = hidden.pow(2).mean(-1, keepdim=True)
    x_hat = (hidden * torch.rsqrt(variance + EPS)).to(x.dtype)
    return x_hat if weight is None else weight * x_hat


def _layer(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _liger_rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    from liger_kernel.ops import LigerRMSNormFunction

    y: Tensor = LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", True, None)
    return y


def _liger_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    from liger_kernel.ops import LigerLayerNormFunction

    y: Tensor = LigerLayerNormFunction.apply(x, weight, bias, EPS)
    return y


def _norm(name: str, spec: NormSpec, *, affine: bool) -> Op:
    vectors = {"rms": 1, "layer": 2}[spec.kind] if affine else 0

    def memopt(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return ms_norm(x, weight, bias, spec, x.dtype)

    def launchers(inputs: tuple[Tensor, ...], dy: Tensor) -> Launchers:
        from memopt.kernels.norm import forward_triton as kernels

        x = inputs[0].detach()
        weight, bias = (*(tensor.detach() for tensor in inputs[1:]), None, None)[:2]
        dtype = x.dtype
        _, x_hat, rstd = kernels.launch_forward(x, weight, bias, spec.in_dtype(dtype))
        needs = (True, weight is not None, bias is not None)

        def forward() -> tuple[Tensor, ...]:
            y, x_hat, _ = kernels.launch_forward(x, weight, bias, spec.in_dtype(dtype))
            return (x_hat if y is None else y,)

        calls: Launchers = {
            FORWARD: forward,
            BACKWARD: lambda: kernels.launch_backward(dy, x_hat, rstd, weight, spec.in_dtype(dtype), needs)[:1],
        }
        if affine:
            calls[RECOMPUTE] = lambda: (kernels.launch_affine(x_hat, weight, bias, spec.in_dtype(dtype)),)
        return calls

    rms = spec.kind == "rms"
    passes = {FORWARD: 3, RECOMPUTE: 2, BACKWARD: 3} if affine else {FORWARD: 2, BACKWARD: 3}
    liger = _liger_rms if rms else (_liger_layer if affine else None)
    return Op(
        name, passes, _rms if rms else _layer, memopt, launchers, liger, (1,), vectors, row_scalars=1, rowwise=True
    )


# --- elementwise operators -----------------------------------------------------------------------------------------

#: As transformers' activation modules write them.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "relu2": lambda z: torch.square(F.relu(z)),
}


def _gelu_new(z: Tensor) -> Tensor:
    """GPT-2's activation: the tanh GELU in eight steps, of which autograd keeps five tensors."""
    return 0.5 * z * (1.0 + torch.tanh(0.7978845608028654 * (z + 0.044715 * torch.pow(z, 3.0))))


def _liger_gated(kind: str) -> Callable[[Tensor, Tensor], Tensor] | None:
    names = {"silu": "LigerSiLUMulFunction", "gelu_tanh": "LigerGELUMulFunction"}
    if kind not in names:
        return None

    def run(gate: Tensor, up: Tensor) -> Tensor:
        from liger_kernel import ops

        h: Tensor = getattr(ops, names[kind]).apply(gate, up)
        return h

    return run


def _gated(name: str, kind: str) -> Op:
    def launchers(inputs: tuple[Tensor, ...], dh: Tensor) -> Launchers:
        from memopt.kernels.gated_mlp import function_triton as kernels

        gate, up = (tensor.detach() for tensor in inputs)
        return {
            FORWARD: lambda: (kernels.launch_forward(gate, up, kind),),
            BACKWARD: lambda: kernels.launch_backward(dh, gate, up, kind, False, None)[:2],
            BACKWARD_RECOMPUTE: lambda: kernels.launch_backward(dh, gate, up, kind, True, None),
        }

    return Op(
        name,
        {FORWARD: 3, BACKWARD: 5, BACKWARD_RECOMPUTE: 6},
        lambda gate, up: _ACTIVATIONS[kind](gate) * up,
        lambda gate, up: gated_product(gate, up, kind),
        launchers,
        _liger_gated(kind),
        widths=(1, 1),
    )


def _gated_fused(name: str, kind: str) -> Op:
    """Gate and up are the halves of one projection's output, read in place."""
    liger_gated = _liger_gated(kind)

    def launchers(inputs: tuple[Tensor, ...], dh: Tensor) -> Launchers:
        from memopt.kernels.gated_mlp import function_triton as kernels

        gate_up = inputs[0].detach()
        gate, up = gate_up.chunk(2, -1)

        def backward(recompute: bool) -> tuple[Tensor | None, ...]:
            gradient = torch.empty_like(gate_up)
            first, second = gradient.chunk(2, -1)
            h = kernels.launch_backward(dh, gate, up, kind, recompute, (first, second))[2]
            return (gradient, h) if recompute else (gradient,)

        return {
            FORWARD: lambda: (kernels.launch_forward(gate, up, kind),),
            BACKWARD: lambda: backward(recompute=False),
            BACKWARD_RECOMPUTE: lambda: backward(recompute=True),
        }

    def stock(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return up * _ACTIVATIONS[kind](gate)

    def liger(gate_up: Tensor) -> Tensor:
        assert liger_gated is not None
        return liger_gated(*gate_up.chunk(2, -1))

    return Op(
        name,
        {FORWARD: 3, BACKWARD: 5, BACKWARD_RECOMPUTE: 6},
        stock,
        lambda gate_up: gated_product_fused(gate_up, kind, True),
        launchers,
        liger if liger_gated is not None else None,
        widths=(2,),
    )


def _activation(name: str, kind: str, stock: Callable[[Tensor], Tensor], liger: str | None = None) -> Op:
    def launchers(inputs: tuple[Tensor, ...], dh: Tensor) -> Launchers:
        from memopt.kernels.activation import function_triton as kernels

        z = inputs[0].detach()
        return {
            FORWARD: lambda: (kernels.launch_forward(z, kind),),
            BACKWARD: lambda: kernels.launch_backward(dh, z, kind)[:1],
            BACKWARD_RECOMPUTE: lambda: kernels.launch_backward(dh, z, kind, recompute=True),
        }

    def run_liger(z: Tensor) -> Tensor:
        from liger_kernel import ops

        h: Tensor = getattr(ops, str(liger)).apply(z)
        return h

    return Op(
        name,
        {FORWARD: 2, BACKWARD: 3, BACKWARD_RECOMPUTE: 4},
        stock,
        lambda z: recomputed_activation(z, stock, kind),
        launchers,
        run_liger if liger else None,
    )


def _coded(name: str, kind: str, scheme: str) -> Op:
    """An activation whose input is exchanged for a code when its block is done: that reads it once more."""
    code, stock = derivative_code(kind, scheme), _ACTIVATIONS[kind]

    def launchers(inputs: tuple[Tensor, ...], dh: Tensor) -> Launchers:
        from memopt.kernels.activation import function_triton as activation_triton
        from memopt.kernels.derivative_codes import codes_triton

        z = inputs[0].detach()
        packed = codes_triton.launch_encode(z, code)

        def forward() -> tuple[Tensor, ...]:
            h = activation_triton.launch_forward(z, kind)
            codes_triton.launch_encode(z, code)
            return (h,)

        return {FORWARD: forward, BACKWARD: lambda: (codes_triton.launch_apply(dh, packed, code),)}

    def coded(z: Tensor) -> Tensor:
        return coded_activation(z, stock, code)

    return Op(name, {FORWARD: 2, BACKWARD: 2}, stock, coded, launchers, bits=code.bits, definition=coded)


_RMS: Any = NormSpec("rms", EPS, cast="before")
_LAYER: Any = NormSpec("layer", EPS)

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        _norm("RMSNorm", _RMS, affine=True),
        _norm("RMSNorm, no affine", _RMS, affine=False),
        _norm("LayerNorm", _LAYER, affine=True),
        _norm("LayerNorm, no affine", _LAYER, affine=False),
        _gated("SwiGLU", "silu"),
        _gated_fused("SwiGLU, fused halves", "silu"),
        _gated("GEGLU, tanh", "gelu_tanh"),
        _gated("GEGLU, erf", "gelu_erf"),
        _gated("ReLU^2 GLU", "relu2"),
        _activation("gelu_new", "gelu_tanh", _gelu_new),
        _coded("GELU, 2-bit code", "gelu_erf", "2bit"),
        _coded("GELU, 4-bit code", "gelu_erf", "4bit"),
        _coded("SiLU, published code", "silu", "published"),
        _activation("quick_gelu", "quick_gelu", _ACTIVATIONS["quick_gelu"]),
        _activation("ReLU^2", "relu2", _ACTIVATIONS["relu2"], "LigerReLUSquaredFunction"),
    )
}
