"""Chains of elementwise operations in a module's own code save their first inputs, and run again in backward.

While such a module runs, a function mode follows the functions that it calls (`memopt.recompute.chains`).
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from memopt.kernels.replay.function import recomputed_chain
from memopt.patches.functions import FollowingMode, may_follow
from memopt.recompute.chains import FOLLOWED, Chains
from memopt.saved.whole import kept_whole
from memopt.torch_compat import checkpointing_hook


class _Thread(threading.local):
    active: _Following | None = None


_thread = _Thread()


def followed_chains(module: nn.Module, given: object) -> AbstractContextManager[object]:
    """The context of one call of `module`: a mode that follows chains, unless one is active or not allowed."""
    is_followed = _thread.active is not None and _thread.active.follows()
    return nullcontext() if is_followed or not may_follow(module) else _Following()


#: A chain may have a kink, so scopes that compress keep its inputs whole.
_chain = kept_whole()(recomputed_chain)


class _Following(FollowingMode):
    def __enter__(self) -> Any:
        self._chains, self._hook = Chains(_chain), checkpointing_hook()
        self._around, _thread.active = _thread.active, self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _thread.active = self._around
        self._chains.end()

    def follows(self) -> bool:
        """False in what the module's code checkpoints, which runs again outside of this mode: it has to save the same
        tensors then."""
        return checkpointing_hook() is self._hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        follows = func in FOLLOWED and self.follows()
        return self._chains.run(func, args, kwargs or {}) if follows else func(*args, **(kwargs or {}))
