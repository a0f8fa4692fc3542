"""What a recipe says about the outputs of linears."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from memopt.patches.base import OFF, Rules


def one_or_more(*words: str) -> BeforeValidator:
    """A pattern alone is a tuple of one; `words` mean something of their own."""
    return BeforeValidator(lambda value: (value,) if isinstance(value, str) and value not in words else value)


class OutputRules(Rules):
    """Whether outputs of linears are recomputed in backward instead of saved."""

    recompute: Annotated[Literal["none", "auto"] | tuple[str, ...], one_or_more(OFF, "auto")] = "none"
    """Names of linears (shell wildcards) whose module runs again in backward; ``auto``: all where it saves bytes."""
