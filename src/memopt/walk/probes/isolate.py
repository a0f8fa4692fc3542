"""Copies of one module to run: alone in fp64 with any parameter values, or with stand-ins for its children.

The live module is never run, moved or changed. The copy of a module on meta is allocated on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from memopt.torch_compat import module_hooks, no_forward_hooks
from memopt.walk.aten.precision import Float64Mode

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.Size)


class Isolated:
    """A copy of a module, run alone. `floats` are the module's float attributes, candidates for its eps."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.floats = tuple(v for v in vars(module).values() if isinstance(v, float) and 0 <= v < 0.1)

    def parameter(self, name: str) -> Tensor:
        parameter = self.module._parameters[name]
        assert parameter is not None
        return parameter

    def run(self, x: Tensor, values: dict[str, Tensor] | None = None, *more: Tensor, native: bool = False) -> Tensor:
        """Output of the forward on `x` with the given parameter values; fp64 throughout unless `native`."""
        for name, value in (values or {}).items():
            parameter = self.parameter(name)
            parameter.data = value.reshape(parameter.shape)
        inputs = [t.clone() for t in (x, *more)]  # a forward may write into its input
        with torch.no_grad():
            if native:
                y = self.module.forward(*inputs)
            else:
                with Float64Mode():
                    y = self.module.forward(*inputs)
        if not isinstance(y, Tensor):
            raise TypeError("the output is not one tensor")
        return y

    def tries(self, *inputs: Tensor) -> torch.Size | None:
        """Shape of the output; None if the forward does not run on `inputs`."""
        try:
            return self.run(inputs[0], None, *inputs[1:]).shape
        except Exception:  # a forward may raise anything
            return None


def isolate(module: nn.Module) -> Isolated | None:
    """A copy of `module` in eval mode with random parameters; None when it cannot be copied.

    Buffers keep their values; those on meta become ones (the twin, which has real buffers, is probed as well).
    """
    try:
        alone = copy.deepcopy(module)
        on_meta = any(t.is_meta for t in (*alone.parameters(), *alone.buffers()))
        alone = alone.to_empty(device="cpu") if on_meta else alone.to("cpu")
        generator = torch.Generator().manual_seed(0)
        for parameter in alone.parameters():
            parameter.requires_grad_(False)
            parameter.data = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) + 0.5
        if on_meta:
            for buffer in alone.buffers():
                buffer.fill_(1)
        alone = alone.to(torch.float64).eval()
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    for hooks in module_hooks(alone):
        hooks.clear()
    return Isolated(alone)


def with_stand_ins(
    module: nn.Module,
    children: Mapping[str, nn.Module] | None = None,
    parameters: Mapping[str, nn.Parameter] | None = None,
    *,
    training: bool = False,
) -> nn.Module:
    """A copy that runs the code of `module` on other children and parameters: same attributes, no hooks.

    The copy is shallow, so it is cheap at any size, and the module itself is not changed.
    """
    alone = copy.copy(module)
    alone.__dict__ = dict(vars(module)) | {
        "_modules": dict(module._modules) | dict(children or {}),
        "_parameters": dict(module._parameters) | dict(parameters or {}),
        **no_forward_hooks(),
        "training": training,
    }
    return alone


def signature(module: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for modules that compute the same function up to their parameter values."""
    attributes = tuple(
        (name, value if isinstance(value, _PLAIN) else _describe(value))
        for name, value in sorted(vars(module).items())
        if name not in {"_parameters", "_buffers", "_modules"} and not name.endswith("_hooks")
    )
    tensors = tuple(
        (name, t.shape, t.dtype)
        for group in (module._parameters, module._buffers)
        for name, t in group.items()
        if t is not None
    )
    return type(module), attributes, tensors


def _describe(value: Any) -> Any:
    if isinstance(value, (tuple, list)) and all(isinstance(item, _PLAIN) for item in value):
        return tuple(value)
    if isinstance(value, (dict, set, frozenset)) and not value:
        return type(value)
    return id(value)


class Marker(nn.Module):
    """Stand-in for a dropout: the output shows how often it was applied."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * x + 1


class Scrambler(nn.Module):
    """Stand-in for a norm: the output shows any change of the input, also of its scale, which a norm would hide."""

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.mix = random_linear(width, width, generator)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.mix(x))


@torch.no_grad()
def random_linear(width_in: int, width_out: int, generator: torch.Generator) -> nn.Linear:
    """A random linear in fp64."""
    random = nn.Linear(width_in, width_out, dtype=torch.float64, device="cpu")
    for parameter in random.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return random


def run_on(
    module: nn.Module,
    stand_ins: Mapping[str, nn.Module],
    call: Callable[[nn.Module], Any],
    *,
    training: bool,
    native: bool = False,
) -> Tensor | None:
    """Result of `call` on a copy of `module` with stand-ins for children; in fp64 throughout unless `native`.

    None where it raises, returns anything but one tensor, or changes an attribute of the module.
    """
    alone = with_stand_ins(module, stand_ins, training=training)
    before = dict(vars(alone))
    try:
        with torch.random.fork_rng(devices=[]), nullcontext() if native else Float64Mode():
            y = call(alone)
    except Exception:  # a forward may raise anything
        return None
    after = vars(alone)
    untouched = after.keys() == before.keys() and all(after[name] is value for name, value in before.items())
    return y if untouched and isinstance(y, Tensor) else None
