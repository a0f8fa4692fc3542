"""A recipe's rules for linears: choose the linears whose output is recomputed, and give the reasons for the others."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Annotated, Literal

from memopt.patches.base import EXCLUDED, LEFT, OFF, READS, Patterns, PlanView, Rules, any_matches, one_or_more
from memopt.walk.sites import LinearSite, Sites, is_inside

RECOMPUTE = "recompute output"
#: An output with fewer channels than the hidden size / _NARROW (an adapter's) is recomputed only if it is named.
_NARROW = 4


class LinearRules(Rules):
    """Whether outputs of linears are recomputed in backward instead of saved."""

    key = "linears"

    recompute: Annotated[Literal["none", "auto"] | tuple[str, ...], one_or_more(OFF, "auto")] = "none"
    """Names (shell wildcards) of linears whose module runs again in backward; ``auto``: every linear for which that
    saves bytes."""

    @property
    def is_off(self) -> bool:
        return self.recompute == OFF

    def patterns(self, sites: Sites) -> Iterator[Patterns]:
        yield Patterns(f"{self.key}.recompute", self.recompute, {output_name(site) for site in sites.linears}, "linear")


def decide_linear(site: LinearSite, plan: PlanView, producers: Collection[str]) -> tuple[str, str]:
    """The action for a linear, and the reason; `producers`: names from :func:`recomputed_producers`."""
    action, why = _decide_output(site, plan, producers) or (LEFT, "")
    if action == RECOMPUTE:
        return action, why
    if site.fed_by in producers:
        input = f"saves no input of its own: {site.fed_by} saves it, or the tensors that it is recomputed from"
        return READS, "; ".join(filter(None, (input, why)))
    shared = ", ".join(site.input_shared_with)
    fed = f"; its input comes from {site.fed_by}" if site.fed_by else ""
    return LEFT, why or "exact as it is" + (f"; its input is one storage with {shared}" if shared else fed)


def recomputed_producers(plan: PlanView) -> set[str]:
    """Sites that save their output, or the tensors to recompute it from, even if no trained linear reads it."""
    return {entry.site for entry in plan.rewrites if entry.action != "code"}


def _decide_output(site: LinearSite, plan: PlanView, producers: Collection[str]) -> tuple[str, str] | None:
    """Action and reason for the output of a linear; None if ``linears.recompute`` does not include it."""
    recompute = plan.recipe.rules(LinearRules).recompute
    if recompute == OFF or (recompute != "auto" and not any_matches(output_name(site), recompute)):
        return None
    if recompute == "auto" and _is_narrow(site, plan):
        return None
    objection = _objection(site, plan)
    if objection is not None:
        return LEFT, f"output not recomputed: {objection}"
    holder = f"{site.fed_by} saves anyway" if site.fed_by in producers else "it saves where its own weight is trained"
    return RECOMPUTE, f"not saved by {', '.join(_savers(site, plan))}: recomputed from its input, which {holder}"


def output_levels(plan: PlanView) -> dict[str, list[str]]:
    """Block -> the modules whose output ``auto`` recomputes: up or fc1, then gate, then others (queries, keys, values).
    The first n names are a level of its block. All save equally many bytes for a FLOP, so larger ones come first."""
    gates = {mlp.gate for mlp in plan.sites.gated_mlps if mlp.gate != mlp.up}
    readers = {activation.source for activation in plan.sites.activations} | {mlp.up for mlp in plan.sites.gated_mlps}

    def rank(site: LinearSite) -> tuple[bool, bool, int]:
        return site.parameter not in readers, site.parameter in gates, -math.prod(site.shape)

    able = (site for site in plan.sites.linears if not _is_narrow(site, plan) and _objection(site, plan) is None)
    ordered = sorted(able, key=rank)
    levels: dict[str, list[str]] = {}
    for block in plan.sites.blocks:
        names = [site.output_module for site in ordered if site.module.startswith(f"{block}.")]
        if names:
            levels[block] = names
    return levels


def output_name(site: LinearSite) -> str:
    """The module that computes the output: the linear, or the layer that PEFT put around it."""
    return site.output_module or site.module


def _is_narrow(site: LinearSite, plan: PlanView) -> bool:
    return math.prod(site.shape) * _NARROW < plan.sites.hidden_size * site.width


def _objection(site: LinearSite, plan: PlanView) -> str | None:
    if not plan.recipe.selects(site.module):
        return EXCLUDED
    if len(site.shape) != 2:
        return "its weight is not one matrix, so no module computes it alone"
    if site.computed:
        return "each forward computes its weight anew, or hides the product"
    if not site.output_module:
        return "no module computes it from the input alone, or no training forward has reached it"
    if any(activation.source == site.parameter for activation in plan.chosen("activation", "code")):
        return "a code of the derivative is saved in its place"
    savers, scope = _savers(site, plan), site.output_module.rpartition(".")[0]
    scopes = tuple(f"{each}." for each in (scope, *plan.sites.blocks) if each)
    unseen = [each for each in savers if not f"{each.rpartition(' in ')[2]}.".startswith(scopes)]
    if unseen:
        return f"saved by {unseen[0]} as well, where no scope exchanges what is saved"
    return None if savers else "nothing saves it"


def weighing_modules(plan: PlanView) -> list[str]:
    """Modules that multiply the output of a linear inside one of their children (with a gate's weight, say), and save
    the output for that. Gated MLPs, which multiply gate and up, are left out."""
    known = {site.name for site in plan.sites.gated_mlps}
    found: dict[str, None] = {}
    for site in plan.sites.linears:
        for operation, _, module in (each.partition(" in ") for each in site.output_saved_by):
            is_around = module.count(".") + 1 < site.output_module.count(".") and is_inside(site.output_module, module)
            if operation == "mul" and is_around and module not in known and plan.recipe.selects(module):
                found[module] = None
    return list(found)


def _savers(site: LinearSite, plan: PlanView) -> list[str]:
    """Operations that save the output in the patched model; a norm with a formula saves x_hat instead."""
    norms = {norm.name for norm in plan.chosen("norm") if norm.has_formula}
    return [each for each in site.output_saved_by if each.rpartition(" in ")[2] not in norms]
