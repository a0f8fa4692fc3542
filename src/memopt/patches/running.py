"""The scope that runs at this moment in a patched model, for checks of the tensors saved when a scope ends."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from torch import nn

from memopt.patches.scope import ScopeRewrite
from memopt.patches.swap import is_swapped, swap_state


class RunningScopes:
    """Context manager; `current` names the innermost running module with a scope, and is empty outside of scopes."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._names, self._hooks = model, [""], contextlib.ExitStack()

    @property
    def current(self) -> str:
        return self._names[-1]

    def __enter__(self) -> RunningScopes:
        for name, module in self._model.named_modules():
            state = swap_state(module) if is_swapped(module) else None
            if isinstance(getattr(state, "scope", state), ScopeRewrite):
                enter = module.register_forward_pre_hook(functools.partial(self._enter, name))
                self._hooks.callback(enter.remove)
                self._hooks.callback(module.register_forward_hook(self._leave, always_call=True).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _enter(self, name: str, *call: Any) -> None:
        self._names.append(name)

    def _leave(self, *call: Any) -> None:
        self._names.pop()
