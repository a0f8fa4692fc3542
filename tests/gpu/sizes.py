"""Sizes of the tests: those for a real device, and smaller ones where an emulated device interprets the kernels."""

from __future__ import annotations

from memopt.kernels.base.device import INTERPRETED


def size(real: int, interpreted: int) -> int:
    """`real`, or `interpreted` where every program of a kernel takes milliseconds of Python."""
    return interpreted if INTERPRETED else real
