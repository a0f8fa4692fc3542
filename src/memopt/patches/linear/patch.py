"""Linears that recompute their input (the output of a norm, or of the activation before them), or their output."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from memopt.patches.activation.patch import gains_alone
from memopt.patches.base import OFF, Live, Patch, PlanView, RecipeView
from memopt.patches.linear.decide import RECOMPUTE, input_is_saved
from memopt.patches.linear.rules import OutputRules
from memopt.recompute.rules import LINEAR, WEIGHT

if TYPE_CHECKING:
    from torch import nn


class LinearPatch(Patch):
    """A known activation and the linear behind it, which recomputes and differentiates it in one pass where Triton
    runs; and inside scopes every plain linear, adapters' included, which reads the recompute spec of its input.

    They have no rows of their own: the activation's row says that its output is recomputed. Nor have linears whose
    output is recomputed: their row says that.
    """

    name = "linear"
    after = ("activation", "sampled_linear")
    requires = ("activation", "norm")

    def families(self, recipe: RecipeView) -> frozenset[str]:
        return frozenset({WEIGHT} if recipe.rules(OutputRules).recompute == OFF else {WEIGHT, LINEAR})

    def scoped(self, plan: PlanView) -> Iterator[str]:
        return (name.rpartition(".")[0] for name in _outputs(plan))

    def unsaved(self, plan: PlanView) -> Iterator[str]:
        yield from _outputs(plan)

    def remarks(self, model: nn.Module) -> Iterator[str]:
        dtypes = [(str(each.dtype), each.requires_grad) for each in model.parameters() if each.dim() > 1]
        count = dtypes.count(("torch.float32", True))
        if count and (base := next((each for each, trained in dtypes if "16" in each and not trained), "")):
            yield (
                f"{count} adapter weights are fp32 on a {base.removeprefix('torch.')} model, so their linears cast "
                "every input; get_peft_model(..., autocast_adapter_dtype=False) gives them the model's dtype"
            )

    def apply(self, live: Live) -> None:
        from memopt.activations import ACTIVATIONS
        from memopt.patches.activation.module import patch_activation
        from memopt.patches.linear.module import patch_linear, trains_as_linear
        from memopt.patches.linear.output import patch_output

        for name, is_saved in _outputs(live.plan).items():
            live.attempt(self.name, name, patch_output, input_is_saved=is_saved)

        modules = {linear.parameter: linear.module for linear in live.plan.sites.linears}
        for site in live.plan.chosen("activation", "recompute"):
            linear = modules.get(site.next_linear or "", "")
            known = site.is_module and site.replays and site.kind in ACTIVATIONS and site.gated_mlp is None
            if not known or linear not in live.modules or not trains_as_linear(live.modules[linear]):
                continue
            if not gains_alone(site) and site.name not in live.done("activation"):
                live.attempt("activation", site.name, patch_activation, site)
            live.attempt(self.name, linear, patch_linear)

    def finish(self, live: Live) -> None:
        from memopt.patches.linear.module import is_linear, patch_linear
        from memopt.patches.linear.stacked import patch_stacked
        from memopt.patches.swap import is_swapped

        for name, is_stacked in {site.module: len(site.shape) > 2 for site in live.plan.sites.linears}.items():
            module = live.modules.get(name)
            if module is None or not live.plan.recipe.selects(name) or is_swapped(module):
                continue
            with contextlib.suppress(ValueError):  # then its weights are saved
                if is_stacked:  # experts
                    patch_stacked(module)
                elif any(name.startswith(f"{each}.") for each in live.scopes) and is_linear(module, transposed=True):
                    patch_linear(module, fuses=False)  # scopes adopt the others

    def prepares(self, plan: PlanView, scope: str) -> Callable[[nn.Module], None]:
        from memopt.patches.linear.module import adopt_linears

        inside = {name: saved for name, saved in _outputs(plan).items() if name.startswith(f"{scope}.")}
        outputs = {name.removeprefix(f"{scope}."): saved for name, saved in inside.items()}
        return functools.partial(adopt_linears, outputs=outputs) if outputs else adopt_linears


def _outputs(plan: PlanView) -> dict[str, bool]:
    """Module whose output is recomputed -> whether its input is saved also where its own weight is frozen."""
    return {site.output_module: input_is_saved(site, plan) for site in plan.chosen("linear", RECOMPUTE)}


PATCH = LinearPatch()
