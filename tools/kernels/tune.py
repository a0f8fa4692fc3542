"""Makes the table of launch configurations.

    python -m tools.kernels.tune --check               exit 1 where launch.json differs from the result
    python -m tools.kernels.tune --out PATH            from binaries compiled ahead of time; needs no GPU
    python -m tools.kernels.tune --measure --out PATH  from timings on the GPU at hand

MEMOPT_LAUNCH_TABLE=PATH in the environment then uses the table. Without a GPU a candidate is refused where one of its
binaries spills registers or reads less than 128 bits a thread. The choice is the one with the fewest warps among those
that fill a multiprocessor to three quarters (`tools.kernels.occupancy`): these kernels are bound by memory, more
warps hide no more latency, and sums over a row cost a barrier where they cross warps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton

from memopt.kernels.base import launch
from memopt.kernels.base.launch import LaunchConfig, override
from tools.kernels.aot import Binary, capture
from tools.kernels.launches import VARIANTS, CallShape, Variant
from tools.kernels.occupancy import LIMITS, resident_warps

SHIPPED = Path(launch.__file__).with_name("launch.json")
ENOUGH_WARPS = 48
_DTYPES = {"16": torch.bfloat16, "32": torch.float32}
_VECTOR_BYTES = 16
_ROWS = 256
#: Bytes of one tensor where candidates are timed: larger than any cache.
_MEASURED_BYTES = 2**28


@dataclass(frozen=True)
class TuningCase:
    """One entry of the table to fill."""

    kernel: str
    bits: str
    up_to: int | None
    hidden: int
    """Length of the rows on which candidates are compared."""

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.bits]


@dataclass(frozen=True)
class Shape:
    """How the rows of a kernel are cut into tiles."""

    largest_row: int
    """Up to here a tile holds whole rows (0: never)."""
    largest_warps: int
    blocks: tuple[int, ...]
    """Candidates for the columns of a tile where rows are longer; in elements of 16 bits."""
    smallest_warps: int = 2
    """Where rows are longer."""


_SHAPES = {
    # Longer rows are walked through twice, by programs so large that few rows at a time are between the two.
    "norm_forward": Shape(16384, 32, (8192,), smallest_warps=16),
    "norm_affine": Shape(512, 4, (1024, 2048)),
    "norm_backward": Shape(16384, 32, (8192,), smallest_warps=32),
    "activation_forward": Shape(0, 8, (1024, 2048)),
    "activation_backward": Shape(0, 8, (1024, 2048)),
    "gated_forward": Shape(0, 8, (1024, 2048)),
    "gated_backward": Shape(0, 8, (1024, 2048)),
    # A program walks along a whole row, and a chunk of logits has only some hundred rows to fill a GPU with.
    "loss_forward": Shape(0, 16, (4096, 8192), smallest_warps=16),
    "loss_backward": Shape(0, 8, (1024, 2048)),
}


def cases() -> Iterator[TuningCase]:
    for kernel, shape in _SHAPES.items():
        for bits in _DTYPES:
            size = 16
            while size <= shape.largest_row:
                yield TuningCase(kernel, bits, size, size)
                size *= 2
            yield TuningCase(kernel, bits, None, max(4 * max(size, 1024), *shape.blocks))


def candidates(case: TuningCase) -> list[LaunchConfig]:
    """Configurations in which each thread holds one, two or four vectors of a tensor; fewest warps first."""
    shape = _SHAPES[case.kernel]
    vector = _VECTOR_BYTES // case.dtype.itemsize
    blocks = [case.up_to] if case.up_to else [block * 2 // case.dtype.itemsize for block in shape.blocks]
    found = set()
    for block in blocks:
        for vectors in (1, 2, 4):
            num_warps = 2 if case.up_to else shape.smallest_warps
            while num_warps <= shape.largest_warps:
                rows, rest = divmod(vectors * vector * 32 * num_warps, block)
                # Several rows a tile where rows are short; four warps are enough for those.
                if rest == 0 and (rows == 1 or (rows > 1 and case.up_to and num_warps <= 4)):
                    found.add(LaunchConfig(rows, block, num_warps))
                num_warps *= 2
    return sorted(found, key=lambda config: (config.num_warps, -config.rows * config.block))


def choose(case: TuningCase) -> LaunchConfig | None:
    """The best candidate by the resources of its binaries; None where all are refused."""
    best: tuple[int, LaunchConfig] | None = None
    for config in candidates(case):
        warps = _warps_of(case, config)
        if warps is None or (best is not None and warps <= best[0]):
            continue
        if _spills(case, config):
            continue
        best = warps, config
        if warps == ENOUGH_WARPS:
            break
    return best[1] if best else None


def measure(case: TuningCase) -> LaunchConfig:
    """The fastest candidate on the GPU, by the median of the kernel's heaviest variants."""
    times = {config: _milliseconds(case, config) for config in candidates(case)}
    return min(times, key=lambda config: times[config])


def _warps_of(case: TuningCase, config: LaunchConfig) -> int | None:
    """Warps on a multiprocessor, counted up to `ENOUGH_WARPS`; None where a binary spills or reads too little."""
    binaries = [binary for target in LIMITS for binary in _compiled(case, config, case.hidden, target, _heaviest(case))]
    # Stores have the layout of the loads, but for a few sums over rows.
    if any(binary.spilled or max(binary.widths["load"]) < 8 * _VECTOR_BYTES for binary in binaries):
        return None
    resident = (resident_warps(b.target, b.num_warps, b.registers, b.shared) for b in binaries)
    return min(ENOUGH_WARPS, *resident)


def _spills(case: TuningCase, config: LaunchConfig) -> bool:
    """Whether a variant spills, in full rows or in masked ones (of a model's sizes: multiples of 16)."""
    # The variants of a norm differ in their tensors; those of the other kernels in a formula.
    is_norm = case.kernel.startswith("norm")
    variants = [variant for variant in VARIANTS if variant.kernel == case.kernel] if is_norm else _heaviest(case)
    return any(
        binary.spilled
        for target in LIMITS
        for hidden in {case.hidden, max(16, case.hidden - 16)}
        for binary in _compiled(case, config, hidden, target, variants)
    )


def _heaviest(case: TuningCase) -> list[Variant]:
    return [variant for variant in VARIANTS if variant.kernel == case.kernel and variant.heaviest]


def _compiled(
    case: TuningCase, config: LaunchConfig, hidden: int, target: str, variants: Iterable[Variant]
) -> list[Binary]:
    binaries: list[Binary] = []
    for variant in variants:
        call = variant.prepare(CallShape(_ROWS, hidden, case.dtype, "meta"))
        with override(case.kernel, config), capture(target) as captured:
            call()
        binaries += captured
    return binaries


def _milliseconds(case: TuningCase, config: LaunchConfig) -> float:
    rows = max(1, _MEASURED_BYTES // (case.hidden * case.dtype.itemsize))
    total = 0.0
    for variant in _heaviest(case):
        call = variant.prepare(CallShape(rows, case.hidden, case.dtype, "cuda"))
        with override(case.kernel, config):
            total += triton.testing.do_bench(call, return_mode="median")
    return total


def make(measured: bool) -> dict[str, Any]:
    """The content of a table."""
    entries = list(cases())
    if measured:
        chosen: Iterable[LaunchConfig | None] = [measure(case) for case in entries]
        made = {"how": "measured", "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    else:
        with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
            chosen = list(pool.map(choose, entries))
        made = {"how": "compiled ahead of time", "targets": ", ".join(LIMITS)}
    launches: dict[str, dict[str, list[list[int | None]]]] = {}
    for case, config in zip(entries, chosen, strict=True):
        rows = launches.setdefault(case.kernel, {}).setdefault(case.bits, [])
        if config is None and case.up_to is None:
            raise RuntimeError(f"every candidate of {case.kernel} for long rows ({case.bits} bits) is refused")
        if config is not None:  # Rows for which every candidate is refused are left to the entry for long rows.
            rows.append([case.up_to, *astuple(config)])
    return {"made": made | {"triton": triton.__version__}, "launches": launches}


def render(table: dict[str, Any]) -> str:
    """JSON with one line for a kernel and size of element."""
    kernels = [
        f'    "{kernel}": {{\n'
        + ",\n".join(f'      "{bits}": {json.dumps(entries)}' for bits, entries in by_bits.items())
        + "\n    }"
        for kernel, by_bits in table["launches"].items()
    ]
    made = json.dumps(table["made"])
    return f'{{\n  "made": {made},\n  "launches": {{\n' + ",\n".join(kernels) + "\n  }\n}\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.kernels.tune", description="Make the table of launch configurations."
    )
    parser.add_argument("--measure", action="store_true", help="time the candidates on the GPU at hand")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, metavar="PATH", help="where to write the table")
    action.add_argument("--check", action="store_true", help="exit 1 where launch.json is not what this makes")
    options = parser.parse_args(arguments)
    if options.measure and (options.check or not torch.cuda.is_available()):
        parser.error("--measure needs a GPU and --out")
    if not options.check:
        options.out.write_text(render(make(options.measure)))
        return 0
    shipped = json.loads(SHIPPED.read_text())
    if shipped["made"].get("triton") != triton.__version__:
        print(f"launch.json was made with Triton {shipped['made'].get('triton')}, this is {triton.__version__}.")
        return 1
    if SHIPPED.read_text() != render(make(False)):
        print("launch.json is not what this makes. Make it with: python -m tools.kernels.tune --out", SHIPPED)
        return 1
    print("launch.json is what this makes.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
