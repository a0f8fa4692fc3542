"""The harness compiles what would have been launched, and sees what is wrong with it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

from memopt.kernels.base.launch import launch_config
from tools.kernels.aot import TARGETS, Binary, capture

BLOCK = 2048


@triton.jit
def scale_kernel(x, y, count, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    tl.store(y + offsets, tl.load(x + offsets, mask=inside).to(tl.float32) * factor, mask=inside)


@triton.jit
def bf16_kernel(x, y, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    value = tl.load(x + offsets)
    tl.store(y + offsets, value * value)


@triton.jit
def hungry_kernel(x, y, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    value = tl.load(x + offsets)
    # Every element waits in a register until the last one is summed.
    tl.store(y + offsets, value + tl.sum(value, axis=0))


def scaled(x: Tensor) -> None:
    scale_kernel[lambda meta: (triton.cdiv(meta["count"], meta["BLOCK"]),)](
        x, torch.empty_like(x), x.numel(), 2.0, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=True
    )


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def only(binaries: list[Binary]) -> Binary:
    (binary,) = binaries
    return binary


@pytest.mark.parametrize("target", TARGETS)
def test_a_launch_becomes_a_binary_for_the_target(target: str) -> None:
    with capture(target) as binaries:
        scaled(meta(4096))
    binary = only(binaries)
    assert (binary.kernel, binary.target, binary.grid, binary.num_warps) == ("scale_kernel", target, (2,), 4)
    assert 0 < binary.registers < 64
    assert binary.spilled == 0


@pytest.mark.parametrize("target", TARGETS)
def test_aligned_rows_are_read_in_vectors_and_others_element_by_element(target: str) -> None:
    with capture(target) as binaries:
        scaled(meta(4096))
        scaled(meta(4097))
        scaled(meta(4097)[1:])
    even, odd, misaligned = binaries
    assert (max(even.widths["load"]), max(even.widths["store"])) == (128, 128)
    assert (max(odd.widths["load"]), max(odd.widths["store"])) == (16, 16)
    assert (max(misaligned.widths["load"]), max(misaligned.widths["store"])) == (16, 128)


@pytest.mark.parametrize("target", TARGETS)
def test_spilled_registers_are_seen(target: str) -> None:
    x = meta(32768, dtype=torch.float32)
    with capture(target) as binaries:
        hungry_kernel[(1,)](x, x, BLOCK=32768, num_warps=1, enable_fp_fusion=True)
    assert only(binaries).spilled > 0


def test_arithmetic_in_bf16_is_seen() -> None:
    with capture("sm_90") as binaries:
        bf16_kernel[(1,)](meta(BLOCK), meta(BLOCK), BLOCK=BLOCK, enable_fp_fusion=True)
        bf16_kernel[(1,)](meta(BLOCK, dtype=torch.float32), meta(BLOCK), BLOCK=BLOCK, enable_fp_fusion=True)
        scaled(meta(4096))
    computes_in_bf16, *others = binaries
    assert computes_in_bf16.bf16_arithmetic
    assert not any(binary.bf16_arithmetic for binary in others)


def test_warps_of_64_threads_are_counted_as_such() -> None:
    config = launch_config("activation_forward", 4096, torch.bfloat16)
    with capture("gfx942"):
        assert launch_config("activation_forward", 4096, torch.bfloat16).num_warps == config.num_warps // 2


def test_everything_is_put_back_even_after_an_error() -> None:
    before = KernelInterface.__getitem__, dict(vars(driver)), launch_config("norm_affine", 64, torch.bfloat16)
    with pytest.raises(ZeroDivisionError), capture("gfx942"):
        raise ZeroDivisionError
    after = KernelInterface.__getitem__, dict(vars(driver)), launch_config("norm_affine", 64, torch.bfloat16)
    assert after == before


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset TRITON_INTERPRET"), capture("sm_90"):
        pass
