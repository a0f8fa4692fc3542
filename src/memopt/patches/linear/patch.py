"""Linears whose input (the output of a norm or of an activation) or output is recomputed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from memopt.patches.base import OFF, Entry, InScopes, Live, Patch, PlanView, Rows
from memopt.patches.capabilities import Checks, Levels, Output, Reports, Saves
from memopt.patches.linear.decide import (
    RECOMPUTE,
    LinearRules,
    decide_linear,
    output_levels,
    recomputed_producers,
    weighing_modules,
)
from memopt.recompute.rules import LINEAR, WEIGHT
from memopt.walk.sites import LinearSite, Sites, is_inside

if TYPE_CHECKING:
    from torch import nn

    from memopt.patches.base import Prepare


class LinearPatch(Patch, Levels, Checks, Reports):
    """Inside scopes: every plain linear, adapters' included, reads the recompute spec of its input. The linear behind a
    known activation recomputes and differentiates the activation, in one pass where Triton runs. Chosen linears have
    their output recomputed. Every linear of the model has a row.
    """

    name = "linear"
    after = ("norm", "gated_mlp", "activation")
    rows = Rows("linear", {RECOMPUTE: "output recomputed"}, noun="linear", plural="linears")
    rules = LinearRules

    def propose(self, sites: Sites) -> Iterator[tuple[str, LinearSite]]:
        return ((site.parameter, site) for site in sites.linears)

    def decisions(self, plan: PlanView) -> Iterator[Entry]:
        producers = recomputed_producers(plan)
        for name, site in self.propose(plan.sites):
            yield Entry("linear", name, *decide_linear(site, plan, producers))

    def levels(self, plan: PlanView) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        found: dict[str, dict[str, tuple[str, ...]]] = {}
        for block, names in output_levels(plan).items():
            first, second, *more = (*(name.rpartition(".")[2] for name in names), "", "")
            for words, count in (
                (first, 1),
                (second and f"{first} and {second}", 2),
                (any(more) and "all linears", None),
            ):
                if words:
                    found.setdefault(f"{words} recomputed", {})[block] = tuple(names[:count])
        return found

    def at_levels(self, chosen: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        names = [name for its in chosen.values() for name in its]
        return (f"{LinearRules.key}.recompute={'[' + ','.join(names) + ']' if names else OFF}",)

    def scope(self, plan: PlanView) -> InScopes:
        outputs = _outputs(plan)

        def prepare(scope: str) -> Prepare:
            from memopt.patches.linear.module import adopt_linears

            inside = {name: saved for name, saved in outputs.items() if name != scope and is_inside(name, scope)}
            named = {name.removeprefix(f"{scope}."): saved for name, saved in inside.items()}
            return functools.partial(adopt_linears, outputs=named) if named else adopt_linears

        return InScopes(
            families=frozenset({WEIGHT} if plan.recipe.rules(LinearRules).recompute == OFF else {WEIGHT, LINEAR}),
            outside=[name.rpartition(".")[0] for name in outputs],
            prepare=prepare,
        )

    def saves(self, plan: PlanView, outputs: Mapping[str, Sequence[Output]]) -> Saves:
        return Saves(unsaved=_outputs(plan))

    def frees(self, plan: PlanView) -> Collection[str]:
        # Experts, one after another: rows that are gathered again, and products that are computed again. Their weights
        # are their own; a module that reads those of a convolution inside of it holds no experts.
        stacked = (site for site in plan.sites.linears if len(site.shape) == 3)
        return {site.module for site in stacked if site.parameter.rpartition(".")[0] == site.module}

    def remarks(self, model: nn.Module) -> Iterator[str]:
        dtypes = [(str(each.dtype), each.requires_grad) for each in model.parameters() if each.dim() > 1]
        count = dtypes.count(("torch.float32", True))
        if count and (base := next((each for each, trained in dtypes if "16" in each and not trained), "")):
            yield (
                f"{count} adapter weights are fp32 on a {base.removeprefix('torch.')} model, so their linears cast "
                "every input; get_peft_model(..., autocast_adapter_dtype=False) gives them the model's dtype"
            )

    def apply(self, live: Live) -> None:
        from memopt.patches.linear.module import patch_linear, trains_as_linear
        from memopt.patches.linear.output import patch_output
        from memopt.torch_compat.activations import ACTIVATIONS

        plan = live.plan
        for name, is_saved in _outputs(plan).items():
            live.attempt(self.name, name, patch_output, input_is_saved=is_saved)

        taken = {entry.site for entry in plan.rewrites}  # heads and sampled linears: other patches rewrite them
        modules = {linear.parameter: linear.module for linear in plan.sites.linears if linear.parameter not in taken}
        for site in plan.chosen("activation", "recompute"):
            linear = modules.get(site.next_linear or "", "")
            known = site.is_module and site.replays and site.kind in ACTIVATIONS and site.gated_mlp is None
            if not known or linear not in live.modules or not trains_as_linear(live.modules[linear]):
                continue
            if not site.gains_alone and site.name not in live.done("activation"):
                from memopt.patches.activation.module import patch_activation

                live.attempt("activation", site.name, patch_activation, site)
            live.attempt(self.name, linear, patch_linear)

    def finish(self, live: Live) -> None:
        from memopt.patches.functions import FunctionsRewrite, patch_functions
        from memopt.patches.linear.module import patch_linear
        from memopt.patches.linear.stacked import patch_stacked
        from memopt.patches.linear.weighted import weighted_products
        from memopt.patches.swap import is_swapped, state_of
        from memopt.walk.probes.linear import is_linear

        for name, is_stacked in {site.module: len(site.shape) > 2 for site in live.plan.sites.linears}.items():
            module = live.modules.get(name)
            if module is None or not live.plan.recipe.selects(name):
                continue
            if is_swapped(module) and state_of(module, FunctionsRewrite) is None:
                continue
            with contextlib.suppress(ValueError):  # then its weights are saved
                if is_stacked:  # experts
                    patch_stacked(module)
                elif any(name.startswith(f"{each}.") for each in live.scopes) and is_linear(module, transposed=True):
                    patch_linear(module, fuses=False)  # scopes adopt the others
        for name in weighing_modules(live.plan):
            if name in live.modules and name not in live.scopes:
                with contextlib.suppress(ValueError):  # then the outputs that it multiplies are saved
                    patch_functions(live.modules[name], weighted_products)


def _outputs(plan: PlanView) -> dict[str, bool]:
    """Module whose output is recomputed -> whether its input is saved even if its own weight is frozen."""
    producers = recomputed_producers(plan)
    return {site.output_module: site.fed_by in producers for site in plan.chosen("linear", RECOMPUTE)}


PATCH = LinearPatch()
