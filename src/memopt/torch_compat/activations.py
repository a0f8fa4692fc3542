"""The known activations, one row each, and the PyTorch operations that compute them.

A kind is one function with the constants written here; a module with other constants (another slope, another alpha)
is not of that kind. The rows are the reference of the Triton kernels and of the probes of a model's activations. To add
a kind, add its row here and its value and slope to `memopt.kernels.activation.scalar_triton`.

Each gradient runs the operations that autograd runs for the value: its cost and rounding are those of autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten

Elementwise = Callable[[Tensor], Tensor]

OTHER = "other"
"""The kind of an activation that has no row."""


@dataclass(frozen=True)
class Operation:
    """An activation that PyTorch computes in one operation, whatever its constants."""

    name: str
    """Name of the aten operation, as a dispatch mode gets it."""
    node: str
    """Name of its autograd node."""
    saves: Literal["input", "output"]
    """The tensor that the node saves for backward."""
    functions: tuple[str, ...]
    """Names of the Python functions that run it, as a function mode gets them."""
    kind: str | None = None
    """Kind of a call of it, whatever its constants; None if a call does not count as an activation."""
    recompute: Callable[..., Tensor] | None = None
    """Computes the output from the saved input and `constants`; None if the node saves its output, or if not needed."""
    constants: tuple[str, ...] = ()
    """Constants that the node saves beside its input, in the order of the arguments of `recompute`."""
    only_of_linears: bool = False
    """Whether it has other uses (gates): a call counts as an activation only if it reads a linear's output."""


@dataclass(frozen=True)
class Activation:
    """One known activation f."""

    kind: str
    """Its name, also in the Triton kernels."""
    value: Elementwise
    """z -> f(z), shaped like z."""
    gradient: Callable[[Tensor, Tensor], Tensor]
    """(dh, z) -> dh * f'(z), shaped like z."""
    slopes: tuple[float, float] | None
    """Limits of f' at minus and plus infinity; None if f' has no limits."""
    continuous: bool
    """Whether f' is continuous."""
    operation: Operation | None
    """The operation that computes it; None if it takes several."""


def _quick_gelu_gradient(dh: Tensor, z: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(1.702 * z)
    through_sigmoid: Tensor = _aten.sigmoid_backward(dh * z, sigmoid)
    return dh * sigmoid + through_sigmoid * 1.702


def _gelu(z: Tensor, approximate: str) -> Tensor:
    return F.gelu(z, approximate=approximate)


_GELU = Operation("gelu", "GeluBackward0", "input", ("gelu",), "gelu_erf", _gelu, ("approximate",))
_SILU = Operation("silu", "SiluBackward0", "input", ("silu",), "silu", lambda z: F.silu(z))
_RELU = Operation("relu", "ReluBackward0", "output", ("relu",), "relu")
_LEAKY_RELU = Operation(
    "leaky_relu", "LeakyReluBackward0", "input", ("leaky_relu",), "leaky_relu", F.leaky_relu, ("negative_slope",)
)
_HARDTANH = Operation(
    "hardtanh", "HardtanhBackward0", "input", ("hardtanh", "relu6"), OTHER, F.hardtanh, ("min_val", "max_val")
)
_ELU = Operation("elu", "EluBackward0", "input", ("elu", "selu"), "elu", _aten.elu, ("alpha", "scale", "input_scale"))
_HARDSWISH = Operation("hardswish", "HardswishBackward0", "input", ("hardswish",), "hardswish", F.hardswish)
_MISH = Operation("mish", "MishBackward0", "input", ("mish",), "mish", F.mish)
_TANH = Operation("tanh", "TanhBackward0", "output", ("tanh",), "tanh", only_of_linears=True)
_SIGMOID = Operation("sigmoid", "SigmoidBackward0", "output", ("sigmoid",), "sigmoid", only_of_linears=True)
_HARDSIGMOID = Operation(
    "hardsigmoid", "HardsigmoidBackward0", "input", ("hardsigmoid",), "hardsigmoid", F.hardsigmoid, only_of_linears=True
)
_SOFTPLUS = Operation(
    "softplus", "SoftplusBackward0", "input", ("softplus",), "softplus", F.softplus, ("beta", "threshold"), True
)  # fmt: skip

_ROWS = (
    Activation("gelu_erf", F.gelu, lambda dh, z: _aten.gelu_backward(dh, z), (0, 1), True, _GELU),
    Activation(
        "gelu_tanh",
        lambda z: F.gelu(z, approximate="tanh"),
        lambda dh, z: _aten.gelu_backward(dh, z, approximate="tanh"),
        (0, 1),
        True,
        _GELU,
    ),
    Activation("quick_gelu", lambda z: z * torch.sigmoid(1.702 * z), _quick_gelu_gradient, (0, 1), True, None),
    Activation("silu", F.silu, lambda dh, z: _aten.silu_backward(dh, z), (0, 1), True, _SILU),
    Activation("relu", F.relu, lambda dh, z: _aten.threshold_backward(dh, z, 0), (0, 1), False, _RELU),
    Activation(
        "relu2",
        lambda z: F.relu(z).square(),
        lambda dh, z: _aten.threshold_backward(dh * (2 * F.relu(z)), z, 0),
        None,
        True,
        None,
    ),
    Activation("relu6", F.relu6, lambda dh, z: _aten.hardtanh_backward(dh, z, 0, 6), (0, 0), False, _HARDTANH),
    Activation(
        "leaky_relu",
        F.leaky_relu,
        lambda dh, z: _aten.leaky_relu_backward(dh, z, 0.01, False),
        (0.01, 1),
        False,
        _LEAKY_RELU,
    ),
    Activation("tanh", torch.tanh, lambda dh, z: _aten.tanh_backward(dh, torch.tanh(z)), (0, 0), True, _TANH),
    Activation(
        "sigmoid", torch.sigmoid, lambda dh, z: _aten.sigmoid_backward(dh, torch.sigmoid(z)), (0, 0), True, _SIGMOID
    ),
    Activation(
        "hardsigmoid", F.hardsigmoid, lambda dh, z: _aten.hardsigmoid_backward(dh, z), (0, 0), False, _HARDSIGMOID
    ),
    Activation("hardswish", F.hardswish, lambda dh, z: _aten.hardswish_backward(dh, z), (0, 1), False, _HARDSWISH),
    Activation("mish", F.mish, lambda dh, z: _aten.mish_backward(dh, z), (0, 1), True, _MISH),
    Activation("softplus", F.softplus, lambda dh, z: _aten.softplus_backward(dh, z, 1, 20), (0, 1), True, _SOFTPLUS),
    Activation("elu", F.elu, lambda dh, z: _aten.elu_backward(dh, 1, 1, 1, False, z), (0, 1), True, _ELU),
)

#: Kind -> activation. Probes compare in fp64: the two GELUs differ by 5e-4, rounded constants of one formula by 1e-9.
ACTIVATIONS: dict[str, Activation] = {row.kind: row for row in _ROWS}

#: Kinds whose f' is continuous: a rounding error of z changes it little.
SMOOTH = frozenset(row.kind for row in _ROWS if row.continuous)

#: Name -> operation: every operation above, and operations without an activation here.
OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        *(row.operation for row in _ROWS if row.operation is not None),
        Operation("celu", "CeluBackward0", "input", ("celu",), OTHER, F.celu, ("alpha",)),
        # PyTorch runs it as elu, unless a tensor subclass overrides selu.
        Operation("selu", "EluBackward0", "input", ("selu",), OTHER, _ELU.recompute, _ELU.constants),
        Operation("log_sigmoid_forward", "LogSigmoidBackward0", "input", ("logsigmoid",), None, F.logsigmoid),
        Operation("glu", "GluBackward0", "input", ("glu",), None, F.glu, ("dim",)),
        Operation("rrelu_with_noise", "RreluWithNoiseBackward0", "input", ()),
        Operation("_prelu_kernel", "PreluKernelBackward0", "input", ("prelu",)),
    )
}


def kind_of_call(name: str, keywords: Mapping[str, Any]) -> str | None:
    """The kind of a call of the aten operation `name`; None if it does not count as an activation."""
    operation = OPERATIONS.get(name)
    if operation is None:
        return None
    return "gelu_tanh" if operation is _GELU and keywords.get("approximate") == "tanh" else operation.kind


def saves_its_output(kind: str) -> bool:
    """Whether the operation that computes this kind saves its output; false for a kind of several operations."""
    row = ACTIVATIONS.get(kind)
    return row is not None and row.operation is not None and row.operation.saves == "output"
