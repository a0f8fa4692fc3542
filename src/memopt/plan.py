"""Sites x recipe -> what is rewritten, how, and what is left, with a reason for each. Pure data, no torch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from memopt.recipe import Recipe, matches
from memopt.walk.sites import ActivationSite, GatedMLPSite, NormSite, Sites

SiteKind = Literal["norm", "gated_mlp", "activation", "linear", "dropout", "loss"]
Action = Literal["fold", "share", "recompute", "code", "keep"]
#: The setting that folds norms which have cautions.
CHANGE_HIDDEN_STATES = "norms.hidden_states=change"
_REWRITABLE: frozenset[SiteKind] = frozenset({"norm", "activation", "gated_mlp"})


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


@dataclass(frozen=True)
class Plan:
    """What a recipe does to a model."""

    recipe: Recipe
    sites: Sites
    entries: tuple[Entry, ...]

    @property
    def rewrites(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.rewritten)

    @property
    def refusals(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if not entry.rewritten)

    @property
    def why_nothing(self) -> str:
        """Why nothing is rewritten, where that is so: a few reasons, as one phrase."""
        reasons = sorted({e.reason for e in self.refusals if e.kind in _REWRITABLE})
        return "; ".join(reasons[:3]) or "it has no norm, activation or gated MLP"

    @property
    def does_nothing(self) -> bool:
        """Whether the model keeps what it kept: nothing is rewritten, and no block's tensors are compressed."""
        return not self.rewrites and (self.recipe.kept.method == "exact" or not self.sites.blocks)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user of this plan should know."""
        return (*self.idle_notes, *self._price())

    def _price(self) -> Iterator[str]:
        if not self.recipe.is_exact:
            yield (
                f"Recipe '{self.recipe.name}' is approximate: the forward is exact, the gradient is off by up to "
                f"{self.recipe.gradient_error:.0%} (relative, declared; `memopt verify` measures it on this model). "
                "The exact alternative is `--recipe exact`; `memopt report --recipe exact` shows what it keeps."
            )

    @property
    def idle_notes(self) -> tuple[str, ...]:
        """A sentence for each pattern of the recipe's ``targets`` and ``ignore`` that names nothing in this model."""
        names = {entry.site for entry in self.entries if entry.kind in _REWRITABLE}
        patterns = [("targets", each) for each in self.recipe.targets] + [
            ("ignore", each) for each in self.recipe.ignore
        ]
        return tuple(
            f"Recipe '{self.recipe.name}': {key} '{pattern}' matches no norm, activation or gated MLP of this model."
            for key, pattern in patterns
            if names and not any(matches(name, pattern) for name in names)
        )

    def norms(self, *actions: Action) -> tuple[NormSite, ...]:
        """Norm sites whose action is one of `actions`."""
        chosen = {e.site for e in self.entries if e.kind == "norm" and e.action in actions}
        return tuple(norm for norm in self.sites.norms if norm.name in chosen)

    def changed_outputs(self) -> tuple[str, ...]:
        """Fields of the model's output that the folds of the plan change, as the recipe allows."""
        return tuple(dict.fromkeys(output for norm in self.norms("fold") for output in norm.changed_outputs))

    def gated_mlps(self) -> tuple[GatedMLPSite, ...]:
        """Gated MLP sites of which no more than gate and up are kept."""
        if self.recipe.activations.method == "none":  # act(gate) is to be kept
            return ()
        chosen = {e.site for e in self.entries if e.kind == "gated_mlp" and e.rewritten}
        return tuple(site for site in self.sites.gated_mlps if site.name in chosen)

    def activations(self, *actions: Action) -> tuple[ActivationSite, ...]:
        """Activation sites whose action is one of `actions`; by default those that are rewritten."""
        wanted = actions or ("recompute", "code")
        chosen = {e.site for e in self.entries if e.kind == "activation" and e.action in wanted}
        return tuple(site for site in self.sites.activations if site.name in chosen)

    def counts(self) -> dict[str, dict[str, int]]:
        """Kind -> action -> number of sites."""
        table: dict[str, Counter[str]] = {}
        for entry in self.entries:
            table.setdefault(entry.kind, Counter())[entry.action] += 1
        return {kind: dict(actions) for kind, actions in table.items()}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; stored in memopt.json."""
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "counts": self.counts(),
            "entries": [dataclasses.asdict(entry) for entry in self.entries],
        }


def make_plan(sites: Sites, recipe: Recipe) -> Plan:
    """Decide every site of `sites` under `recipe`."""
    entries = (
        *_plan_norms(sites, recipe),
        *_plan_gated_mlps(sites, recipe),
        *_plan_activations(sites, recipe),
        *_plan_linears(sites),
        *_plan_dropouts(sites),
        *_plan_loss(sites),
    )
    return Plan(recipe=recipe, sites=sites, entries=entries)


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
            yield _plan_kept_output(site)
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
    from memopt.kernels.codes import derivative_code

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


def _plan_kept_output(site: ActivationSite) -> Entry:
    if site.copied and site.next_linear is not None:
        reason = "the copy of its output that the next linear reads is made again from the output, which is kept anyway"
        return Entry("activation", site.name, "recompute", reason)
    reason = f"{site.kind} already keeps its output only, which the next linear shares"
    return Entry("activation", site.name, "keep", reason)


def _plan_linears(sites: Sites) -> Iterator[Entry]:
    for site in sites.linears:
        if site.input_shared_with:
            reason = "exact as it is; its input is one storage with " + ", ".join(site.input_shared_with)
        else:
            reason = "exact as it is" + (f"; its input comes from {site.fed_by}" if site.fed_by else "")
        yield Entry("linear", site.parameter, "keep", reason)


def _plan_dropouts(sites: Sites) -> Iterator[Entry]:
    for site in sites.dropouts:
        why = (
            "probability 0: keeps nothing" if site.probability == 0 else "keeps its mask; not rewritten by this recipe"
        )
        yield Entry("dropout", site.name, "keep", why)


def _plan_loss(sites: Sites) -> Iterator[Entry]:
    if sites.loss_head is not None:
        yield Entry(
            "loss", sites.loss_head.parameter, "keep", "stock loss over all logits; not rewritten by this recipe"
        )
