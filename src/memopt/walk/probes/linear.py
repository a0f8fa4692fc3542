"""Finds out whether a module computes x W^T + b with its own weight and bias, by running its forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memopt.environment.partitioned import shape_of
from memopt.walk.probes.isolate import is_differentiated, with_stand_ins

_WIDTH = 5


def is_linear(module: nn.Module, *, transposed: bool = False) -> bool:
    """Whether `module` holds a weight and perhaps a bias, and its forward is x W^T + b (transposed: x W + b)."""
    parameters = dict(module.named_parameters(recurse=False))
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight is None or len(shape_of(weight)) != 2 or not weight.is_floating_point():
        return False
    has_more = len(parameters) > 1 + (bias is not None) or next(module.buffers(), None) is not None
    if has_more or next(module.children(), None) is not None:
        return False
    if type(module) is nn.Linear and "forward" not in vars(module):
        return not transposed  # the forward of this class is known
    size = shape_of(weight)[1 if transposed else 0]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64), requires_grad=False)

    stand_ins = {"weight": draw(_WIDTH, size) if transposed else draw(size, _WIDTH)}
    if bias is not None:
        stand_ins["bias"] = draw(size)
    x = torch.randn(2, 3, _WIDTH, generator=generator, dtype=torch.float64)
    alone = with_stand_ins(module, parameters=stand_ins)
    try:
        with torch.no_grad():
            y = alone.forward(x)
        if not is_differentiated(lambda: alone.forward(x.clone()), [x, *stand_ins.values()]):
            return False
    except Exception:  # a forward may raise anything: bitsandbytes asserts that it finds packed weights
        return False
    matrix = stand_ins["weight"].t() if transposed else stand_ins["weight"]
    expected = nn.functional.linear(x, matrix, stand_ins.get("bias"))
    return isinstance(y, Tensor) and y.shape == expected.shape and torch.allclose(y, expected, rtol=1e-12, atol=1e-12)
