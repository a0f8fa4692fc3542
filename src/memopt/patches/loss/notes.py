"""What computed the logits of a training step whole, said once a place."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

#: Head -> why its logits were computed whole in a training step.
whole: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


def say_whole(head: nn.Module, why: str) -> None:
    """Warn, once a reason, that logits of `head` are computed whole in a training step."""
    if why not in whole.setdefault(head, []):
        whole[head].append(why)
        same = "the loss and its gradients are the same, without the saving"
        warnings.warn(f"memopt: the logits of this step are computed whole, since {why}; {same}.", stacklevel=2)


def note(func: Any, head: nn.Module) -> None:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(func.__self__, "__name__", name)
    place = next(_places(), None)
    if place is not None:
        say_whole(head, f"'{name}' reads them at {place[0]}:{place[1]}")


def _places() -> Iterator[tuple[str, int]]:
    """Where the functions that are running were called, the innermost first, PyTorch and this package left out."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("torch", "memopt"):
            yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
