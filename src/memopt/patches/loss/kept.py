"""Logits that the user keeps over an optimizer's step, for metrics at the end of an epoch for example.

Logits that were not computed can no longer be computed when the weights of their head have changed. So those without a
graph that are alive when an optimizer steps, and that nothing has read, are computed just before the step. Where the
step calls a closure that runs the model (Lightning, LBFGS), that is when the closure's backward ends.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from memopt.patches.loss.source import Snapshot, say_whole
from memopt.torch_compat import at_the_end_of_backward

if TYPE_CHECKING:
    from memopt.patches.loss.lazy import LazyLogits

_Waiting = dict[int, weakref.ref["LazyLogits"]]
#: id -> logits without a graph that were handed out since the last step of an optimizer.
_waiting: _Waiting = {}
#: The same, of logits that were handed out inside a step.
_inside: _Waiting = {}
#: The hook of the next step, if logits wait for it: compiled optimizers see none at other times.
_hooks: list[RemovableHandle] = []
#: The code that runs around every step of an optimizer.
_STEP = Optimizer.profile_hook_step(lambda *_: None).__code__


def wait(logits: LazyLogits) -> None:
    """Compute `logits`, which have no graph, before an optimizer changes weights, if they are alive and unread then."""
    if _is_inside_a_step():
        if logits.source.head.snapshot.is_late and logits.source.head.records:
            logits.fill()
        else:
            _add(_inside, logits)
        return
    _add(_waiting, logits)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def note_backward(loss: Tensor, snapshots: Iterable[Snapshot]) -> None:
    """Let the backward of `loss` mark the `snapshots` as late when it begins: an optimizer's step may follow it."""

    def begin(*given: Any) -> None:
        for each in snapshots:
            each.is_late = True
        if _inside:
            at_the_end_of_backward(lambda: _compute(_inside))

    assert loss.grad_fn is not None
    loss.grad_fn.register_prehook(begin)


def _add(table: _Waiting, logits: LazyLogits) -> None:
    key = id(logits)
    table[key] = weakref.ref(logits, lambda _: table.pop(key, None))


def _is_inside_a_step() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not _STEP:
        frame = frame.f_back
    return frame is not None


def _before_step(*given: Any) -> None:
    while _hooks:
        _hooks.pop().remove()
    _compute(_waiting)


def _compute(table: _Waiting) -> None:
    kept = [each for reference in [*table.values()] if (each := reference()) is not None]
    table.clear()
    for each in kept:
        # ZeRO-3 gathers the weights of a head by collectives, which all ranks would have to call here.
        if each.value is None and not each.is_read and not each.source.head.gathers:
            with contextlib.suppress(RuntimeError):  # changed already, or no memory: an error for whoever reads them
                each.fill()
                say_whole(each.source.head.module, "an optimizer steps while they are kept without having been read")
