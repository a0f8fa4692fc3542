"""Makes bf16 in Triton's interpreter behave as on a GPU; for tests only.

The interpreter holds bf16 as NumPy uint16 and supports loads, stores and the upcast only. Without this module a
downcast truncates where a GPU rounds to nearest even, and arithmetic, comparisons and `tl.dot` work on the bit
patterns. Here they go through fp32 and their result is rounded once, which is what the hardware does. A sum of bf16,
which would round after every step, is refused: kernels reduce in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

QUIET_NAN = np.uint16(0x7FC0)


def install() -> None:
    """Replace the interpreter's conversions and arithmetic; a second call changes nothing."""
    if getattr(InterpreterBuilder, "_memopt_bf16", False):
        return
    InterpreterBuilder._memopt_bf16 = True
    interpreter._convert_float = _converting(interpreter._convert_float)
    interpreter.ReduceScanOpInterface.check_tensor = _refusing(interpreter.ReduceScanOpInterface.check_tensor)
    InterpreterBuilder.cast_impl = _by_way_of_fp32(InterpreterBuilder.cast_impl)
    InterpreterBuilder.get_bf16 = _constant
    for name in ("binary_op", "unary_op", "ternary_op", "create_fma", "create_rsqrt", "create_erf", "create_dot"):
        setattr(InterpreterBuilder, name, _through_fp32(getattr(InterpreterBuilder, name)))


def to_fp32(bits: np.ndarray) -> np.ndarray:
    """bf16 bit patterns (uint16) as fp32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_fp32(values: np.ndarray) -> np.ndarray:
    """fp32 as bf16 bit patterns (uint16), rounded to nearest, ties to even."""
    # NumPy gives scalars for some operations on arrays of no dimension; an array of one keeps the views simple.
    bits = np.atleast_1d(np.ascontiguousarray(values, dtype=np.float32)).view(np.uint32)
    lowest_kept = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + lowest_kept) >> np.uint32(16)).astype(np.uint16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, QUIET_NAN, rounded).reshape(np.shape(values))


def _converting(original: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def convert(values: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
        truncates = rounding is not None and rounding == interpreter._ir.ROUNDING_MODE.RTZ
        if source == tl.float32 and target == tl.bfloat16 and not truncates:
            return from_fp32(values)
        if source == tl.bfloat16 and target == tl.float32:
            return to_fp32(values).view(np.uint32)
        return original(values, source, target, rounding)

    return convert


def _by_way_of_fp32(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """The builder's cast between two types, which knows bf16 beside fp32 only."""

    def cast(self: InterpreterBuilder, source: TensorHandle, target: tl.dtype) -> TensorHandle:
        types = {source.dtype.scalar, target.scalar}
        if tl.bfloat16 in types and tl.float32 not in types:
            source = original(self, source, tl.float32)
        return original(self, source, target)

    return cast


def _constant(self: InterpreterBuilder, value: float) -> TensorHandle:
    return TensorHandle(from_fp32(np.array([value], dtype=np.float32)), tl.bfloat16)


def _refusing(original: Callable[..., None]) -> Callable[..., None]:
    def check(self: Any, operands: Any) -> None:
        if any(operand.dtype.scalar == tl.bfloat16 for operand in operands):
            raise TypeError("a reduction or scan of bf16: convert to tl.float32 before it")
        original(self, operands)

    return check


def _through_fp32(original: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """The builder's method, with bf16 operands widened before it and a bf16 result rounded after it."""

    def method(self: InterpreterBuilder, *args: Any) -> TensorHandle:
        if not any(_is_bf16(argument) for argument in args):
            return original(self, *args)
        result = original(self, *(_widened(argument) if _is_bf16(argument) else argument for argument in args))
        if result.data.dtype == np.bool_:
            return TensorHandle(result.data, tl.int1)
        # tl.dot of bf16 has an fp32 accumulator, and so an fp32 result.
        if original.__name__ == "create_dot" and not _is_bf16(args[2]):
            return result
        return TensorHandle(from_fp32(result.data), tl.bfloat16)

    return method


def _is_bf16(argument: Any) -> bool:
    return isinstance(argument, TensorHandle) and argument.dtype.scalar == tl.bfloat16


def _widened(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(to_fp32(handle.data), tl.float32)
