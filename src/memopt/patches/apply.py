"""Apply a plan to a live model, and undo it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from memopt.environment.partitioned import hooks_lifted
from memopt.patches.base import SCOPE, Live, PlanView, Rows
from memopt.patches.functions import patch_functions
from memopt.patches.registry import patches
from memopt.patches.scope import choose_scopes, patch_scope
from memopt.patches.swap import is_swapped, replaced_by, unswap


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
    live = Live(model, dict(model.named_modules()), plan, folded, choose_scopes(plan, [*every.values()]))
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
