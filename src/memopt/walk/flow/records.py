"""Records of an observed forward: every use of each parameter, and the operations that each norm's output reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from memopt.recompute.versions import versions_of
from memopt.walk.aten.contractions import Reading
from memopt.walk.probes.probe import NormProbe
from memopt.walk.sites import Reach

#: "contract": contracted with a norm's output; "raw": with another tensor; "mixed": with a norm's output, but not one
#: known channel for each coordinate; "bias": added to the product of `weight`; "other": any other use.
UseKind = Literal["contract", "raw", "mixed", "bias", "other"]


@dataclass(frozen=True, eq=False)
class Use:
    """One way in which a parameter is used."""

    kind: UseKind
    module: str
    operation: str
    reading: Reading | None = None
    bias: str | None = None
    same_storage: bool = False
    weight: str = ""

    def repeats(self, other: Use) -> bool:
        """Whether `other` is the same use, tensors compared by value."""
        mine, theirs = ((u.kind, u.module, u.operation, u.bias, u.same_storage, u.weight) for u in (self, other))
        if mine != theirs or (self.reading is None) != (other.reading is None):
            return False
        a, b = self.reading, other.reading
        if a is None or b is None:
            return True
        plain = (a.axis, a.shift, a.scale) == (b.axis, b.shift, b.scale)
        return plain and torch.equal(a.coordinates, b.coordinates) and torch.equal(a.channels, b.channels)


@dataclass(eq=False)
class NormRecord:
    """The observations of one norm: its calls, and where its output went."""

    name: str
    probe: NormProbe
    base: int = -1
    width: int = 0
    calls: int = 0
    rejected: str | None = None
    """Why a call shows that it is not the norm that the probe found; None where every call agrees."""
    reaches: dict[Reach, None] = field(default_factory=dict)
    storages: set[int] = field(default_factory=set)
    inputs: list[tuple[Tensor, int]] = field(default_factory=list)
    """The inputs of the forward that is running, with their versions."""
    outputs: list[tuple[Tensor, int]] = field(default_factory=list)
    """The outputs of the forward that is running, with their versions."""
    input_changes: bool = False
    """Whether a forward changed an input in place after the norm ran."""
    output_changes: bool = False
    """Whether a forward changed an output in place."""

    def ends(self) -> None:
        """Called at the end of a forward."""
        self.input_changes |= _have_changed(self.inputs)
        self.output_changes |= _have_changed(self.outputs)
        self.inputs.clear()
        self.outputs.clear()


def _have_changed(tensors: list[tuple[Tensor, int]]) -> bool:
    return any(versions_of([tensor]) != [version] for tensor, version in tensors)
