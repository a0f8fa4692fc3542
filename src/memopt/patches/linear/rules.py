"""What a recipe says about the outputs of linears."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from memopt.patches.base import OFF, Rules


def one_or_more(*words: str) -> BeforeValidator:
    """A pattern alone is a tuple of one, a list (from JSON) a tuple; `words` mean something of their own."""

    def as_tuple(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(value)
        return (value,) if isinstance(value, str) and value not in words else value

    return BeforeValidator(as_tuple)


class OutputRules(Rules):
    """Whether outputs of linears are recomputed in backward instead of saved."""

    recompute: Annotated[Literal["none", "auto"] | tuple[str, ...], one_or_more(OFF, "auto")] = "none"
    """Names of linears (shell wildcards) whose module runs again in backward; ``auto``: all where it saves bytes."""
