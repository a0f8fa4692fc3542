"""The effect of each aten op on channel ids: the rules of `memopt.walk.flow.shadow`, one op at a time.

A `Shadow` gives, for every element of a tensor, the channel and norm that scale it. Data movement moves ids,
a product with a tensor that no norm made keeps them. An op that mixes values, reads them or is not linear is an
obstacle, named in words for the user. Contractions with parameters are in `memopt.walk.aten.contractions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from memopt.torch_compat import operator_schema
from memopt.walk.aten.ops import (
    MOVEMENT,
    NO_USE,
    NONLINEARITIES,
    NORM_FUNCTIONS,
    READS,
    RESHAPES,
    SAME_ELEMENTS,
    SCATTERS,
    STATISTICS,
)

#: Ids of elements that are zero (any scale fits them, no shift does) and of elements that no norm made.
ZERO, FOREIGN = -1, -2
NO_RULE = "operation without a rule"


@dataclass(frozen=True)
class Shadow:
    """Channel ids of a tensor that derives from norms; `ids` has the shape of the tensor."""

    ids: Tensor
    shift: bool = True
    """Whether the norm's bias still arrives as scale * bias at every element."""
    scale: float = 1.0


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists and dicts (a walk looks into every argument of an aten op: pytree is too slow)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def compact(ids: Tensor) -> Tensor:
    """`ids` with every broadcast dimension cut to size one: the same ids, fewer elements."""
    for dim, stride in enumerate(ids.stride()):
        if stride == 0 and ids.size(dim) > 1:
            ids = ids.narrow(dim, 0, 1)
    return ids


@dataclass(frozen=True)
class OpCall:
    """One aten op as the dispatcher saw it."""

    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @cached_property
    def tensors(self) -> list[Tensor]:
        return [*tensors_in(self.args), *tensors_in(tuple(self.kwargs.values()))]

    @cached_property
    def outputs(self) -> list[Tensor]:
        return list(tensors_in(self.out))

    def argument(self, position: int, keyword: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(keyword, default)


ShadowOf = Callable[[Any], Shadow | None]
#: New shadows, or the obstacle in words.
Effect = list[tuple[Tensor, Shadow]] | str

_OBSTACLES = (
    (NORM_FUNCTIONS | STATISTICS, "another norm"),
    (NONLINEARITIES, "nonlinearity"),
    (READS, "branch or comparison on its values"),
    (SCATTERS, "scatter into another tensor"),
    ({"view_as_complex"}, "rotary embedding"),
)


def propagate(call: OpCall, shadow_of: ShadowOf) -> Effect:
    """The effect of an op on shadows; the op has a shadowed input and is no contraction with a parameter."""
    try:
        return _propagate(call, shadow_of)
    except (RuntimeError, TypeError, ValueError, IndexError):  # the op does not run on ids
        return NO_RULE


def _propagate(call: OpCall, shadow_of: ShadowOf) -> Effect:
    shadowed = [t for t in call.tensors if shadow_of(t) is not None]
    if call.name in NO_USE:
        return []
    if operator_schema(call.func).is_mutable:
        return _mutation(call.name)
    if call.name in MOVEMENT:
        source = call.args[0] if call.args else None
        if len(shadowed) != 1 or shadowed[0] is not source:
            return "index computed from it"
        return _move(call, source, shadow_of)
    handler = _HANDLERS.get(call.name)
    if handler is not None:
        return handler(call, shadow_of)
    if call.name in {"bmm", "baddbmm"} or "scaled_dot_product" in call.name or "attention" in call.name:
        return "attention"
    return next((words for names, words in _OBSTACLES if call.name in names), NO_RULE)


def _mutation(name: str) -> str:
    if name in {"add_", "sub_"}:
        return "in-place add"
    return "nonlinearity" if name.rstrip("_") in NONLINEARITIES else "in-place operation"


def _move(call: OpCall, source: Tensor, shadow_of: ShadowOf) -> Effect:
    shadow = _get(shadow_of, source)
    outputs = call.outputs
    if not all(out.is_floating_point() for out in outputs):
        return "cast to integers"
    if call.name in SAME_ELEMENTS:
        return [(outputs[0], shadow)]
    if call.name in RESHAPES:
        return [(outputs[0], replace(shadow, ids=shadow.ids.reshape(outputs[0].shape)))]
    layout = {"dtype", "layout", "device", "pin_memory", "memory_format"}
    kwargs = {k: _on_cpu(v) for k, v in call.kwargs.items() if k not in layout}
    args = [_on_cpu(a) for a in call.args[1:]]
    if any(a is None and b is not None for a, b in zip(args, call.args[1:], strict=True)):
        return _move_by_unknown_index(call, shadow)
    moved = list(tensors_in(call.func(shadow.ids, *args, **kwargs)))
    if [m.shape for m in moved] != [out.shape for out in outputs]:
        return NO_RULE
    return [(out, replace(shadow, ids=ids)) for out, ids in zip(outputs, moved, strict=True)]


def _on_cpu(value: Any) -> Any:
    """The argument on the CPU, where the ids are; None for an index without values (meta)."""
    if isinstance(value, Tensor):
        return None if value.is_meta else value.cpu()
    if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
        moved = [_on_cpu(v) for v in value]
        return None if any(m is None and v is not None for m, v in zip(moved, value, strict=True)) else moved
    return value


def _move_by_unknown_index(call: OpCall, shadow: Shadow) -> Effect:
    """A gather whose index is on meta: any index gives the same ids if the ids are constant along the indexed dims."""
    ids, out = shadow.ids, call.outputs[0]
    if call.name == "index":
        dims = [d for d, index in enumerate(call.args[1]) if index is not None]
    elif call.name in {"gather", "index_select"}:
        dims = [call.args[1] % ids.dim()]
    else:
        return "selection that depends on values"
    if not all(_constant_along(ids, d) for d in dims):
        return "selection that depends on values"
    if call.name == "index":
        firsts = tuple(slice(None) if d not in dims else 0 for d in range(ids.dim()))
        kept = ids[firsts]  # without the indexed axes
        leading = dims == list(range(len(dims)))
        if not leading or out.shape[out.dim() - kept.dim() :] != kept.shape:
            return "selection that depends on values"
        return [(out, replace(shadow, ids=kept.expand(out.shape)))]
    first = ids.narrow(dims[0], 0, 1)
    for d in range(ids.dim()):
        if d != dims[0] and out.size(d) != ids.size(d):
            first = first.narrow(d, 0, out.size(d))
    return [(out, replace(shadow, ids=first.expand(out.shape)))]


def _constant_along(ids: Tensor, dim: int) -> bool:
    return ids.stride(dim) == 0 or torch.equal(ids.narrow(dim, 0, 1).expand_as(ids), ids)


def _get(shadow_of: ShadowOf, tensor: Any) -> Shadow:
    shadow = shadow_of(tensor)
    assert shadow is not None
    return shadow


def _dropped(call: OpCall, shadow_of: ShadowOf) -> Effect:
    source = call.args[0]
    return [(call.outputs[0], replace(_get(shadow_of, source), shift=False))] if shadow_of(source) else "mask"


def _join(call: OpCall, shadow_of: ShadowOf) -> Effect:
    tensors = call.args[0]
    shadows = [shadow_of(t) for t in tensors]
    scales = {s.scale for s in shadows if s is not None}
    parts = [
        s.ids.expand(t.shape) if s is not None else torch.full(t.shape, ZERO if _is_zero(t) else FOREIGN)
        for t, s in zip(tensors, shadows, strict=True)
    ]
    ids = call.func(parts, *call.args[1:], **call.kwargs)
    # A shadow has one scale. Only a shift needs it, so a join of several scales drops the shift.
    shift = len(scales) == 1 and all(
        s.shift if s is not None else not _is_zero(t) for t, s in zip(tensors, shadows, strict=True)
    )
    return [(call.out, Shadow(ids, shift, scales.pop() if len(scales) == 1 else 1.0))]


def _is_zero(value: Any) -> bool:
    return not value.is_meta and not bool(value.any()) if isinstance(value, Tensor) else value == 0


def _pad(call: OpCall, shadow_of: ShadowOf) -> Effect:
    source = call.args[0]
    shadow = _get(shadow_of, source)
    if call.argument(2, "value", 0) != 0:
        return "non-zero padding"
    shift = shadow.shift and call.out.shape == source.shape
    return [(call.out, Shadow(call.func(shadow.ids, call.args[1], ZERO), shift, shadow.scale))]


def _negate(call: OpCall, shadow_of: ShadowOf) -> Effect:
    shadow = _get(shadow_of, call.args[0])
    return [(call.out, replace(shadow, scale=-shadow.scale))]


def _multiply(call: OpCall, shadow_of: ShadowOf) -> Effect:
    a, b = call.args[:2]
    if shadow_of(a) is not None and shadow_of(b) is not None:
        return "product with a normalised tensor"
    if call.name == "div" and (shadow_of(b) is not None or call.kwargs.get("rounding_mode")):
        return "nonlinearity"
    source, factor = (a, b) if shadow_of(a) is not None else (b, a)
    shadow = _get(shadow_of, source)
    ids = shadow.ids.expand(call.out.shape)
    if isinstance(factor, Tensor) and (factor.numel() > 1 or factor.is_meta or factor.requires_grad):
        return [(call.out, Shadow(ids, False, shadow.scale))]
    if isinstance(factor, complex):
        return "complex numbers"
    value = float(factor)
    return [(call.out, Shadow(ids, shadow.shift, shadow.scale * value if call.name == "mul" else shadow.scale / value))]


def _add(call: OpCall, shadow_of: ShadowOf) -> Effect:
    a, b = (shadow_of(x) for x in call.args[:2])
    if a is None or b is None:
        return _added_to(call)
    if a.ids.shape != b.ids.shape or call.kwargs.get("alpha", 1) != 1:
        return "residual add"
    one, other = compact(a.ids), compact(b.ids)
    if not bool(((one == other) | (one == ZERO) | (other == ZERO)).all()):
        shared = torch.equal(one.unique(), other.unique())
        return "rotary embedding or other mix of its channels" if shared else "residual add"
    shift = a.shift and b.shift and bool((one == other).all())
    scale = a.scale + b.scale if call.name == "add" else a.scale - b.scale
    return [(call.out, Shadow(torch.maximum(one, other).expand(call.out.shape), shift, scale))]


def _added_to(call: OpCall) -> str:
    shapes = {tuple(x.shape) for x in call.args[:2] if isinstance(x, Tensor)}
    both = all(isinstance(x, Tensor) and x.dim() for x in call.args[:2])
    return "residual add" if both and len(shapes) == 1 else "addition"


def _reduce(call: OpCall, shadow_of: ShadowOf) -> Effect:
    source = call.args[0]
    shadow = _get(shadow_of, source)
    dims, keep = call.argument(1, "dim"), call.argument(2, "keepdim", False)
    if not dims and dims != 0:
        return "reduction over channels"
    ids, count = shadow.ids.expand(source.shape), 1
    for d in sorted((x % source.dim() for x in ([dims] if isinstance(dims, int) else dims)), reverse=True):
        first = ids.narrow(d, 0, 1)
        if not _constant_along(ids, d):
            return "reduction over channels"
        ids = first if keep else first.squeeze(d)
        count *= source.size(d)
    scale = shadow.scale * count if call.name == "sum" else shadow.scale
    return [(call.out, Shadow(ids, shadow.shift, scale))]


def _mask(call: OpCall, shadow_of: ShadowOf) -> Effect:
    source, _, value = call.args[:3]
    shadow = shadow_of(source)
    if shadow is None:
        return "mask"
    if not _is_zero(value):
        return "mask with other values"
    return [(call.out, Shadow(shadow.ids.expand(call.out.shape), False, shadow.scale))]


def _where(call: OpCall, shadow_of: ShadowOf) -> Effect:
    condition, *branches = call.args
    if shadow_of(condition) is not None or len(branches) != 2:
        return "branch or comparison on its values"
    shape = call.out.shape
    parts = []
    for branch in branches:
        shadow = shadow_of(branch)
        if shadow is None and not _is_zero(branch):
            return "selection between it and other values"
        parts.append(torch.full(shape, ZERO) if shadow is None else shadow.ids.expand(shape))
    if not bool(((parts[0] == parts[1]) | (parts[0] == ZERO) | (parts[1] == ZERO)).all()):
        return "selection between it and other values"
    scales = {s.scale for s in map(shadow_of, branches) if s is not None}
    return [(call.out, Shadow(torch.maximum(*parts), False, scales.pop()))]


_HANDLERS: dict[str, Callable[[OpCall, ShadowOf], Effect]] = {
    "native_dropout": _dropped,
    "dropout": _dropped,
    "feature_dropout": _dropped,
    "cat": _join,
    "stack": _join,
    "constant_pad_nd": _pad,
    "neg": _negate,
    "mul": _multiply,
    "div": _multiply,
    "add": _add,
    "sub": _add,
    "mean": _reduce,
    "sum": _reduce,
    "masked_fill": _mask,
    "where": _where,
}
