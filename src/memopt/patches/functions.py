"""Modules whose forward runs inside torch function modes, which see the functions that the forward calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from memopt.patches.swap import restore_forward, state_of, steps_aside, swap_forward, wraps_any_forward
from memopt.saved.observer import is_observed
from memopt.saved.scope import in_a_scope, packing_unseen
from memopt.torch_compat import has_any_global_hook, module_hooks

#: (module, arguments of one call) -> the context around that call.
Mode = Callable[[nn.Module, Sequence[Any]], AbstractContextManager[object]]


class FollowingMode(TorchFunctionMode):
    """A mode that gives results of a module's own code other autograd nodes. It does not see how a scope packs them."""

    def __enter__(self) -> Any:
        self._packing = packing_unseen() if in_a_scope() else nullcontext()
        self._packing.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._packing.__exit__(*error)


def may_follow(module: nn.Module) -> bool:
    """Whether a :class:`FollowingMode` may be active in a call of `module`: not if a hook inside may capture an
    intermediate result, since gradients could then bypass that tensor."""
    if steps_aside() or (has_any_global_hook() and not is_observed()):
        return False
    return not any(any(module_hooks(child)) for child in module.modules() if child is not module)


@dataclass(frozen=True)
class FunctionsRewrite:
    """State of a module that runs inside function modes."""

    modes: tuple[Mode, ...]
    """The modes, the outermost first."""


def patch_functions(module: nn.Module, mode: Mode) -> None:
    """Let `module` run inside `mode`, and inside the modes that it already has."""
    swap_forward(module, _forward, FunctionsRewrite((*without_modes(module), mode)))


def without_modes(module: nn.Module) -> tuple[Mode, ...]:
    """Undo :func:`patch_functions` and return the modes, for another rewrite of `module`; () if it has no modes."""
    rewrite = state_of(module, FunctionsRewrite)
    if rewrite is None:
        return ()
    restore_forward(module)
    return rewrite.modes


@wraps_any_forward
def _forward(stock: Callable[..., Any], rewrite: FunctionsRewrite, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return run_inside(rewrite.modes, stock, module, *args, **kwargs)


def run_inside(modes: tuple[Mode, ...], run: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``run(module, *args, **kwargs)`` inside `modes`."""
    if not modes:
        return run(module, *args, **kwargs)
    with modes[0](module, (*args, *kwargs.values())):  # recursive, because an ExitStack would break a compiled graph
        return run_inside(modes[1:], run, module, *args, **kwargs)
