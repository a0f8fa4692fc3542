"""Finds out whether a module is an elementwise nonlinearity, and which one, by running a copy of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from memopt.recompute.pure import RandomDraws
from memopt.torch_compat import TorchDispatchMode, operator_name
from memopt.torch_compat.activations import ACTIVATIONS
from memopt.walk.aten.precision import Float64Mode
from memopt.walk.probes.isolate import Isolated, Traces, isolate, random_linear, run_on, signature, with_stand_ins
from memopt.walk.sites import ActivationSite

_AGREES = 1e-7
_MAX_CHANNELS = 1 << 14

#: Ops whose output is a view, a copy or a cast of their input: not counted as operations.
_VIEWS_AND_CASTS = {
    "_to_copy", "_unsafe_view", "alias", "clone", "detach", "expand", "lift_fresh", "permute", "reshape", "select",
    "slice", "squeeze", "t", "transpose", "unsqueeze", "view",
}  # fmt: skip


def probe_activation(module: nn.Module, cache: dict[Any, Any] | None = None) -> ActivationSite | None:
    """The nonlinearity that `module` computes, as a site without a name; None when it is not elementwise or has large
    parameters. A module with one child, a linear, counts if its output is an elementwise function of the linear's
    output and takes more than one operation: a single operation saves the linear's output in any case."""
    linear = _only_linear(module)
    if linear is None and (next(module.children(), None) is not None or _channels(module) is None):
        return None
    cache = {} if cache is None else cache
    key = ("activation", linear, signature(module))
    if key not in cache:
        cache[key] = _probe(module) if linear is None else _probe_behind(module, linear)
    result: ActivationSite | None = cache[key]
    return result


def _channels(module: nn.Module) -> int | None:
    """1 for a module with scalar parameters or none, C where they have the shape (C,) or (1, C, 1, ...); else None."""
    shapes = {tuple(parameter.shape) for parameter in module.parameters() if parameter.numel() > 1}
    if not shapes:
        return 1
    shape = next(iter(shapes))
    channels = shape[0] if len(shape) == 1 else shape[1]
    a_number_a_channel = shape in ((channels,), (1, channels, *[1] * max(1, len(shape) - 2)))
    return channels if len(shapes) == 1 and a_number_a_channel and channels <= _MAX_CHANNELS else None


def _only_linear(module: nn.Module) -> str | None:
    """Name of the only child of a module without parameters of its own, if that is a linear."""
    children = dict(module.named_children())
    own = [tensor for group in (module._parameters, module._buffers) for tensor in group.values() if tensor is not None]
    if len(children) != 1 or own:
        return None
    ((name, child),) = children.items()
    weight = None if isinstance(child, nn.Embedding) else getattr(child, "weight", None)
    return name if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _probe_behind(module: nn.Module, linear: str) -> ActivationSite | None:
    """The function of its linear's output that `module` computes, if that is all it computes."""
    probe = _probe(with_stand_ins(module, {linear: nn.Identity()}))
    if probe is None or probe.operations == 1 or not probe.replays:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)
    stand_in = random_linear(6, 5, generator)
    with torch.no_grad():
        z = stand_in(x)
    for training in (False, True):
        expected = run_on(module, {linear: nn.Identity()}, lambda alone: alone(z), training=training)
        actual = run_on(module, {linear: stand_in}, lambda alone: alone(x), training=training)
        if expected is None or actual is None or not torch.equal(expected, actual):
            return None
    return replace(probe, linear=linear)


def _probe(module: nn.Module) -> ActivationSite | None:
    try:
        return _probe_alone(module)
    except Exception:  # a random transform may refuse its input in one call and not in another
        return None


def _probe_alone(module: nn.Module) -> ActivationSite | None:
    copy = isolate(module)
    if copy is None:
        return None
    channels = _channels(module) or 1
    x = torch.linspace(-12, 12, 240, dtype=torch.float64).reshape(2, 3, 40)
    if channels > 1:
        x = torch.linspace(-12, 12, 2 * 40 * channels, dtype=torch.float64).reshape(channels, 2, 40).transpose(0, 1)
    if copy.tries(x) != x.shape:
        return None
    y = copy.run(x)
    if not y.is_floating_point() or not y.isfinite().all() or not _is_elementwise(copy, x, y, by_channel=channels > 1):
        return None
    # Parameters and buffers on meta have other values in the model than in the copy.
    has_parameters = next(module.parameters(), None) is not None
    alike = slice(None) if channels == 1 else 0
    affine = _is_affine(x[:, alike].flatten(), y[:, alike].flatten())
    if affine and (channels > 1 or not has_parameters):
        return None  # identity, a scale, an inactive dropout
    fixed = not has_parameters and not any(buffer.is_meta for buffer in module.buffers())
    known = (k for k, row in ACTIVATIONS.items() if fixed and float((row.value(x) - y).abs().max()) < _AGREES)
    # A trained scale and shift save their input only.
    operations = 1 if affine else _count_operations(copy, x)
    kind, repeats = next(known, "other"), replays(copy, x)
    in_place = vars(copy.module).get("inplace") is True
    if in_place:
        vars(copy.module)["inplace"] = False
    return ActivationSite("", kind, True, operations, repeats, in_place and replays(copy, x), has_parameters)


def _is_elementwise(copy: Isolated, x: Tensor, y: Tensor, *, by_channel: bool) -> bool:
    """Whether a permutation of the input's elements (within each channel) permutes the output in the same way."""
    generator = torch.Generator().manual_seed(1)
    channels = x.shape[1] if by_channel else 1
    order = torch.rand(channels, x.numel() // channels, generator=generator).argsort(1)

    def moved(tensor: Tensor) -> Tensor:
        if not by_channel:
            return tensor.flatten()[order[0]].reshape(tensor.shape)
        rows = tensor.transpose(0, 1)
        return rows.flatten(1).gather(1, order).reshape(rows.shape).transpose(0, 1)

    return torch.allclose(copy.run(moved(x)), moved(y), atol=1e-12)


def replays(copy: Isolated, *inputs: Tensor) -> bool:
    """Whether a recompute in backward, with gradients, gives the output of the forward, without. Leaves `copy` in train
    mode."""
    y, outputs = copy.run(*inputs), []
    traces = Traces(copy.module.train())
    with torch.random.fork_rng(devices=[]), Float64Mode(), RandomDraws() as random:
        given = [tensor.clone() for tensor in inputs]
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                outputs.append(copy.module.forward(*given))
    unchanged = all(torch.equal(one, other) for one, other in zip(given, inputs, strict=True))
    return unchanged and all(torch.equal(output, y) for output in outputs) and not (random.found or traces.found)


def _is_affine(x: Tensor, y: Tensor) -> bool:
    slope = ((x - x.mean()) * (y - y.mean())).mean() / x.var(unbiased=False)
    return bool((y - y.mean() - slope * (x - x.mean())).abs().max() < 1e-9)


class _Recorded(TorchDispatchMode):
    """Records the aten overloads that run."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


def _count_operations(copy: Isolated, x: Tensor) -> int:
    module = copy.module.float()  # in fp64 a module may cast to fp32 and back, which would count
    try:
        with torch.no_grad(), _Recorded() as mode:
            module.forward(x.float())
    finally:
        module.double()
    return sum(operator_name(operation) not in _VIEWS_AND_CASTS for operation in mode.operations)
