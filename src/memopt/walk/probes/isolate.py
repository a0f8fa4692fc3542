"""Copies of one module to run: alone in fp64 with any parameter values, or with stand-ins for its children.

The live module is never run, moved or changed. The copy of a module on meta is allocated on the CPU.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from memopt.torch_compat import module_hooks, no_forward_hooks, without_foreign_hooks
from memopt.walk.aten.precision import Float64Mode

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.Size)
#: Tokens of the longest input that a probe runs, and its elements at most.
MOST_TOKENS, _MOST_ELEMENTS = 5000, 1 << 17
#: Of central differences in fp64: the cube root of its epsilon.
_STEP = 1e-5


class Isolated:
    """A copy of a module, run alone. `floats` are the module's float attributes, candidates for its eps."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.floats = tuple(v for v in vars(module).values() if isinstance(v, float) and 0 <= v < 0.1)
        self.has_scalars = any(p.numel() == 1 for p in module.parameters())

    def parameter(self, name: str) -> Tensor:
        parameter = self.module._parameters[name]
        assert parameter is not None
        return parameter

    def run(
        self, *inputs: Tensor, values: Mapping[str, Tensor] | None = None, native: bool = False, grad: bool = False
    ) -> Tensor:
        """Output of the forward on `inputs` with the given parameter values; fp64 throughout unless `native`."""
        for name, value in (values or {}).items():
            parameter = self.parameter(name)
            parameter.data = value.reshape(parameter.shape)
        given = [each.clone() for each in inputs]  # a forward may write into its input
        with torch.set_grad_enabled(grad), nullcontext() if native else Float64Mode():
            y = self.module.forward(*given)
        if not isinstance(y, Tensor):
            raise TypeError("the output is not one tensor")
        return y

    def is_by_rows(self, *inputs: Tensor) -> bool:
        """Whether a row of the last dimension gives the same output in a batch of other shape: no branch on lengths."""
        y, rows = self.run(*inputs).flatten(0, -2), [each.flatten(0, -2) for each in inputs]
        many = max(2, min(MOST_TOKENS, _MOST_ELEMENTS // y.shape[-1]))
        for shape in ((1, 1), (1, many), (many, 1)):
            places = torch.arange(math.prod(shape)) % len(y)
            given = [each[places].view(*shape, -1) for each in rows]
            if not torch.allclose(self.run(*given).flatten(0, 1), y[places], rtol=1e-9):
                return False
        return True

    def is_differentiated(self, x: Tensor) -> bool:
        """Whether the forward gives the same values in both modes, with their own gradients, and leaves no traces."""

        def call() -> Tensor:
            with Float64Mode():
                y: Tensor = self.module.forward(x.clone())
            return y

        values, leaves = self.run(x), [x, *self.module.parameters()]
        traces = Traces(self.module)
        try:
            modes = (self.module.train(mode) for mode in (True, False))
            same = all(torch.equal(self.run(x), values) and is_differentiated(call, leaves) for _ in modes)
            self.module.train()
            self.tries(2 * x)  # a largest value may have been seen already
            return same and not traces.found
        finally:
            self.module.eval().requires_grad_(False)

    def tries(self, *inputs: Tensor) -> torch.Size | None:
        """Shape of the output; None if the forward does not run on `inputs`, or if it reads a trained tensor that is no
        parameter of the module (a global one), which would get no gradient from a forward that runs again."""
        try:
            y = self.run(*inputs, grad=True)
        except Exception:  # a forward may raise anything
            return None
        return y.shape if not y.requires_grad or any(p.requires_grad for p in self.module.parameters()) else None


class Traces:
    """Changes that a forward has made on its module and the children: attributes, buffers, items of containers."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._before = module, _state(module)

    @property
    def found(self) -> bool:
        """Whether anything has changed since this object was made."""
        now = _state(self._module)
        return len(now) != len(self._before) or not all(map(_is_same, now, self._before))


def _state(module: nn.Module) -> list[Any]:
    found: list[Any] = []
    left = [value for each in module.modules() for name, value in vars(each).items() if name != "training"]
    while left:
        value = left.pop()
        found.append(value)
        if isinstance(value, Tensor):
            found += () if isinstance(value, nn.Parameter) else (value._version, _values(value))
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, (list, tuple, set, deque)):
            left += value
    return found


def _values(tensor: Tensor) -> bytes | None:
    """The values of a plain tensor: its version does not show what is written through ``.data`` or by a batch norm."""
    if type(tensor) is not Tensor or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    return tensor.detach().cpu().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)


def is_differentiated(call: Callable[[], Tensor | None], leaves: Sequence[Tensor]) -> bool:
    """Whether autograd's gradients of `call`, which gives one tensor in fp64, are the derivatives of its values. It
    reads `leaves`, which are fp64 as well and keep ``requires_grad``.

    They are not if a forward detaches a part, calls a function with another backward, has hooks on its tensors, or
    computes something else without gradients. Central differences along one direction of each leaf are compared."""
    for leaf in leaves:
        leaf.requires_grad_()
    with torch.enable_grad(), without_foreign_hooks():  # a proof may run in a forward that is checkpointed
        y = call()
        if y is None or not y.requires_grad:
            return False
        weights = torch.arange(1.0, y.numel() + 1, dtype=torch.float64).sin().view(y.shape)
        try:
            gradients = torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
        except RuntimeError:  # of a function that allows no gradient of single tensors
            return False
    with torch.no_grad():
        again = call()
        if again is None or not torch.allclose(again, y, rtol=1e-12, atol=1e-12):
            return False
        size = float((y * weights).abs().sum())
        for leaf, gradient in zip(leaves, gradients, strict=True):
            direction = torch.arange(1.0, leaf.numel() + 1, dtype=torch.float64).cos().view(leaf.shape)
            before, values = leaf.clone(), []
            for sign in (1, -1):
                leaf.copy_(before).add_(direction, alpha=sign * _STEP)
                moved = call()
                values.append(math.nan if moved is None else float((moved * weights).sum()))
            leaf.copy_(before)
            along = gradient * direction
            # The first term is for the third derivative, the second for the roundings of the two values.
            bound = 1e-5 * float(along.abs().sum()) + 1e-9 * size
            if not abs((values[0] - values[1]) / (2 * _STEP) - float(along.sum())) <= bound:
                return False
    return True


def isolate(module: nn.Module) -> Isolated | None:
    """A copy of `module` in eval mode with random parameters; None when it cannot be copied. Buffers keep their values;
    those on meta become ones (the twin, which has real buffers, is probed as well)."""
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
    for hooks in (table for each in alone.modules() for table in module_hooks(each)):
        hooks.clear()
    return Isolated(alone)


def with_stand_ins(
    module: nn.Module,
    children: Mapping[str, nn.Module] | None = None,
    parameters: Mapping[str, nn.Parameter] | None = None,
    *,
    training: bool = False,
) -> nn.Module:
    """A copy that runs the code of `module` on other children and parameters: same attributes, no hooks. The copy is
    shallow, so it is cheap at any size, and the module itself is not changed."""
    # A parametrised module refuses to be copied.
    alone = type(module).__new__(type(module)) if "parametrizations" in module._modules else copy.copy(module)
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
    """Result of `call` on a copy of `module` with stand-ins for children; in fp64 throughout unless `native`. None
    where it raises, returns anything but one tensor, or leaves :class:`Traces` on the module."""
    # Hooks of the other children are the user's, who follows calls of the live model by them.
    others = {name: with_stand_ins(child, training=training) for name, child in module._modules.items() if child}
    alone = with_stand_ins(module, others | dict(stand_ins), training=training)
    traces = Traces(alone)
    try:
        with torch.random.fork_rng(devices=[]), nullcontext() if native else Float64Mode():
            y = call(alone)
    except Exception:  # a forward may raise anything
        return None
    return y if isinstance(y, Tensor) and not traces.found else None


def keeps_intermediates(copy: Isolated, *inputs: Tensor) -> bool:
    """Whether autograd saves another tensor as large as the output, so that recomputing the module frees bytes.
    Measured with gradients for all inputs and parameters: with frozen parameters autograd may save less."""
    given = [tensor.float().requires_grad_() for tensor in inputs]
    own = {tensor.untyped_storage().data_ptr() for tensor in (*given, *copy.module.float().parameters())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor.numel()
        return tensor

    try:
        copy.module.requires_grad_()
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = copy.module.forward(*given)
        kept.pop(y.untyped_storage().data_ptr(), None)  # its readers may save it, too
        return bool(max(kept.values(), default=0) >= y.numel())
    finally:
        copy.module.requires_grad_(False).double()
