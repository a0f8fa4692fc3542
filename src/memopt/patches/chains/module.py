"""Chains of elementwise operations in a module's own code save what they begin with, and run again in backward.

While such a module runs, a function mode follows what its functions do (`memopt.recompute.chains`).
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from memopt.kernels.replay.function import recomputed_chain
from memopt.patches.swap import steps_aside
from memopt.recompute.chains import FOLLOWED, Chains
from memopt.saved.observer import is_observed
from memopt.saved.scope import in_a_scope, packing_unseen
from memopt.torch_compat import has_any_global_hook, module_hooks


class _Thread(threading.local):
    is_following = False


_thread = _Thread()


def followed_chains(module: nn.Module, given: object) -> AbstractContextManager[object]:
    """The context of one call of `module`.

    Not where a hook inside may capture a tensor: the gradient of what is made of that tensor would not come to it.
    """
    is_off = steps_aside() or _thread.is_following or (has_any_global_hook() and not is_observed())
    if is_off or any(any(module_hooks(child)) for child in module.modules() if child is not module):
        return nullcontext()
    return _Following()


class _Following(TorchFunctionMode):
    def __enter__(self) -> Any:
        self._chains, _thread.is_following = Chains(recomputed_chain), True
        self._packing = packing_unseen() if in_a_scope() else nullcontext()
        self._packing.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._packing.__exit__(*error)
        _thread.is_following = False
        self._chains.end()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._chains.run(func, args, kwargs or {}) if func in FOLLOWED else func(*args, **(kwargs or {}))
