"""Finds out whether a module is a norm by running a copy of it on random data, not by its class or its name.

`memopt.walk.flow.shadow` observes the tensors that a module gets in its model.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memopt.environment.generators import seed_cpu
from memopt.torch_compat import BATCH_NORM_CLASSES
from memopt.walk.probes.elementwise import replays
from memopt.walk.probes.isolate import Isolated, isolate, keeps_intermediates, signature
from memopt.walk.sites import BATCH_STATISTICS, CastOrder, NormKind, NormSite

#: Relative difference in fp64 up to which a module computes a formula.
_AGREES = 1e-9
#: Size of an input so small that only eps is left under the root.
_TINY = 1e-18
#: Size of an input beyond which a norm's limits on its values are looked for no more.
_LARGE = 1e4
#: Size of an input for which the output shows, in every dtype, which dtype's machine epsilon a norm adds.
_SMALL = 1e-4
#: Width tried for a norm that has neither parameters nor an attribute with its width.
_ANY_WIDTH = 24
#: Most channels tried for a norm without parameters.
_MOST_CHANNELS = 1 << 12
_MAX_PER_HEAD = 1 << 16
_SCALES_ONLY = "it scales and shifts its input and normalises nothing"
_MORE = "it has other gradients than its values, depends on lengths or the mode, or keeps something on itself"
#: Why a module with parameters of its own is no norm.
NO_AFFINE = "it is no norm: its own parameters are not a scale and shift of a normalised input"


#: (weight, bias, offset)
_Affine = tuple[str, str | None, Literal[0, 1]]
#: Of a norm whose affine is not the last thing that it computes.
_HIDDEN: _Affine = ("", None, 0)
_OFFSETS: tuple[Literal[0, 1], ...] = (0, 1)


@dataclass(frozen=True)
class NormProbe(NormSite):
    """A norm alone: without a name, with the names of its own attributes as weight and bias, and with the width 0 if it
    has no parameters and takes any width. In the kinds without a formula, x_hat is any other function of the module's
    one or two tensors."""

    with_gate: NormProbe | None = None
    """The probe of the module when it is called with an optional second tensor; None if it takes one tensor only."""


def probe_norm(module: nn.Module, cache: dict[Any, Any] | None = None) -> NormProbe | str | None:
    """The probe of `module` (on any device; it is copied, never run) if it is a norm, a reason if it only looks like a
    norm, None if it does not. `cache` has results by signature: the equal norms of a deep model are probed once."""
    slots = _affine_slots(module)
    if slots is None:
        return None
    cache = {} if cache is None else cache
    key = ("norm", signature(module))
    if key not in cache:
        cache[key] = _probe(module, slots)
    result: NormProbe | str | None = cache[key]
    return result


def _affine_slots(module: nn.Module) -> tuple[str, ...] | None:
    """Names of the vectors that may be weight and bias; None when `module` cannot be a norm."""
    if any(True for child in module.children() for _ in child.parameters()):
        return None
    # Scalars, one number for all channels, are part of the function that scale and shift follow.
    own = {name: p for name, p in module._parameters.items() if p is not None and p.numel() > 1}
    if not own:
        return () if next(module.children(), None) is None else None
    if len(own) > 2 or len({p.shape for p in own.values()}) != 1:
        return None
    first = next(iter(own.values()))
    is_one = sum(size > 1 for size in first.shape) == 1 or _is_per_head(first)
    return tuple(own) if is_one and all(p.is_floating_point() for p in own.values()) else None


def _without_affine(copy: Isolated, found: _Affine | None, x: Tensor) -> Tensor:
    """The output on `x` with a weight of 1 and no bias."""
    return copy.run(x, values=_identity(copy, found))


def _identity(copy: Isolated, found: _Affine | None) -> dict[str, Tensor]:
    """Values of the affine that leave the normalised input as it is."""
    if found is None:
        return {}
    weight, bias, offset = found
    ones = torch.ones(copy.parameter(weight).numel(), dtype=torch.float64)
    return {weight: ones * (1 - offset), **({bias: ones * 0} if bias else {})}


def _is_per_head(parameter: Tensor) -> bool:
    """Whether `parameter` may be a scale of every channel of every head; matrices of linears are larger."""
    return parameter.dim() == 2 and min(parameter.shape) > 1 and parameter.numel() <= _MAX_PER_HEAD


def _probe(module: nn.Module, slots: tuple[str, ...]) -> NormProbe | str | None:
    copy = isolate(module)
    if copy is None:
        return None if not slots else "it cannot be copied and run alone"
    with torch.random.fork_rng(devices=[]), contextlib.suppress(*_FAILURES):
        seed_cpu(0)
        if slots and _is_per_head(copy.parameter(slots[0])):
            return _probe_per_head(copy, slots)
        return _probe_plain(copy) if not slots else _probe_affine(copy, slots)
    return None


_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)


def _probe_plain(copy: Isolated) -> NormProbe | str | None:
    """A norm without a scale and shift of its channels."""
    for width in (*_declared_widths(copy.module), _ANY_WIDTH):
        with contextlib.suppress(*_FAILURES):
            fitted = _fit(copy, None, width)
            if fitted and not (copy.is_by_rows(_tokens(width)) and copy.is_differentiated(_tokens(width))):
                return _MORE
            if fitted:
                accepts_any = width == _ANY_WIDTH and width not in _declared_widths(copy.module)
                return NormProbe("", fitted[0], 0 if accepts_any else width, fitted[1], None)
        with contextlib.suppress(*_FAILURES):
            for x in _channels(width) if width <= _MOST_CHANNELS else ():
                if copy.tries(x) == x.shape and _standardises(copy, x):
                    return _without_formula("channels", copy, 0, _HIDDEN, x)
        with contextlib.suppress(*_FAILURES):
            x = _tokens(width)
            if copy.tries(x) == x.shape and _normalises_rows(copy, x):
                return _without_formula("other", copy, 0, _HIDDEN, x)
    return None


def _declared_widths(module: nn.Module) -> list[int]:
    values: list[Any] = []
    for value in vars(module).values():
        values.extend(value[-1:] if isinstance(value, (tuple, list, torch.Size)) else [value])
    return sorted({v for v in values if isinstance(v, int) and not isinstance(v, bool) and 2 <= v <= 1 << 17})


def _probe_affine(copy: Isolated, slots: tuple[str, ...]) -> NormProbe | str | None:
    width = copy.parameter(slots[0]).numel()
    x = _tokens(width)
    if copy.tries(x) != x.shape:
        return _other_kind(copy, slots, width)
    found = _affine_structure(copy, slots, x, last=True)
    if found is None:
        if copy.has_scalars:
            return None
        return _without_formula("other", copy, width, _HIDDEN, x) if _normalises_rows(copy, x) else NO_AFFINE
    weight, bias, offset = found
    if _is_multiple(_without_affine(copy, found, x), x):
        return _SCALES_ONLY
    fitted = _fit(copy, found, width)
    if fitted is None:
        return _without_formula("other", copy, width, found, x)
    if not (copy.is_by_rows(x) and copy.is_differentiated(x)):
        return _MORE
    cast = _cast_order(copy, weight, bias, offset, *fitted)
    gated = _gated(copy, slots, width)
    with_gate = gated if isinstance(gated, NormProbe) else None
    return NormProbe("", fitted[0], width, fitted[1], weight, bias, offset, cast, with_gate=with_gate)


def _affine_structure(
    copy: Isolated, slots: tuple[str, ...], x: Tensor, *, last: bool, extra: tuple[Tensor, ...] = ()
) -> _Affine | None:
    """(scale, shift, offset) if y = (offset + scale) * u(x) + shift with u free of both, for two random draws."""
    width = copy.parameter(slots[0]).numel()
    own = copy.parameter(slots[0]).shape if _is_per_head(copy.parameter(slots[0])) else (width,)

    def along(values: Tensor) -> Tensor:
        return values.reshape(own) if last else values.reshape(-1, *[1] * (x.dim() - 2))

    w1, w2 = (torch.rand(width, dtype=torch.float64) + 0.5 for _ in range(2))
    b1, b2 = (torch.randn(width, dtype=torch.float64) for _ in range(2))
    zero = torch.zeros(width, dtype=torch.float64)
    for weight, bias in [(slots[0], None)] if len(slots) == 1 else [slots, slots[::-1]]:
        no_shift = {bias: zero} if bias else {}
        y1 = copy.run(x, *extra, values={weight: w1, **no_shift})
        y2 = copy.run(x, *extra, values={weight: w2, **no_shift})
        if y1.shape != x.shape or not y1.isfinite().all() or not y1.any():
            continue
        for offset in _OFFSETS:
            u = y1 / along(offset + w1)
            if not torch.allclose(y2, along(offset + w2) * u, rtol=_AGREES, atol=1e-12):
                continue
            if bias is None:
                return weight, None, offset
            draws = ((w1, b1), (w2, b2))
            runs = [copy.run(x, *extra, values={weight: w, bias: b}) for w, b in draws]
            expected = [along(offset + w) * u + along(b) for w, b in draws]
            if all(torch.allclose(y, e, rtol=_AGREES, atol=1e-12) for y, e in zip(runs, expected, strict=True)):
                return weight, bias, offset
    return None


def _probe_per_head(copy: Isolated, slots: tuple[str, ...]) -> NormProbe | str | None:
    """A norm of the last dimension whose scale and shift are (heads, head_dim)."""
    heads, width = copy.parameter(slots[0]).shape
    x = _rows(2, 3, heads, width)
    if copy.tries(x) != x.shape:
        return None
    found = _affine_structure(copy, slots, x, last=True)
    if found is None:
        return None
    if _is_multiple(_without_affine(copy, found, x), x):
        return None  # it only scales each head
    return _without_formula("heads", copy, width, found, x)


def _other_kind(copy: Isolated, slots: tuple[str, ...], width: int) -> NormProbe | str | None:
    """Probe a module that does not map one (2, tokens, width) tensor to its shape: gated, or with channels in dim 1."""
    if isinstance(copy.module, BATCH_NORM_CLASSES):  # PyTorch's, whatever a subclass adds: timm's run an activation
        return BATCH_STATISTICS
    if (gated := _gated(copy, slots, width)) is not None:
        return gated
    for x in _channels(width):
        if copy.tries(x) != x.shape:
            continue
        if found := _affine_structure(copy, slots, x, last=False):
            if any(True for _ in copy.module.buffers()):
                return BATCH_STATISTICS
            if _is_multiple(_without_affine(copy, found, x), x):
                return _SCALES_ONLY  # a convolution of one number a channel
            return _without_formula("channels", copy, width, found, x)
        if _standardises(copy, x):  # and runs an activation
            return _without_formula("channels", copy, width, _HIDDEN, x)
    return None


def _channels(width: int) -> Iterator[Tensor]:
    """Inputs with channels in dimension 1."""
    yield from (_rows(*shape) for shape in ((2, width, 4, 6), (2, width, 5), (3, width), (2, width, 2, 3, 4)))


def _standardises(copy: Isolated, x: Tensor, shift: int = 1) -> bool:
    """Whether the output does not change when all of the input is scaled by a positive number, and shifted by `shift`
    times its size."""
    for parameter in copy.module.parameters(recurse=False):  # earlier runs may have left zeros there
        parameter.data = torch.rand_like(parameter) + 0.5
    # A softmax does not change either where its input is large; a norm's eps counts where its input is small.
    sizes = ((_LARGE, 1e-6), (1, 1e-2))
    pairs = ((copy.run(size * x), copy.run(3 * size * x + shift * size), close) for size, close in sizes)
    if not all(torch.allclose(y, moved, rtol=close, atol=close) for y, moved, close in pairs):
        return False
    return not torch.allclose(copy.run(-x), copy.run(x), rtol=_AGREES)


def _normalises_rows(copy: Isolated, x: Tensor) -> bool:
    """Whether the output ignores the scale of its input, and depends on other channels, unlike a sign."""
    moved = torch.cat([x[..., :1] + 1, x[..., 1:]], -1)
    depends = not torch.allclose(copy.run(moved)[..., 1:], copy.run(x)[..., 1:], rtol=_AGREES)
    return depends and _standardises(copy, x, shift=0)


def _gated(copy: Isolated, slots: tuple[str, ...], width: int) -> NormProbe | str | None:
    x = _tokens(width)
    gate = _rows(*x.shape)
    if copy.tries(x, gate) != x.shape:
        return None
    return _without_formula("gated", copy, width, _affine_structure(copy, slots, x, last=True, extra=(gate,)), x, gate)


def _without_formula(
    kind: NormKind, copy: Isolated, width: int, found: _Affine | None, *inputs: Tensor
) -> NormProbe | str | None:
    """The probe of a norm without a formula: its affine is known, and running it again recomputes it."""
    if found is None:
        return None
    if not replays(copy, *inputs):
        return "random, or different in train mode or with gradients: it cannot be run again"
    weight, bias, offset = found
    intermediates = keeps_intermediates(copy, *inputs)
    by_rows = kind in ("gated", "other") and copy.is_by_rows(*inputs)
    return NormProbe("", kind, width, 0.0, weight or None, bias, offset, intermediates=intermediates, by_rows=by_rows)


def _fit(copy: Isolated, found: _Affine | None, width: int) -> tuple[NormKind, float | None] | None:
    """(family, eps) that reproduce the module to 1e-9 at inputs of size 1, sqrt(eps), `_TINY` and `_LARGE`."""
    x, normalise = _tokens(width), functools.partial(_without_affine, copy, found)
    if copy.has_scalars or normalise(x).shape != x.shape:  # a scalar may be an eps that is trained
        return None
    for kind in _FORMULAS:
        eps = _measure_eps(normalise, x, kind)
        if eps is None:
            continue
        near = [value for value in copy.floats if math.isclose(value, eps, rel_tol=1e-6)]
        for candidate in (*near, float(f"{eps:.6g}"), eps):
            sizes = (1.0, math.sqrt(candidate) or _TINY, _TINY, _LARGE)
            if all(_same(normalise(x * s), _FORMULAS[kind](x * s, candidate)) for s in sizes):
                return _with_machine_eps(copy, found, width, kind, candidate)
    return None


def _with_machine_eps(
    copy: Isolated, found: _Affine | None, width: int, kind: NormKind, eps: float
) -> tuple[NormKind, float | None] | None:
    """(family, eps); an eps of fp64's machine epsilon becomes None if the module's eps depends on the dtype. Returns
    None for a rule that memopt's norms do not have, such as the machine epsilon of a 16-bit dtype."""
    if not math.isclose(eps, torch.finfo(torch.float64).eps):
        return kind, eps
    rules: tuple[float | None, ...] = (None, eps)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = (_tokens(width) * _SMALL).to(dtype)
        y = _in_dtype(copy, x, _identity(copy, found))
        accuracy = 4 * torch.finfo(dtype).eps  # of y: some roundings
        rules = tuple(
            rule
            for rule in rules
            if torch.allclose(
                y.double(),
                _FORMULAS[kind](x.double(), torch.finfo(torch.float32).eps if rule is None else rule),
                rtol=accuracy,
                atol=accuracy,
            )
        )
    return (kind, rules[0]) if rules else None


def _in_dtype(copy: Isolated, x: Tensor, values: dict[str, Tensor]) -> Tensor:
    """Output of the module, run in the dtype of `x` and not widened to fp64."""
    copy.module.to(x.dtype)
    try:
        return copy.run(x, values={name: value.to(x.dtype) for name, value in values.items()}, native=True)
    finally:
        copy.module.to(torch.float64)


def _measure_eps(normalise: Callable[[Tensor], Tensor], x: Tensor, kind: NormKind) -> float | None:
    """Solve the formula for eps at an input so small that eps dominates under the root."""
    tiny = x * _TINY
    centred = tiny - tiny.mean(-1, keepdim=True) if kind == "layer" else tiny
    ratio = (centred / normalise(tiny)).square() - centred.square().mean(-1, keepdim=True)
    eps = float(ratio.median())
    if not math.isfinite(eps):
        return None
    return eps if eps > 1e-25 else 0.0


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _layer(x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)


_FORMULAS: dict[NormKind, Callable[[Tensor, float], Tensor]] = {"rms": _rms, "layer": _layer}


def _is_multiple(y: Tensor, x: Tensor) -> bool:
    """Whether `y` is `x` times one number."""
    return torch.allclose(y * x.flatten()[0], x * y.flatten()[0], rtol=_AGREES)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= _AGREES * b.abs().max())


def _tokens(width: int) -> Tensor:
    """(2, tokens, width); as many tokens as channels would hide which of the two is normalised."""
    return _rows(2, 5 if width != 5 else 3, width)


def _rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) * 1.3 + 0.4


def _cast_order(
    copy: Isolated, weight: str, bias: str | None, offset: int, kind: NormKind, eps: float | None
) -> CastOrder:
    """The cast order whose formula in bf16 reproduces more elements of the module's output."""
    width = copy.parameter(weight).numel()
    x = _rows(16, width).bfloat16()
    values = {weight: (torch.rand(width) * 1.3 + 0.3).bfloat16()}
    if bias:
        values[bias] = torch.randn(width).bfloat16()
    try:
        y = _in_dtype(copy, x, values)
    except _FAILURES:
        return "after"
    x_hat = _FORMULAS[kind](x.float(), torch.finfo(torch.float32).eps if eps is None else eps)
    before = (offset + values[weight]) * x_hat.bfloat16()
    after = (offset + values[weight].float()) * x_hat
    if bias:
        before, after = before + values[bias], after + values[bias].float()
    equal_before, equal_after = (int((y == candidate.bfloat16()).sum()) for candidate in (before, after))
    return "before" if equal_before > equal_after else "after"
