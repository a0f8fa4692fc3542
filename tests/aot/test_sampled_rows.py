"""What the compiler makes of the kernels of sampled rows: no spills, whole vectors, matrix units, nothing in bf16."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from triton.backends.compiler import GPUTarget

from memopt.kernels.sampled_linear.rows_triton import launch_gather_rows, launch_row_norms, launch_weight_gradient
from tests.aot.cases import BACKENDS, WHOLE, dealt
from tools.kernels import aot
from tools.kernels.aot import SHARED_LIMIT, Binary, capture

#: Rows, kept rows, in, out: whole tiles; a budget's number of rows; a small dW; nothing that a vector fits.
SIZES = [(4096, 1024, 2048, 2048), (4096, 1229, 2048, 2048), (4096, 1229, 384, 1536), (4097, 1229, 999, 1001)]
ODD = SIZES[-1]
DTYPES = [torch.bfloat16, torch.float32]
NORMS, GATHER, GRADIENT = "row_norms_kernel", "gather_rows_kernel", "weight_gradient_kernel"
#: The instruction of the matrix units on 16-bit numbers.
MATRIX = {
    "sm_80": r"mma\.sync.*bf16",
    "sm_90": r"wgmma\.mma_async.*bf16",
    "sm_100": r"tcgen05\.mma",
    "gfx942": r"v_mfma",
}

Compiled = list[tuple[tuple[int, ...], torch.dtype, Binary]]


def launch(size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    n, k, ins, outs = size
    x, dy = (torch.empty(n, width, dtype=dtype, device="meta") for width in (ins, outs))
    rows, weights = torch.empty(k, dtype=torch.int32, device="meta"), torch.empty(k, device="meta")
    launch_row_norms(x)
    launch_weight_gradient(dy, launch_gather_rows(x, rows), rows, weights)


@pytest.fixture(scope="module", params=WHOLE)
def compiled(request: pytest.FixtureRequest) -> Compiled:
    """Size, dtype and binary of launches."""
    found = []
    calls = [(dtype, size) for dtype in DTYPES for size in SIZES]
    heaviest = (torch.bfloat16, SIZES[1])
    for (dtype, size), target in dealt(calls, whole=request.param, everywhere=lambda call: call == heaviest):
        with capture(target) as binaries:
            launch(size, dtype)
        assert [binary.kernel for binary in binaries] == [NORMS, GATHER, GRADIENT]
        found += [(size, dtype, binary) for binary in binaries]
    return found


def test_nothing_spills_and_shared_memory_is_within_the_limit(compiled: Compiled) -> None:
    for size, dtype, binary in compiled:
        assert binary.shared <= SHARED_LIMIT[binary.target]
        if binary.target == "gfx942" and size == ODD and binary.kernel == GRADIENT:
            # The masks of single elements are kept in other registers, not in memory.
            assert re.search(r"private_segment_fixed_size:\s*0\b", binary.asm["amdgcn"])
        else:
            assert not binary.spilled, (size, dtype, binary.kernel, binary.target)


def test_rows_are_read_and_written_in_whole_vectors(compiled: Compiled) -> None:
    for size, dtype, binary in compiled:
        if size == ODD:
            continue
        if binary.kernel == GRADIENT:
            # What is copied to shared memory at once is no load of the table, and says its bytes. AMD's matrix units
            # leave each thread four columns.
            copies = re.findall(r"cp\.async\.\w+\.shared\.global[^;]*, 0x(\d+)", binary.asm.get("ptx", ""))
            loads = [int(count, 16) * 8 for count in copies]
            assert max(binary.widths["load"] + loads) == 128, (size, dtype)
            assert max(binary.widths["store"]) >= (64 if binary.target == "gfx942" else 128)
        else:
            assert max(binary.widths["load"]) == 128
            assert max(binary.widths["store"]) == (32 if binary.kernel == NORMS else 128)


def test_16_bit_gradients_run_on_the_matrix_units(compiled: Compiled) -> None:
    for _, dtype, binary in compiled:
        if binary.kernel == GRADIENT and dtype == torch.bfloat16:
            assert re.search(MATRIX[binary.target], binary.asm.get("ptx") or binary.asm["amdgcn"])


@pytest.fixture
def matmul_precision() -> Iterator[None]:
    """Restores the precision of products: the older setting and the newer ones overwrite each other."""
    yield
    torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.usefixtures("matmul_precision")
def test_fp32_is_multiplied_as_pytorchs_setting_says(older: bool) -> None:
    for precision in ("ieee", "tf32"):
        if older:
            torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        else:
            torch.backends.cuda.matmul.fp32_precision = precision
        with capture("sm_80") as binaries:
            launch(SIZES[0], torch.float32)
        assert ("tf32" in binaries[-1].asm["ptx"]) == (precision == "tf32")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("matmul_precision")
def test_amd_gpus_whose_compiler_has_no_tf32_multiply_in_ieee(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(aot.TARGETS, "gfx90a", GPUTarget("hip", "gfx90a", 64))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    torch.set_float32_matmul_precision("high")
    with capture("gfx90a") as binaries:
        launch(SIZES[0], dtype)
    assert [binary.kernel for binary in binaries] == [NORMS, GATHER, GRADIENT]


def test_nothing_is_computed_in_bf16(compiled: Compiled) -> None:
    assert not any(binary.bf16_arithmetic for _, _, binary in compiled)


@pytest.mark.parametrize("target", BACKENDS)
def test_another_number_of_rows_does_not_compile_again(target: str) -> None:
    with capture(target) as binaries:
        for n, k in ((4096, 1229), (4098, 1231), (8190, 2457)):
            launch((n, k, 2048, 2048), torch.bfloat16)
    for kernel in (NORMS, GATHER, GRADIENT):
        assert len({id(binary.asm) for binary in binaries[3:] if binary.kernel == kernel}) == 1
