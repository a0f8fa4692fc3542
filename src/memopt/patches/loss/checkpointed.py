"""Logits that a checkpointed function reads: its second run, in backward, has to save the tensors of its first run.

The second run would find other logits than the first run if a function computed them whole in between:

    first run     records the logits that it reads uncomputed
    second run    reads a stand-in for each of them, which begins uncomputed and takes the computed logits as its value

And what computing the logits saves belongs to the call only if they were made inside it: the second run does not
compute logits that exist.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch.autograd.graph import saved_tensors_hooks

from memopt.patches.loss.source import Source, say_whole
from memopt.torch_compat import (
    calls_of_checkpointing,
    checkpointed_call,
    checkpointing_hook,
    is_selectively_checkpointed,
    no_dispatch,
    top_saved_tensors_hooks,
    without_foreign_hooks,
)

if TYPE_CHECKING:
    from memopt.patches.loss.lazy import LazyLogits


class Around:
    """The saved-tensor hooks around the function that made logits, and the checkpointed calls that read them since."""

    def __init__(self) -> None:
        hooks, found = top_saved_tensors_hooks(False), checkpointed_call()
        self._call = None if found is None else weakref.ref(found[0])
        is_users = hooks is not None and checkpointing_hook() is None and not hasattr(hooks[0], "memopt_outer_pack")
        self._hooks = hooks if is_users else None
        """The user's hooks, of offloading for example."""
        self._sources: WeakKeyDictionary[Any, Source] = WeakKeyDictionary()
        """Call -> the source of the logits at its first read, if they were uncomputed then."""
        self._stand_ins: WeakKeyDictionary[Any, LazyLogits] = WeakKeyDictionary()
        """Hook of a second run -> the logits that it reads instead."""

    def as_first_read(self, logits: LazyLogits) -> LazyLogits:
        """`logits` for a function inside a checkpointed call: both runs of the call get them in one state."""
        found = checkpointed_call()
        if found is None:
            logits.compute()  # the runs cannot be told apart
            return logits
        call, is_second = found
        if self._is_inside(call):
            return logits
        if not is_second and logits.value is None and logits.is_as_made:
            if calls_of_checkpointing() > 1:  # the second run of the outer call would save computed logits for this one
                say_whole(logits.source.head.module, "a checkpointed function inside another one reads them")
                logits.compute()
            else:
                self._sources.setdefault(call, logits.source)
        if not is_second or logits.value is None or call not in self._sources:
            return logits
        hook = checkpointing_hook()
        if hook not in self._stand_ins:
            self._stand_ins[hook] = logits.stand_in(self._sources[call])
        return self._stand_ins[hook]

    @staticmethod
    def unseen() -> AbstractContextManager[object]:
        """Hides a read by chunks from selective checkpointing, which would save products that are overwritten in place.
        Both runs compute them then."""
        return no_dispatch() if is_selectively_checkpointed() else nullcontext()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Computes the logits where they were made: a checkpointed call around their first read does not see it."""
        found = checkpointed_call()
        if checkpointing_hook() is None or (found is not None and self._is_inside(found[0])):
            yield
            return
        with without_foreign_hooks() if self._hooks is None else saved_tensors_hooks(*self._hooks), self.unseen():
            yield

    def _is_inside(self, call: object) -> bool:
        return self._call is not None and self._call() is call
