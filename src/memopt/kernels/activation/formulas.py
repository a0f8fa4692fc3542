"""The known activations: value and gradient of each, in PyTorch.

They are the reference of the Triton kernels, and what a probe compares a model's own activation with. A kind stands for
one function with the constants written here; a module with other constants (another slope, another alpha) is not of
that kind.

Each gradient is the operation, or the sequence of operations, that autograd itself runs for the value beside it: it
costs what the stock backward costs and rounds where the stock backward rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten

#: Kind -> function of z. Compared in fp64; the two GELUs differ by 5e-4, rounded constants of one formula by 1e-9.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda z: F.relu(z).square(),
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "softplus": F.softplus,
}

#: Kind -> function of (dh, z): dh * f'(z), shaped like z.
GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu_erf": lambda dh, z: _aten.gelu_backward(dh, z),
    "gelu_tanh": lambda dh, z: _aten.gelu_backward(dh, z, approximate="tanh"),
    "quick_gelu": lambda dh, z: _quick_gelu_gradient(dh, z),
    "silu": lambda dh, z: _aten.silu_backward(dh, z),
    "relu": lambda dh, z: _aten.threshold_backward(dh, z, 0),
    "relu2": lambda dh, z: _aten.threshold_backward(dh * (2 * F.relu(z)), z, 0),
    "relu6": lambda dh, z: _aten.hardtanh_backward(dh, z, 0, 6),
    "leaky_relu": lambda dh, z: _aten.leaky_relu_backward(dh, z, 0.01, False),
    "elu": lambda dh, z: _aten.elu_backward(dh, 1, 1, 1, False, z),
    "tanh": lambda dh, z: _aten.tanh_backward(dh, torch.tanh(z)),
    "sigmoid": lambda dh, z: _aten.sigmoid_backward(dh, torch.sigmoid(z)),
    "hardsigmoid": lambda dh, z: _aten.hardsigmoid_backward(dh, z),
    "hardswish": lambda dh, z: _aten.hardswish_backward(dh, z),
    "mish": lambda dh, z: _aten.mish_backward(dh, z),
    "softplus": lambda dh, z: _aten.softplus_backward(dh, z, 1, 20),
}


def _quick_gelu_gradient(dh: Tensor, z: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(1.702 * z)
    through_sigmoid: Tensor = _aten.sigmoid_backward(dh * z, sigmoid)
    return dh * sigmoid + through_sigmoid * 1.702
