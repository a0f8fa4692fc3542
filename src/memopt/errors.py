"""Errors that reach the user. Each states in one plain sentence what happened, where, and what to do next.

The CLI prints ``message`` and ``hint`` without a traceback and exits with ``exit_code``. Any other exception is a bug
in memopt and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST = 1_200


class MemoptError(Exception):
    """memopt could not run: usage, missing or broken input, I/O (exit code 2)."""

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        self.message = _printable(message)
        self.hint = hint if hint is None else _printable(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


def printable(text: str, kept: str = "") -> str:
    """`text` in one line with control characters of terminals (but `kept`) escaped: names may come from untrusted
    files."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


def _printable(text: str) -> str:
    """:func:`printable` of `text`, shortened if it is long; line breaks in a library's message become spaces."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return printable("".join(" " if c.isspace() else c for c in text))


def first_of(texts: Sequence[str], shown: int = 5, between: str = ", ") -> str:
    """The first `shown` of `texts`, and the number of the others."""
    return between.join(texts[:shown]) + (f" and {len(texts) - shown} more" if len(texts) > shown else "")


class UsageError(MemoptError):
    """The command line does not fit: an unknown option or command, a missing or bad value."""


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises a UsageError if `value`, given for the argument `name`, is none of `choices`."""
    if value not in choices:
        raise UsageError(f"{name} is {value!r}, which is not one of its values.", f"Give one of {', '.join(choices)}.")


class RecipeError(MemoptError):
    """A recipe, or a key or value in it, is unknown or does not fit."""


class ModelError(MemoptError):
    """The model cannot be found, read, built or run."""


class InputsError(MemoptError):
    """A batch for the model cannot be read, made, or run."""


class LaunchTableError(MemoptError):
    """A table of launch configurations cannot be read or is not valid."""


class OutputError(MemoptError):
    """An output folder or file cannot be written."""


class StreamError(MemoptError):
    """The result cannot be printed: stdout is closed, or its disk is full."""


class NegativeVerdict(MemoptError):
    """memopt ran, and the answer is no: nothing to patch, already patched, a check failed (exit code 1)."""

    exit_code = 1
