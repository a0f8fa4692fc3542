"""How many warps of a kernel an NVIDIA multiprocessor holds at a time, from what one block takes.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (limits a multiprocessor), and
NVIDIA's occupancy calculator (units of allocation: 256 registers a warp, four warps, 128 bytes of shared memory after
1 KiB that the system takes from every block).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The resources of one multiprocessor."""

    warps: int
    blocks: int
    registers: int
    shared: int
    shared_per_block: int


LIMITS = {
    "sm_80": Limits(warps=64, blocks=32, registers=65536, shared=164 * 1024, shared_per_block=163 * 1024),
    "sm_90": Limits(warps=64, blocks=32, registers=65536, shared=228 * 1024, shared_per_block=227 * 1024),
    "sm_100": Limits(warps=64, blocks=32, registers=65536, shared=228 * 1024, shared_per_block=227 * 1024),
}

_REGISTER_UNIT, _WARP_UNIT, _SHARED_UNIT, _SHARED_OF_SYSTEM = 256, 4, 128, 1024


def resident_warps(target: str, num_warps: int, registers: int, shared: int) -> int:
    """Warps on one multiprocessor of `target` for blocks of `num_warps` warps.

    Args:
        target: a key of :data:`LIMITS`.
        num_warps: warps of a block.
        registers: registers a thread takes.
        shared: bytes of shared memory a block takes.
    """
    limits = LIMITS[target]
    registers_per_warp = _round_up(max(registers, 1) * 32, _REGISTER_UNIT)
    warps_by_registers = limits.registers // registers_per_warp // _WARP_UNIT * _WARP_UNIT
    shared_per_block = _round_up(shared + _SHARED_OF_SYSTEM, _SHARED_UNIT)
    blocks = min(
        limits.blocks,
        limits.warps // num_warps,
        warps_by_registers // num_warps,
        limits.shared // shared_per_block,
    )
    return blocks * num_warps


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
