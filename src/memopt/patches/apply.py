"""Apply a plan to a live model, and undo it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from memopt.environment.partitioned import gathered, hooks_lifted, offloads
from memopt.patches.base import PlanView, Rows
from memopt.patches.functions import patch_functions
from memopt.patches.registry import patches
from memopt.patches.scope import ScopeRewrite, choose_scopes, patch_scope
from memopt.patches.swap import is_swapped, replaced_by, unswap

#: Key in :attr:`Applied.done` of modules that no patch rewrote and that only run in a scope.
SCOPE = "scope"


@dataclass(frozen=True)
class Applied:
    """The result of :func:`apply`."""

    plan: PlanView
    """The plan as it was carried out: refused sites are marked as not rewritten."""
    done: Mapping[str, tuple[str, ...]]
    """Patch -> names of the modules that it changed."""
    refused: tuple[tuple[str, str], ...]
    """(module, reason) of planned rewrites that were refused because the live module does not admit them."""


def apply(model: nn.Module, plan: PlanView, *, folded: Collection[str] = ()) -> Applied:
    """Rewrite the modules of `model` as `plan` says, in place and reversibly; weights are not changed.

    Args:
        model: the model that `plan.sites` describes (same module names).
        plan: the rewrites. Norms that it folds are only shared here, because folds change checkpoints.
        folded: names of norms whose affine is already folded into other weights of `model`.
    """
    every = {patch: patch.scope(plan) for patch in patches()}
    live = _Live(model, dict(model.named_modules()), plan, folded, choose_scopes(plan, [*every.values()]))
    with hooks_lifted(model):
        for patch, its in every.items():
            patch.apply(live)
            for name, mode in its.modes.items():
                if name not in live.scopes:  # a module's own scope enters its modes
                    live.attempt(patch.name, name, patch_functions, mode)
        for name, scope in live.scopes.items():
            if not is_swapped(live.modules[name]):
                live.attempt(SCOPE, name, patch_scope, scope)
        for patch in patches():
            patch.finish(live)
    rows: dict[str | None, Rows | None] = {patch.name: patch.rows for patch in patches()}
    for by, name, reason in live.refused:
        if (of_patch := rows.get(by)) is not None:
            plan = plan.left(of_patch.kind, name, reason)
    refused = tuple((name, reason) for _, name, reason in live.refused)
    return Applied(plan, {patch: tuple(names) for patch, names in live.rewritten.items()}, refused)


class _Live:
    """`memopt.patches.base.Live`."""

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        plan: PlanView,
        folded: Collection[str],
        scopes: Mapping[str, ScopeRewrite],
    ) -> None:
        self.model, self.modules, self.plan, self.folded, self.scopes = model, modules, plan, folded, scopes
        self.rewritten: dict[str, list[str]] = {}
        self.refused: list[tuple[str | None, str, str]] = []
        """(patch, module, reason)"""

    def done(self, patch: str) -> Collection[str]:
        return self.rewritten.get(patch, ())

    def attempt(self, patch: str, name: str, rewrite: Callable[..., None], *arguments: Any, **options: Any) -> None:
        if offloads(self.modules[name]):
            return self.refuse(
                name, "accelerate loads its weights only for its own call, and they get no gradient", patch
            )
        try:
            # A scope is not checked against parameter values, so the weights of its whole block stay partitioned.
            with nullcontext() if patch == SCOPE else gathered(self.modules[name]):
                rewrite(self.modules[name], *arguments, **options)
            self.rewritten.setdefault(patch, []).append(name)
        except ValueError as reason:
            self.refuse(name, str(reason), patch)

    def refuse(self, name: str, reason: str, patch: str | None = None) -> None:
        self.refused.append((patch, name, reason))


def undo(model: nn.Module) -> int:
    """Give every patched module of `model` its stock forward back; returns the number of these modules."""
    swapped = [module for module in model.modules() if is_swapped(module)]
    with hooks_lifted(model):
        for module in swapped:
            unswap(module)
    return len(swapped)


def is_patched(model: nn.Module) -> bool:
    """Whether any module of `model` runs a forward of memopt's."""
    return any(is_swapped(module) and replaced_by(module) is None for module in model.modules())
