"""A recipe's rules for activations."""

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
    """Whether backward recomputes the outputs of activations instead of reading saved ones."""
    code: CodeScheme = "none"
    """Save a code of the derivative, with so many bits an element, instead of the input. This is approximate."""
    where: Literal["needed", "all"] = "needed"
    """``needed``: save a code only if nothing saves the output; otherwise recomputing saves as much and is exact."""
    relu: Literal["none", "mask"] = "none"
    """``mask``: a ReLU saves one bit an element if nothing else saves its output. This is exact."""

    old_spellings: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "relu": {"output": OFF},
        "code": {"4bit-stochastic": "4bit", "8bit-stochastic": "8bit"},
    }

    @property
    def effect(self) -> Effect:
        return "exact" if self.code == OFF else "approximate"
