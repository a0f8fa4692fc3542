"""An activation's derivative as codes of 2, 3, 4 or 8 bits an element, and the gradient computed from these codes.

The codes of each activation, their packing and the reference in PyTorch; `memopt.kernels.derivative_codes.schemes`
defines codes. `memopt.kernels.derivative_codes.fit` fits thresholds and levels (codes.json), except the published ones.
Nothing here imports Triton.
"""

from __future__ import annotations

import functools
import json
import math
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.base.autograd import accumulation_dtype, autocast_as
from memopt.kernels.base.device import runs_triton
from memopt.kernels.derivative_codes.fit import fit
from memopt.kernels.derivative_codes.schemes import (
    FLAG_GROUP,
    CodeError,
    DerivativeCode,
    bits_of,
    derivative,
    fp32_below,
    published_code,
    require_scheme,
)
from memopt.torch_compat.activations import ACTIVATIONS, Elementwise


def encode(z: Tensor, code: DerivativeCode) -> Tensor:
    """The codes of f'(z), packed.

    Args:
        z: any shape and strides; fp16, bf16, fp32 or fp64.

    Returns:
        uint8, one dimension: ceil(n * bits / 8) bytes of codes, in which the code of element i (in logical order)
        begins at bit i * bits, low bits first, then ceil(n / 1024) flags: 1 if one of these 1024 elements is NaN
        (value codes: where its derivative is not finite).
    """
    if runs_triton(z) and (code.thresholds or code.kind in ACTIVATIONS):
        from memopt.kernels.derivative_codes.codes_triton import launch_encode

        return launch_encode(z, code)
    with torch.no_grad():
        return _encode(z.reshape(-1), code)


def apply_code(dh: Tensor, packed: Tensor, code: DerivativeCode) -> Tensor:
    """dh * f'(z), where `packed` is ``encode(z, code)``.

    Args:
        dh: shaped like z; any strides.

    Returns:
        Contiguous, with the shape and dtype of dh. Computed in fp32 (fp64 for fp64 dh) and rounded once. NaN where an
        element's flag is set.

    Raises:
        ValueError: `packed` has another number of elements.
    """
    if packed.numel() != code.packed_bytes(dh.numel()):
        raise ValueError(
            f"{code.packed_bytes(dh.numel())} bytes hold the {code.bits}-bit codes of {dh.numel()} elements, "
            f"not {packed.numel()}. Pass the result of encode() for an activation of the gradient's shape."
        )
    if runs_triton(dh):
        from memopt.kernels.derivative_codes.codes_triton import launch_apply

        return launch_apply(dh, packed, code)
    with torch.no_grad():
        return _apply(dh.reshape(-1), packed, code).view(dh.shape)


@functools.cache
def derivative_code(kind: str, scheme: str) -> DerivativeCode:
    """The code of a known activation.

    Args:
        kind: a key of `memopt.torch_compat.activations.ACTIVATIONS` whose derivative is continuous, or nearly.
        scheme: one of :data:`SCHEMES`.

    Raises:
        CodeError: the scheme is unknown, or this kind has no code of that scheme.
    """
    require_scheme(scheme)
    fitted = _fitted()
    found = fitted.get(kind, {}).get(scheme)
    if found is None:
        known = ", ".join(sorted(kind for kind, schemes in fitted.items() if scheme in schemes))
        raise CodeError(f"The derivative of {kind!r} has no {scheme} code.", f"Kinds that have one: {known}.")
    if scheme == "published":
        return published_code(kind, found["error"])
    return DerivativeCode(scheme, kind, *_meaning(found, scheme), found["error"])


def code_of(function: Elementwise, scheme: str) -> DerivativeCode:
    """The code of any smooth activation. Fits it, which takes about a second.

    Args:
        function: elementwise, without randomness, differentiable by autograd in fp64; its derivative has a limit on
            either side.
        scheme: one of :data:`SCHEMES` but "published".

    Raises:
        CodeError: the scheme is unknown or "published", or the derivative has no limits.
    """
    require_scheme(scheme)
    if scheme == "published":
        raise CodeError("The published codes are those of GELU and SiLU.", "Use derivative_code() or another scheme.")
    found = fit(function, scheme)
    return DerivativeCode(scheme, "other", *_meaning(found, scheme), found["error"], function)


@functools.cache
def _fitted() -> dict[str, dict[str, Any]]:
    text = resources.files("memopt.kernels.derivative_codes").joinpath("codes.json").read_text()
    codes: dict[str, dict[str, Any]] = json.loads(text)["codes"]
    return codes


def _meaning(found: dict[str, Any], scheme: str) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
    """bits, thresholds and levels of an entry of codes.json."""
    bits = bits_of(scheme)
    if "thresholds" in found:
        return bits, tuple(found["thresholds"]), tuple(found["levels"])
    return bits, (), tuple(found["low"] + i * found["step"] for i in range(2**bits))


# --- reference -------------------------------------------------------------------------------------------------------


def _encode(z: Tensor, code: DerivativeCode) -> Tensor:
    z = z if z.dtype == torch.float64 else z.float()
    if code.thresholds:
        codes = torch.zeros_like(z, dtype=torch.uint8)
        for threshold in code.thresholds:
            codes += z > (threshold if z.dtype == torch.float64 else fp32_below(threshold))
        flagged = z.isnan()
    else:
        slope = _slope(z, code)
        flagged = ~slope.isfinite()
        place = (slope.masked_fill(flagged, code.levels[0]) - code.levels[0]) * (1 / code.step)
        codes = (place + 0.5).floor().clamp(0, len(code.levels) - 1).to(torch.uint8)
    groups = _padded(flagged, FLAG_GROUP).view(-1, FLAG_GROUP)
    return torch.cat([_pack(codes, code.bits)[: code.code_bytes(z.numel())], groups.any(1).to(torch.uint8)])


def _slope(z: Tensor, code: DerivativeCode) -> Tensor:
    with autocast_as(None, z):
        if code.kind in ACTIVATIONS:
            return ACTIVATIONS[code.kind].gradient(torch.ones_like(z), z)
        assert code.function is not None
        return derivative(code.function, z)


def _apply(dh: Tensor, packed: Tensor, code: DerivativeCode) -> Tensor:
    elements, code_bytes = dh.numel(), code.code_bytes(dh.numel())
    precision = accumulation_dtype(dh.dtype)
    levels = torch.tensor(code.levels, dtype=precision, device=dh.device)
    codes = _unpack(packed[:code_bytes], code.bits)[:elements]
    flagged = packed[code_bytes:].bool().repeat_interleave(FLAG_GROUP)[:elements]
    slope = levels[codes.int()].masked_fill(flagged, math.nan)
    return (dh.to(precision) * slope).to(dh.dtype)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Eight codes in `bits` bytes; padded with 0 at the end."""
    eights = _padded(codes, 8).view(-1, 8)
    words = torch.zeros(len(eights), dtype=torch.int64, device=codes.device)
    for i in range(8):
        words |= eights[:, i].long() << bits * i
    return torch.stack([(words >> 8 * i & 0xFF).to(torch.uint8) for i in range(bits)], 1).view(-1)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    eights = _padded(packed, bits).view(-1, bits)
    words = torch.zeros(len(eights), dtype=torch.int64, device=packed.device)
    for i in range(bits):
        words |= eights[:, i].long() << 8 * i
    return torch.stack([(words >> bits * i & 2**bits - 1).to(torch.uint8) for i in range(8)], 1).view(-1)


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, -tensor.numel() % multiple))
