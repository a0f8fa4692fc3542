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


class _Thread(threading.local):
    is_following = False


_thread = _Thread()


def followed_chains(module: nn.Module, given: object) -> AbstractContextManager[object]:
    """The context of one call of `module`: a mode that follows chains, unless one is active or not allowed."""
    return nullcontext() if _thread.is_following or not may_follow(module) else _Following()


class _Following(FollowingMode):
    def __enter__(self) -> Any:
        self._chains, _thread.is_following = Chains(recomputed_chain), True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _thread.is_following = False
        self._chains.end()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._chains.run(func, args, kwargs or {}) if func in FOLLOWED else func(*args, **(kwargs or {}))
