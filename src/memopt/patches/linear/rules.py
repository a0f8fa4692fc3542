"""A recipe's rules for linears."""

from __future__ import annotations

from typing import Annotated, Literal

from memopt.patches.base import OFF, Rules, one_or_more


class LinearRules(Rules):
    """Whether outputs of linears are recomputed in backward instead of saved."""

    key = "linears"

    recompute: Annotated[Literal["none", "auto"] | tuple[str, ...], one_or_more(OFF, "auto")] = "none"
    """Names (shell wildcards) of linears whose module runs again in backward; ``auto``: every linear for which that
    saves bytes."""

    @property
    def is_off(self) -> bool:
        return self.recompute == OFF
