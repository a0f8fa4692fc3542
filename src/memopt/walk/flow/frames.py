"""Finds the modules that run by the frames of the Python code, since a call of a method, or of `forward`, starts no
hook."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from types import FrameType

from torch import nn


def running(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, bool]]:
    """(name, whether it is the forward) for each running method of one of `modules`, the innermost first."""
    names = {id(module): name for name, module in modules.items()}
    frame: FrameType | None = sys._getframe(1) if names else None
    while frame is not None:
        if (name := names.get(id(frame.f_locals.get("self")))) is not None:
            yield name, frame.f_code is getattr(inspect.unwrap(type(modules[name]).forward), "__code__", None)
        frame = frame.f_back


def hidden_around(name: str, modules: Mapping[str, nn.Module], called: list[str]) -> dict[str, nn.Module]:
    """The modules with a forward around the module `name` that are not among those `called`."""
    found = {}
    while (name := name.rpartition(".")[0]) and name not in called:
        if type(modules[name]).forward is not nn.Module.forward:  # no mere list of modules
            found[name] = modules[name]
    return found
