"""Compiles what a launcher would launch, for a GPU that need not be there, and reads what the binary takes.

:func:`capture` runs real launchers on meta tensors. Each launch becomes an ahead-of-time compilation with the same
arguments, so the launchers' own choices (tile sizes, constants, alignment) are examined. Triton's wheel has every tool
for it. Used by tests, the table of resources and the tuner; no operator imports it.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as triton_compile
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface, MockTensor

from memopt.kernels.base.launch import warps_of
from tools.kernels.occupancy import LIMITS

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
#: Shared memory that one block may ask for, in bytes.
SHARED_LIMIT = {"gfx942": 65536} | {name: limits.shared_per_block for name, limits in LIMITS.items()}


@dataclass(frozen=True)
class Compiled:
    """What is read of one compiled kernel."""

    name: str
    num_warps: int
    shared: int
    """Bytes of shared memory a block takes."""
    asm: Mapping[str, str]
    """``ttir``, and ``ptx`` with the report of ``resources`` (NVIDIA) or ``amdgcn`` (AMD)."""


@dataclass(frozen=True)
class Binary:
    """One compiled launch."""

    kernel: str
    target: str
    grid: tuple[int, ...]
    num_warps: int
    shared: int
    asm: Mapping[str, str]

    @property
    def registers(self) -> int:
        """Registers of 32 bits a thread takes."""
        return self._resources["registers"]

    @property
    def spilled(self) -> int:
        """Bytes of registers a thread keeps in memory (AMD: and registers kept in other registers, 4 bytes each)."""
        return self._resources["spilled"]

    @cached_property
    def _resources(self) -> dict[str, int]:
        if "resources" in self.asm:
            return _resources_of_cubin(self.asm["resources"])
        return _resources_of_amdgcn(self.asm["amdgcn"])

    @cached_property
    def widths(self) -> dict[str, list[int]]:
        """Bits of every load and store of global memory, by ``"load"`` and ``"store"``."""
        return _widths_of_ptx(self.asm["ptx"]) if "ptx" in self.asm else _widths_of_amdgcn(self.asm["amdgcn"])

    @cached_property
    def bf16_arithmetic(self) -> list[str]:
        """Operations that compute in bf16: a kernel has to convert what it loads to fp32 first."""
        return _BF16_ARITHMETIC.findall(self.asm["ttir"])


@contextlib.contextmanager
def capture(target: str) -> Iterator[list[Binary]]:
    """Inside the `with`, kernels are compiled for `target` instead of launched; the list holds them in their order.

    Tensors must be on the device "meta". Raises RuntimeError in Triton's interpreter, whose kernels cannot be compiled.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("kernels cannot be compiled in Triton's interpreter: unset TRITON_INTERPRET")
    binaries: list[Binary] = []

    def subscript(kernel: JITFunction[Any], grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            kernel.device_caches[target]  # making the entry sets `compile` to Triton's
            kernel.compile = compile_kernel
            try:
                compiled = kernel.warmup(
                    *map(_as_pointer, args), grid=(1,), **{name: _as_pointer(value) for name, value in kwargs.items()}
                )
            finally:
                kernel.compile = triton_compile
            dims = grid(dict(zip(kernel.arg_names, args, strict=False)) | kwargs) if callable(grid) else grid
            binaries.append(
                Binary(compiled.name, target, tuple(dims), compiled.num_warps, compiled.shared, compiled.asm)
            )

        return launch

    subscript_before, driver_before = KernelInterface.__getitem__, dict(vars(driver))
    KernelInterface.__getitem__ = subscript
    driver.set_active(_StubDriver(target))
    try:
        with warps_of(TARGETS[target].warp_size):
            yield binaries
    finally:
        KernelInterface.__getitem__ = subscript_before
        # `driver.active` must not be read to be put back: reading it looks for a GPU and raises without one.
        vars(driver).clear()
        vars(driver).update(driver_before)


def compile_kernel(source: Any, target: GPUTarget, options: dict[str, Any]) -> Compiled:
    """Replaces Triton's `compile` inside :func:`capture`, without a cache; tests may put one in its place."""
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        kernel = triton_compile(source, target=target, options=options)
    asm = {kind: kernel.asm[kind] for kind in ("ttir", "ptx", "amdgcn") if kind in kernel.asm}
    if "cubin" in kernel.asm:
        asm["resources"] = _report_of_cubin(kernel.asm["cubin"])
    metadata = kernel.metadata
    return Compiled(metadata.name, metadata.num_warps, metadata.shared, asm)


class _StubDriver:
    """The methods of Triton's driver that compilation calls."""

    def __init__(self, target: str) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self._target]

    def get_current_device(self) -> str:
        # A kernel keeps one cache a device, so each target is a device of its own.
        return self._target

    def get_current_stream(self, device: object = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


class _Pointer(MockTensor):  # type: ignore[misc]
    """A tensor as a launch sees it: its dtype, the alignment of its first element, the size of its storage."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.dtype)
        self._address = int(tensor.storage_offset()) * tensor.element_size()
        self._nbytes = int(tensor.untyped_storage().nbytes())

    def data_ptr(self) -> int:
        return self._address

    def ptr_range(self) -> int:
        return self._nbytes


def _as_pointer(argument: Any) -> Any:
    return _Pointer(argument) if isinstance(argument, Tensor) else argument


def _report_of_cubin(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        return subprocess.check_output(command, text=True)


def _resources_of_cubin(report: str) -> dict[str, int]:
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", report))
    # Spilled registers stand in the stack frame; LOCAL stays 0.
    return {"registers": int(found["REG"]), "spilled": int(found["STACK"])}


def _resources_of_amdgcn(text: str) -> dict[str, int]:
    def value(key: str) -> int:
        match = re.search(rf"\.{key}:\s*(\d+)", text)
        return int(match[1]) if match else 0

    scratch = value("private_segment_fixed_size")
    in_registers = value("sgpr_spill_count")
    return {"registers": value("vgpr_count"), "spilled": scratch + 4 * in_registers}


_PTX_ACCESS = re.compile(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d+))?\.b(\d+)\b")
#: A load into shared memory, ahead of its use.
_PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global [^;]*?, 0x([0-9a-f]+)")
_AMD_ACCESS = re.compile(r"\b(?:global|buffer)_(load|store)_(dwordx?\d?|short|ushort|byte|ubyte|sbyte|sshort)\w*")
_AMD_BITS = {"dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}
_BF16_ARITHMETIC = re.compile(
    r"(?:arith\.(?:add|sub|mul|div|rem|neg|cmp|max|min|maximum|minimum|maxnum|minnum)f|math\.\w+)\b[^\n]*bf16"
)


def _widths_of_ptx(text: str) -> dict[str, list[int]]:
    widths: dict[str, list[int]] = {"load": [8 * int(nbytes, 16) for nbytes in _PTX_COPY.findall(text)], "store": []}
    for operation, count, bits in _PTX_ACCESS.findall(text):
        widths["load" if operation == "ld" else "store"].append(int(count or 1) * int(bits))
    return widths


def _widths_of_amdgcn(text: str) -> dict[str, list[int]]:
    widths: dict[str, list[int]] = {"load": [], "store": []}
    for operation, kind in _AMD_ACCESS.findall(text):
        widths[operation].append(_AMD_BITS.get(kind, 8 if kind.endswith("byte") else 16))
    return widths
