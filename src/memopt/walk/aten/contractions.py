"""Contractions: the ops that sum over a dimension of two tensors, and the channel ids that such a sum reads.

A contraction of an activation with a parameter is a legal consumer of a norm when every coordinate of the summed
dimension carries the id of one channel, so that the channel's weight can move into the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memopt.walk.aten.parameters import SINGLE, Along, ParameterTable, ParameterView
from memopt.walk.aten.rules import ZERO, OpCall, Shadow, compact


@dataclass(frozen=True)
class Contraction:
    """The product of a and b, summed over a's dimension `over_a` and b's dimension `over_b`."""

    a: Tensor
    b: Tensor
    over_a: int
    over_b: int
    bias: Tensor | None = None
    groups: int = 1
    padded: bool = False
    transposed: bool = False

    def swapped(self) -> Contraction:
        return Contraction(self.b, self.a, self.over_b, self.over_a, self.bias)


#: op -> positions of a, b, bias and the summed dimensions.
_MATMULS: dict[str, tuple[int, int, int | None, int, int]] = {
    "mm": (0, 1, None, -1, 0),
    "addmm": (1, 2, 0, -1, 0),
    "_addmm_activation": (1, 2, 0, -1, 0),
    "linear": (0, 1, 2, -1, -1),
    "bmm": (0, 1, None, -1, -2),
    "baddbmm": (1, 2, 0, -1, -2),
    "_grouped_mm": (0, 1, None, -1, -2),
    "grouped_mm_fallback": (0, 1, None, -1, -2),
    "mv": (0, 1, None, -1, 0),
    "addmv": (1, 2, 0, -1, 0),
    "dot": (0, 1, None, -1, 0),
}

#: Ops that multiply activations by a weight, and not each of several matrices by its own, as attention does.
_OF_WEIGHTS = frozenset({"convolution", "mm", "addmm", "_addmm_activation", "linear"})


def recognise(call: OpCall) -> Contraction | None:
    """`call` as a contraction; None if it is something else."""
    if call.name == "convolution":
        x, weight, bias, _, padding, _, transposed, _, groups = call.args[:9]
        return Contraction(x, weight, 1, 0 if transposed else 1, bias, groups, any(padding), transposed)
    layout = _MATMULS.get(call.name)
    if layout is None:
        return None
    a, b, bias, over_a, over_b = layout
    if any(not isinstance(call.args[i], Tensor) for i in (a, b)):
        return None
    return Contraction(
        call.args[a], call.args[b], over_a, over_b, None if bias is None else call.argument(bias, "bias")
    )


def computed_weight(
    call: OpCall, found: Contraction, table: ParameterTable
) -> tuple[nn.Parameter, Tensor, Tensor] | None:
    """(parameter, weight, source) of a product with one matrix or filter that the forward computes from parameters, as
    weight norms and quantisation-aware training do; None for other products."""
    if call.name in _OF_WEIGHTS:
        for weight, source in ((found.b, found.a), (found.a, found.b)):
            parameter = table.computed_from(weight)
            if parameter is not None and not table.is_constant(source):
                return parameter, weight, source
    return None


@dataclass(frozen=True)
class Reading:
    """How one contraction reads channels: coordinate `coordinates[i]` of the weight's `axis` meets `channels[i]`."""

    axis: int
    coordinates: Tensor
    channels: Tensor
    shift: bool
    scale: float


def read(contraction: Contraction, weight: ParameterView, shadow: Shadow) -> Reading | str:
    """The channels that the weight's axis meets, or the obstacle in words."""
    a, b = contraction.a, contraction.b
    if contraction.groups > 1:
        return _read_depthwise(contraction, shadow)
    channels = one_per_coordinate(shadow.ids, contraction.over_a % a.dim())
    if channels is None:
        return "linear that reads several channels in one coordinate"
    along = _axis(weight, contraction.over_b % b.dim())
    if along is None:
        return "weight whose layout is not understood"
    shift = shadow.shift and not contraction.padded and not bool((compact(shadow.ids) == ZERO).any())
    return Reading(along.axis, along.coordinates(), channels, shift, shadow.scale)


def _axis(weight: ParameterView, summed: int) -> Along | None:
    """The axis of the parameter that b's dimension `summed` walks, if no other dimension of b walks it too."""
    dim = weight.dims[summed]
    if dim == SINGLE:
        single = [axis for axis, size in enumerate(weight.parameter.shape) if size == 1]
        return Along(single[0], 0, 1, 1) if single else None
    if not isinstance(dim, Along):
        return None
    others = [d for i, d in enumerate(weight.dims) if i != summed]
    shared = any(isinstance(d, Along) and d.axis == dim.axis for d in others)
    # A merged dimension (None) may walk this axis too, unless `summed` walks all of it: no element occurs twice.
    hidden = None in others and dim.size != weight.parameter.shape[dim.axis]
    return None if shared or hidden else dim


def _read_depthwise(contraction: Contraction, shadow: Shadow) -> Reading | str:
    """One filter for each channel: the channel's weight moves into its own rows of the filter."""
    groups, weight = contraction.groups, contraction.b
    channels = one_per_coordinate(shadow.ids, 1)
    if contraction.transposed or groups != contraction.a.size(1) or channels is None:
        return "grouped convolution"
    rows = weight.size(0)
    return Reading(0, torch.arange(rows), channels.repeat_interleave(rows // groups), False, shadow.scale)


def one_per_coordinate(ids: Tensor, dim: int) -> Tensor | None:
    """The one id along each coordinate of `dim` (zeros fit anywhere); None when some coordinate has several."""
    if not ids.numel():
        return None
    coordinates = ids.movedim(dim, -1)
    columns = compact(coordinates).reshape(-1, coordinates.size(-1) if coordinates.stride(-1) else 1)
    columns = columns.expand(-1, coordinates.size(-1))
    channels: Any = columns.amax(0)
    return channels if bool(((columns == channels) | (columns == ZERO)).all()) else None
