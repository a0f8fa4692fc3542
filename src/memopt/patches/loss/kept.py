"""Logits that the user keeps over an optimizer's step, for metrics at the end of an epoch for example.

Logits that were not computed can no longer be computed when the weights of their head have changed. So those without a
graph that are alive when an optimizer steps, and that nothing has read, are computed just before the step.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from memopt.patches.loss.source import say_whole

if TYPE_CHECKING:
    from memopt.patches.loss.lazy import LazyLogits

#: id -> logits without a graph that were handed out since the last step of an optimizer.
_waiting: dict[int, weakref.ref[LazyLogits]] = {}
#: The hook of the next step, if logits wait for it: compiled optimizers see none at other times.
_hooks: list[RemovableHandle] = []


def wait(logits: LazyLogits) -> None:
    """Compute `logits`, which have no graph, before the next step of an optimizer if they are alive and unread then."""
    key = id(logits)
    _waiting[key] = weakref.ref(logits, lambda _: _waiting.pop(key, None))
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(*given: Any) -> None:
    while _hooks:
        _hooks.pop().remove()
    kept = [each for reference in [*_waiting.values()] if (each := reference()) is not None]
    _waiting.clear()
    for each in kept:
        # ZeRO-3 gathers the weights of a head by collectives, which all ranks would have to call here.
        if each.value is None and not each.is_read and not each.source.head.gathers:
            with contextlib.suppress(RuntimeError):  # changed already, or no memory: an error for whoever reads them
                each.fill()
                say_whole(each.source.head.module, "an optimizer steps while they are kept without having been read")
