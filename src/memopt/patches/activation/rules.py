"""What a recipe says about activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from memopt.patches.base import OFF, Effect, Rules

#: Codes of an activation's derivative, as in `memopt.kernels.derivative_codes.codes`.
CodeScheme = Literal["none", "published", "2bit", "3bit", "4bit", "8bit"]


class ActivationRules(Rules):
    """How activations are rewritten."""

    key = "activations"

    method: Literal["recompute", "none"] = "recompute"
    """Whether their output is recomputed in backward instead of kept."""
    code: CodeScheme = "none"
    """Keep a code of the derivative instead of the input: approximate, in the bits that the name says."""
    where: Literal["needed", "all"] = "needed"
    """``needed``: only where nothing keeps the output, else recomputing it costs as little and is exact."""
    relu: Literal["none", "mask"] = "none"
    """``mask``: a ReLU keeps one bit an element where nothing else keeps its output, which is exact."""

    old_spellings: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "relu": {"output": OFF},
        "code": {"4bit-stochastic": "4bit", "8bit-stochastic": "8bit"},
    }

    @property
    def effect(self) -> Effect:
        return "exact" if self.code == OFF else "approximate"
