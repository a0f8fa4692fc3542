"""Finds out whether a module computes x W^T + b with its own weight and bias, by running its forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memopt.environment.partitioned import shape_of
from memopt.walk.probes.isolate import is_differentiated, with_stand_ins

_WIDTH = 5


def is_linear(module: nn.Module, *, transposed: bool = False) -> bool:
    """Whether `module` holds a weight and perhaps a bias, and its forward is x W^T + b (transposed: x W + b), also
    under autocast, where it casts as `F.linear` does."""
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
    with torch.no_grad():  # a proof may run in a forward that is checkpointed
        matrix = stand_ins["weight"].t() if transposed else stand_ins["weight"]
        expected = nn.functional.linear(x, matrix, stand_ins.get("bias"))
    if not (isinstance(y, Tensor) and y.shape == expected.shape):
        return False
    return torch.allclose(y, expected, rtol=1e-12, atol=1e-12) and _casts_as_linear(module, stand_ins)


def _casts_as_linear(module: nn.Module, stand_ins: Mapping[str, nn.Parameter]) -> bool:
    """Whether autocast casts the input of `module` as it casts the input of `F.linear`. A forward may switch autocast
    off."""
    parameters = {name: nn.Parameter(each.float(), requires_grad=False) for name, each in stand_ins.items()}
    alone, before = with_stand_ins(module, parameters=parameters), torch.is_autocast_enabled("cuda")
    try:
        torch.set_autocast_enabled("cuda", True)  # code may leave it by this name, whatever the device
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), _Outside() as outside:
            y = alone.forward(torch.ones(2, 3, _WIDTH, dtype=torch.float32))
        return isinstance(y, Tensor) and y.dtype is torch.bfloat16 and not outside.ran
    except Exception:  # a forward may raise anything
        return False
    finally:
        torch.set_autocast_enabled("cuda", before)


class _Outside(TorchFunctionMode):
    """Notes whether a function runs with autocast off."""

    ran = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran = self.ran or not (torch.is_autocast_enabled("cpu") and torch.is_autocast_enabled("cuda"))
        return func(*args, **(kwargs or {}))
