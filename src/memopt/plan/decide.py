"""One entry for each site: what a recipe does to it, or why it is left. Pure data, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from memopt.plan.recipe import Recipe, any_matches
from memopt.walk.sites import ActivationSite, LinearSite, NormSite, Sites

SiteKind = Literal["norm", "gated_mlp", "activation", "linear", "dropout", "loss"]
Action = Literal["fold", "share", "recompute", "code", "sample", "seed", "keep"]
#: The setting that folds norms which have cautions.
CHANGE_HIDDEN_STATES = "norms.hidden_states=change"
#: An input of fewer channels than this part of the hidden state (an adapter's) is kept whole.
_NARROW = 4
#: Sites that every recipe may rewrite.
REWRITABLE: frozenset[SiteKind] = frozenset({"norm", "activation", "gated_mlp"})


@dataclass(frozen=True)
class Entry:
    """One row of the coverage table: a site, what happens to it and why."""

    kind: SiteKind
    site: str
    action: Action
    reason: str

    @property
    def rewritten(self) -> bool:
        return self.action != "keep"


def decide(sites: Sites, recipe: Recipe) -> tuple[Entry, ...]:
    """Every site of `sites` under `recipe`."""
    makers = (*_plan_norms(sites, recipe), *_plan_gated_mlps(sites, recipe), *_plan_activations(sites, recipe))
    return (
        *makers,
        *_plan_linears(sites, recipe, makers),
        *_plan_dropouts(sites, recipe),
        *_plan_loss(sites),
    )


def _plan_norms(sites: Sites, recipe: Recipe) -> Iterator[Entry]:
    fed = {linear.fed_by for linear in sites.linears}
    for norm in sites.norms:
        action, reason = _decide_norm(norm, recipe, is_kept=norm.name in fed)
        yield Entry("norm", norm.name, action, reason)
    for name, reason in sites.skipped:
        yield Entry("norm", name, "keep", reason)


def _decide_norm(norm: NormSite, recipe: Recipe, *, is_kept: bool) -> tuple[Action, str]:
    """`is_kept` says whether a linear or a convolution keeps the norm's output."""
    if recipe.norms.method == "none":
        return "keep", "the recipe leaves norms alone"
    if not recipe.selects(norm.name):
        return "keep", "excluded by the recipe's targets or ignore"
    if not norm.has_formula and not norm.intermediates and not is_kept:
        return "keep", "it keeps its input only, and no linear or convolution keeps its output"
    # Without a formula, what is shared is not x_hat: all that the module makes of its inputs is made again.
    action: Action = "share" if norm.has_formula else "recompute"
    if norm.weight is None:
        return "share", "it has no affine: its output is kept once, for itself and the linears that read it"
    if recipe.norms.fold == "never":
        return action, "the recipe keeps the affine"
    cautions = "; ".join(norm.cautions)
    if norm.foldable or (norm.foldable_with_cautions and recipe.norms.hidden_states == "change"):
        readers = ", ".join(sorted({consumer.parameter for consumer in norm.consumers}))
        return "fold", f"into {readers}" + (f"; changes a hidden state: {cautions}" if cautions else "")
    if norm.foldable_with_cautions:
        return action, f"not folded: {cautions}; `--set {CHANGE_HIDDEN_STATES}` folds it"
    return action, "not folded: " + "; ".join((*norm.fold_obstacles, *norm.cautions))


def _plan_gated_mlps(sites: Sites, recipe: Recipe) -> Iterator[Entry]:
    made_again = "the product is" if recipe.activations.method == "none" else "act(gate) and the product are"
    for site in sites.gated_mlps:
        if recipe.gated_mlps.method == "none":
            yield Entry("gated_mlp", site.name, "keep", "the recipe leaves gated MLPs alone")
        elif not recipe.selects(site.name):
            yield Entry("gated_mlp", site.name, "keep", "excluded by the recipe's targets or ignore")
        else:
            yield Entry("gated_mlp", site.name, "recompute", f"{made_again} made again from gate and up")


def _plan_activations(sites: Sites, recipe: Recipe) -> Iterator[Entry]:
    gated = {site.name for site in sites.gated_mlps if recipe.selects(site.name)}
    for site in sites.activations:
        if recipe.activations.method == "none":
            yield Entry("activation", site.name, "keep", "the recipe leaves activations alone")
        elif not recipe.selects(site.name):
            yield Entry("activation", site.name, "keep", "excluded by the recipe's targets or ignore")
        elif site.keeps_its_output and site.gated_mlp not in gated:
            yield _plan_kept_output(site, recipe)
        elif not site.replays:
            yield Entry("activation", site.name, "keep", "random or different in train mode: it cannot be run again")
        elif recipe.activations.code != "none" and (entry := _plan_code(site, recipe, site.gated_mlp in gated)):
            yield entry
        elif site.gated_mlp in gated:
            yield Entry("activation", site.name, "recompute", f"part of the gated MLP {site.gated_mlp}")
        elif site.is_module and site.operations > 1:
            yield Entry(
                "activation", site.name, "recompute", f"keeps its input instead of {site.operations} intermediates"
            )
        elif site.next_linear is None:
            yield Entry("activation", site.name, "keep", "no linear keeps its output: nothing to save")
        elif site.copied and not site.is_module:
            reason = "a function, of whose output the next linear keeps a copy: nothing tells whether they are the same"
            yield Entry("activation", site.name, "keep", reason)
        else:
            yield Entry(
                "activation", site.name, "recompute", "its output is made again from its input, which is kept anyway"
            )


def _plan_code(site: ActivationSite, recipe: Recipe, gated: bool) -> Entry | None:
    """The entry of an activation that may keep a code of its derivative; None where the exact way is taken."""
    # Its table is loaded where it is asked for: most recipes have no codes.
    from memopt.kernels.derivative_codes.codes import derivative_code

    rules = recipe.activations
    if not site.is_module or site.parameters or site.linear is not None or (gated and rules.where == "needed"):
        return None
    if site.kind == "other" and rules.code != "published":
        kept = f"a code of its derivative ({rules.code}), fitted when it is patched"
    else:
        try:
            code = derivative_code(site.kind, rules.code)
        except ValueError:
            return None
        kept = f"{code.bits} bits an element (its input has 16 in bf16), its derivative {code.error:.1%} off at N(0, 1)"
    if rules.where == "all":
        return Entry("activation", site.name, "code", f"keeps {kept}")
    reason = f"where nothing keeps its output: {kept}; else made again from its input, exactly"
    return Entry("activation", site.name, "code", reason)


def _plan_kept_output(site: ActivationSite, recipe: Recipe) -> Entry:
    if site.kind == "relu" and recipe.activations.relu == "mask" and site.is_module and site.replays:
        reason = "keeps one bit an element where nothing else keeps its output, which is exact"
        return Entry("activation", site.name, "code", reason)
    if site.copied and site.next_linear is not None:
        reason = "the copy of its output that the next linear reads is made again from the output, which is kept anyway"
        return Entry("activation", site.name, "recompute", reason)
    reason = f"{site.kind} already keeps its output only, which the next linear shares"
    return Entry("activation", site.name, "keep", reason)


def _plan_linears(sites: Sites, recipe: Recipe, makers: Sequence[Entry]) -> Iterator[Entry]:
    """`makers` are the entries of what may have made a linear's input."""
    refusals: dict[str, str] = {}
    if recipe.samples:
        refusals = _refused_samples(sites, recipe, makers)
    for site in sites.linears:
        if recipe.samples and site.parameter in refusals:
            yield Entry("linear", site.parameter, "keep", refusals[site.parameter])
        elif recipe.samples:
            reason = f"keeps {recipe.linears.budget:.0%} of the rows of its input, if nobody else holds it then"
            shared = ", one sample with " + ", ".join(site.input_shared_with) if site.input_shared_with else ""
            yield Entry("linear", site.parameter, "sample", reason + shared)
        elif site.input_shared_with:
            reason = "exact as it is; its input is one storage with " + ", ".join(site.input_shared_with)
            yield Entry("linear", site.parameter, "keep", reason)
        else:
            reason = "exact as it is" + (f"; its input comes from {site.fed_by}" if site.fed_by else "")
            yield Entry("linear", site.parameter, "keep", reason)


def _refused_samples(sites: Sites, recipe: Recipe, makers: Sequence[Entry]) -> dict[str, str]:
    """Weight -> why its linear keeps its whole input, for those that do."""
    rewritten = {entry.site: entry for entry in makers if entry.rewritten}
    refusals = {
        site.parameter: reason
        for site in sites.linears
        if (reason := _not_sampled(site, sites, recipe, rewritten)) is not None
    }
    for site in sites.linears:
        holder = next((weight for weight in site.input_shared_with if weight in refusals), None)
        if site.parameter not in refusals and holder is not None:
            refusals[site.parameter] = f"0 bytes: also held by {holder}"
    return refusals


def _not_sampled(site: LinearSite, sites: Sites, recipe: Recipe, rewritten: Mapping[str, Entry]) -> str | None:
    """Why a linear keeps its whole input, whoever else reads it; None where nothing is against a sample."""
    rules = recipe.linears
    if not recipe.selects(site.module) or (rules.targets != "auto" and not any_matches(site.module, rules.targets)):
        return "excluded by the recipe's targets or ignore"
    if len(site.shape) != 2:
        return "its weight is not one matrix: the rows of its input are not tokens"
    if not any(site.module == block or site.module.startswith(f"{block}.") for block in sites.blocks):
        return "outside of the repeated blocks, where nothing tells who else holds its input"
    if 0 < site.width * _NARROW < sites.hidden_size:
        return f"its input has {site.width} channels only: next to nothing to free"
    maker = rewritten.get(site.fed_by or "")
    if maker is not None and maker.action != "code":
        if maker.kind == "norm":
            return f"0 bytes: also held by the norm {maker.site}, or made again from what that keeps"
        return f"0 bytes: made again from what {maker.site} keeps anyway"
    block = next((name for name in site.given_to if name in sites.blocks), None)
    if block is not None:
        return f"0 bytes: also held by the caller of {block}, whose input it is"
    others = [each for each in site.held_by if each.rpartition(" in ")[2] not in rewritten]
    return f"0 bytes: also held by {', '.join(others)}" if others else None


def _plan_dropouts(sites: Sites, recipe: Recipe) -> Iterator[Entry]:
    for site in sites.dropouts:
        if site.probability == 0:
            yield Entry("dropout", site.name, "keep", "probability 0: keeps nothing")
        elif recipe.dropouts.method == "none":
            yield Entry("dropout", site.name, "keep", "keeps its mask; not rewritten by this recipe")
        elif not recipe.selects(site.name):
            yield Entry("dropout", site.name, "keep", "excluded by the recipe's targets or ignore")
        elif not site.is_module:
            yield Entry("dropout", site.name, "keep", "a function in the forward of this module keeps its mask")
        else:
            yield Entry("dropout", site.name, "seed", "keeps the seed of its mask")


def _plan_loss(sites: Sites) -> Iterator[Entry]:
    if sites.loss_head is not None:
        yield Entry(
            "loss", sites.loss_head.parameter, "keep", "stock loss over all logits; not rewritten by this recipe"
        )
