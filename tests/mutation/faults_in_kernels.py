"""Faults of the kernels and their operators."""

from __future__ import annotations

from tests.mutation.fault import Fault

_NORMS = ("tests/kernels/norm/test_norm.py", "tests/kernels/norm/test_norm_ops.py")
_ACTIVATION = ("tests/kernels/activation/test_activation.py",)
_GATED = ("tests/kernels/gated_mlp/test_gated.py",)
_CODES = ("tests/kernels/derivative_codes/test_codes.py",)
_INT8 = ("tests/kernels/quantize/test_quantize.py",)
_SAMPLING = ("tests/kernels/sampled_linear/test_sampling.py", "-k", "not compiles")
_DROPOUT = ("tests/kernels/dropout/test_dropout.py",)

KERNELS: tuple[Fault, ...] = (
    # Norms.
    Fault(
        "norm forward: eps is left out",
        ".mean(-1, keepdim=True) + spec.eps_in(x.dtype))",
        ".mean(-1, keepdim=True))",
        _NORMS,
    ),
    Fault(
        "norm forward: a layer norm is not centred",
        "mean = wide.mean(-1, keepdim=True)",
        "mean = 0 * wide.mean(-1, keepdim=True)",
        _NORMS,
    ),
    Fault(
        "norm forward: the bias is lost",
        "y = y.add_(bias.to(y.dtype)) if is_own else y + bias.to(y.dtype)",
        "y = y + 0 * bias.to(y.dtype)",
        _NORMS,
    ),
    Fault(
        "norm backward: a saved input counts as x_hat",
        "    if of_input:\n",
        "    if of_input and x_hat.dim() > 3:\n",
        _NORMS,
    ),
    Fault(
        "norm forward: a part of a larger tensor is kept whole",
        "x.grad_fn is not None and x.untyped_storage().nbytes() == x.nbytes",
        "x.grad_fn is not None",
        _NORMS,
    ),
    Fault(
        "norm backward: the projection has the wrong sign",
        "(g * x_hat).mean(-1, keepdim=True), value=-1)",
        "(g * x_hat).mean(-1, keepdim=True), value=1)",
        _NORMS,
    ),
    Fault(
        "norm backward: the mean of a layer norm's gradient stays",
        "dx.sub_(g.mean(-1, keepdim=True))",
        "dx.sub_(0 * g.mean(-1, keepdim=True))",
        _NORMS,
    ),
    Fault("norm backward: dweight lacks x_hat", "(dy * x_hat).sum(rows) if rows", "dy.sum(rows) if rows", _NORMS),
    Fault(
        "norm backward: the offset of the weight is forgotten",
        "g = dy * (scale + 1 if spec.offset else scale)",
        "g = dy * scale",
        _NORMS,
    ),
    # Activations and products.
    Fault(
        "gelu: the gradient of the other approximation",
        "lambda dh, z: _aten.gelu_backward(dh, z), (0, 1)",
        'lambda dh, z: _aten.gelu_backward(dh, z, approximate="tanh"), (0, 1)',
        _ACTIVATION,
    ),
    Fault(
        "silu: the gradient of the sigmoid",
        "lambda dh, z: _aten.silu_backward(dh, z)",
        "lambda dh, z: _aten.sigmoid_backward(dh, torch.sigmoid(z))",
        _ACTIVATION,
    ),
    Fault(
        "quick_gelu: the gradient without its slope",
        "return dh * sigmoid + through_sigmoid * 1.702",
        "return dh * sigmoid + through_sigmoid",
        _ACTIVATION,
    ),
    Fault(
        "weighted rows: the bias is left out of the gradient of the weights",
        "ds += _dot(dz, (bias",
        "ds += 0 * _dot(dz, (bias",
        ("tests/kernels/linear/test_weighted.py", "-k", "pytorchs"),
    ),
    Fault(
        "gated product: the gradient of up is not activated",
        "(dh * activated).to(factor.dtype)",
        "(dh * z).to(factor.dtype)",
        _GATED,
    ),
    Fault(
        "gated product: gradients of the halves are exchanged",
        "halves = _halves(both, None, gate_first)",
        "halves = _halves(both, None, not gate_first)",
        _GATED,
    ),
    Fault(
        "softmax: the gradient of the cast to fp32 is lost",
        "    return dx.to(node.dtypes[0])\n",
        "    return dx.to(torch.bfloat16).to(node.dtypes[0])\n",
        ("tests/kernels/softmax",),
    ),
    # Codes and quantised tensors.
    Fault(
        "codes: the highest level is never chosen",
        "floor().clamp(0, len(code.levels) - 1)",
        "floor().clamp(0, len(code.levels) - 2)",
        _CODES,
    ),
    Fault("codes: rounding is always down", "codes = (place + 0.5).floor()", "codes = place.floor()", _CODES),
    Fault(
        "codes: NaN is not flagged", "flagged = z.isnan()", "flagged = torch.zeros_like(z, dtype=torch.bool)", _CODES
    ),
    Fault(
        "int8: the last level is not used",
        "step = (high - low) / torch.full_like(low, LEVELS)",
        "step = (high - low) / torch.full_like(low, LEVELS + 1)",
        _INT8,
    ),
    Fault(
        "int8: rounding up to the padding of the last group",
        "counted = inside & finite",
        "counted = finite",
        _INT8,
    ),
    # Sampling and dropout.
    Fault(
        "sampling: no row is certain",
        "certain = (tail / left).argmin()",
        "certain = (tail / left).argmin() * 0",
        _SAMPLING,
    ),
    Fault(
        "dropout: backward draws another mask",
        "return SeededDropoutFunction.apply(dy, ctx.mask), None",
        "return SeededDropoutFunction.apply(dy, Mask(ctx.mask.seed + 1, ctx.mask.p, ctx.mask.scale)), None",
        _DROPOUT,
    ),
    Fault(
        "dropout: what is kept is not scaled",
        "uniform(index, mask.seed) >= mask.threshold, mask.scale)",
        "uniform(index, mask.seed) >= mask.threshold, 1.0)",
        _DROPOUT,
    ),
    Fault(
        "counter: the high word of an index does not count",
        "_mix(low ^ first) + high * _GOLDEN + second",
        "_mix(low ^ first) + second",
        ("tests/kernels/base/test_counter.py", *_DROPOUT),
    ),
    # Kernels, in the interpreter.
    Fault(
        "Triton counter: the seed's high word does not count",
        "first = _mix(_sum(_mix(_sum(low, _GOLDEN)), high))",
        "first = _mix(_sum(_mix(_sum(low, _GOLDEN)), low))",
        ("tests/triton/test_dropout.py",),
    ),
    Fault(
        "a result that was copied into another layout counts as changed in place",
        "else target.copy_(result).data",
        "else target.copy_(result)",
        ("tests/kernels/norm/test_norm_layouts.py", "tests/triton/test_norm_layouts.py"),
    ),
    Fault(
        "the backward of a linear is computed under the autocast around it",
        "        if not any_autocast_enabled():\n            return backward(ctx, dy)",
        "        if True:\n            return backward(ctx, dy)",
        ("tests/kernels/linear/test_linear.py", "-k", "under_autocast"),
    ),
)
