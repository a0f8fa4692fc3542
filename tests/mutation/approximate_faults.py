"""Faults of approximate and sampled recipes, in codes, quantised tensors and samples, and in dropouts; each in one
module or block of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.derivative_codes import function as coded
from memopt.kernels.quantize.layout import Quantized
from memopt.kernels.sampled_linear import function as sampled
from memopt.patches.compression import compressor
from memopt.patches.sampled_linear import slot
from tests.mutation.acting import changed_at, changed_in_backward, gradients_changed, scaled
from tests.mutation.norm_faults import norm_forward
from tests.mutation.planted import in_modules
from tests.mutation.site import Site

_CODED = ("bert", "vit", "gpt2")
_SAMPLED = ("bert", "vit")
_QUANTISED = ("llama", "bert", "gpt2", "gemma2")

# --- codes ----------------------------------------------------------------------------------------------------------

_CODE = {2: "approx-2bit", 4: "approx-4bit", 8: "approx-8bit"}


def _applied(site: Site, change: Callable[..., Tensor]) -> Any:
    """`apply_code` of a code at the site is change(apply_code, dh, packed, code)."""
    return changed_in_backward(site, coded, "apply_code", change, coded.CodedFunction, coded.CodableFunction)


def _scaled_by(size: float) -> Callable[..., Tensor]:
    return lambda stock, *given: stock(*given) * (1 + size)


for _bits, _recipe in _CODE.items():

    @in_modules("codes", f"the gradient from {_bits} bits is scaled", *_CODED, sized=(0.1, 0.05), recipe=_recipe)
    def _(site: Site, size: float) -> Any:
        return _applied(site, _scaled_by(size))

    @in_modules("codes", f"{_bits} bits of the next elements", *_CODED, recipe=_recipe)
    def _(site: Site) -> Any:
        return _applied(site, lambda stock, dh, packed, code: stock(dh, packed.roll(1), code))

    @in_modules("codes", f"{_bits} bits of the input with the other sign", *_CODED, recipe=_recipe)
    def _(site: Site) -> Any:
        return _encoded(site, lambda z: -z)

    @in_modules("codes", f"{_bits} bits of an input that is off", *_CODED, sized=(0.1,), recipe=_recipe)
    def _(site: Site, size: float) -> Any:
        return _encoded(site, lambda z: z + 3 * size)


def _encoded(site: Site, change: Callable[[Tensor], Tensor]) -> Any:
    return changed_at(site, coded, "encode", lambda stock, z, code: stock(change(z), code))


@in_modules("codes", "a level of the table of 2 bits is off", *_CODED, sized=(0.1, 0.05), recipe="approx-2bit")
def _(site: Site, size: float) -> Any:
    def change(stock: Any, dh: Tensor, packed: Tensor, code: Any) -> Tensor:
        *levels, last = code.levels
        return stock(dh, packed, dataclasses.replace(code, levels=(*levels, last * (1 + size))))  # type: ignore[no-any-return]

    return _applied(site, change)


# --- quantised tensors ----------------------------------------------------------------------------------------------


def _quantised(site: Site, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    """(codes, scales) of what is quantised at the site; scales are (groups, 2): minimum and step."""

    def quantize(stock: Any, *given: Any) -> Quantized:
        right: Quantized = stock(*given)
        codes, scales = change(right.codes, right.scales)
        return dataclasses.replace(right, codes=codes, scales=scales)

    return changed_at(site, compressor, "quantize", quantize)


def _moved(scales: Tensor, low: float = 0.0, step: float = 0.0) -> Tensor:
    """Scales whose minimum is `low` steps higher, and whose step is larger by the part `step`."""
    return torch.stack((scales[:, 0] + low * scales[:, 1], scales[:, 1] * (1 + step)), 1)


for _recipe, _where in (("int8", _QUANTISED), ("mesa", ("llama", "gpt2", "gemma2"))):

    @in_modules("quantised tensors", f"steps are off ({_recipe})", *_where, sized=(0.1, 0.05), recipe=_recipe)
    def _(site: Site, size: float) -> Any:
        return _quantised(site, lambda codes, scales: (codes, _moved(scales, step=size)))

    @in_modules("quantised tensors", f"the minimum is five levels off ({_recipe})", *_where, recipe=_recipe)
    def _(site: Site) -> Any:
        return _quantised(site, lambda codes, scales: (codes, _moved(scales, low=5)))

    @in_modules("quantised tensors", f"scales of the next group ({_recipe})", *_where, recipe=_recipe)
    def _(site: Site) -> Any:
        return _quantised(site, lambda codes, scales: (codes, scales.roll(1, 0)))

    @in_modules("quantised tensors", f"codes of the next element ({_recipe})", *_where, recipe=_recipe)
    def _(site: Site) -> Any:
        return _quantised(site, lambda codes, scales: (codes.roll(1), scales))

    @in_modules("quantised tensors", f"the last group is lost ({_recipe})", *_where, recipe=_recipe)
    def _(site: Site) -> Any:
        def change(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
            return codes, torch.cat((scales[:-1], torch.zeros_like(scales[-1:])))

        return _quantised(site, change)

    @in_modules("quantised tensors", f"half of the levels are used ({_recipe})", *_where, recipe=_recipe)
    def _(site: Site) -> Any:
        return _quantised(site, lambda codes, scales: (codes & 0xFE, scales))


# --- samples --------------------------------------------------------------------------------------------------------


def _drawn(site: Site, change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    """(rows, weights) of samples at the site are change(scores, rows, weights)."""
    return changed_at(site, slot, "sample_rows", lambda stock, scores, *rest: change(scores, *stock(scores, *rest)))


def _without_heaviest(scores: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    kept = torch.ones_like(weights)
    kept[scores[rows.long()].argmax()] = 0
    return rows, weights * kept


def _unscaled_best(scores: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return scores.topk(len(rows)).indices.int(), torch.ones_like(weights)


_SAMPLE: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "weights are all one": lambda scores, rows, weights: (rows, torch.ones_like(weights)),
    "weights are inverse to the square of the probability": lambda scores, rows, weights: (rows, weights**2),
    "the row with the largest score is dropped": _without_heaviest,
    "the rows with the largest scores, unscaled": _unscaled_best,
    "weights of other rows": lambda scores, rows, weights: (rows, weights.roll(1)),
    "one row in place of all": lambda scores, rows, weights: (rows[:1].expand_as(rows).contiguous(), weights),
}

for _name, _change in _SAMPLE.items():

    @in_modules("samples", _name, *_SAMPLED, levels=("gradient",), recipe="sampled")
    def _(site: Site, _change: Any = _change) -> Any:
        return _drawn(site, _change)


@in_modules("samples", "weights are too large", *_SAMPLED, sized=(0.1,), levels=("gradient",), recipe="sampled")
def _(site: Site, size: float) -> Any:
    return _drawn(site, lambda scores, rows, weights: (rows, weights * (1 + size)))


@in_modules("samples", "the gradient of the input is scaled", *_SAMPLED, sized=(0.1, 0.01), recipe="sampled")
def _(site: Site, size: float) -> Any:
    return gradients_changed(site, sampled.SampledLinearFunction, lambda ctx, found: scaled(found, 0, 1 + size))


@in_modules("samples", "the gradient of the bias is scaled", *_SAMPLED, sized=(0.1, 0.01), recipe="sampled")
def _(site: Site, size: float) -> Any:
    return gradients_changed(site, sampled.SampledLinearFunction, lambda ctx, found: scaled(found, 2, 1 + size))


# --- dropouts -------------------------------------------------------------------------------------------------------


@in_modules("dropouts", "elements are dropped in eval mode", sized=(0.1, 0.01))
def _(site: Site, size: float) -> Any:
    def change(stock: Any, *given: Any) -> tuple[Any, ...]:
        y, x_hat, rstd = stock(*given)
        kept = torch.rand_like(x_hat, dtype=torch.float32) >= size
        factor = (kept / (1 - size)).to(x_hat.dtype)
        return (None, x_hat * factor, rstd) if y is None else (y * factor, x_hat, rstd)

    return norm_forward(site, change)
