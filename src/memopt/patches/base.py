"""The interface of a patch: one way to save fewer bytes for backward, in its own folder, with one registered object.

A patch does three things. It *decides*: `rules`, `propose`, `decide`, `notes`. It *applies* the decisions
to a live model: `apply`, `finish`; the state of each rewritten module undoes the rewrite (`memopt.patches.swap`). And
it describes its effect inside the *scopes* of a model: `scope`. Methods that only some patches have are in
`memopt.patches.capabilities`.

Neither this file nor a patch's registered object (`patches/NAME/patch.py`) imports torch. Code for live models is in
the folder's other files, imported when the patch is applied or checked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

if TYPE_CHECKING:
    from torch import nn

    from memopt.patches.functions import Mode
    from memopt.patches.scope import ScopeRewrite
    from memopt.plan.plan import Plan
    from memopt.plan.recipe import Recipe
    from memopt.saved.slots import Compression
    from memopt.walk.sites import Sites

    #: Patches read the recipe, and the plan so far, which has the decisions of the patches before.
    PlanView = Plan
    RecipeView = Recipe
    #: A module's table of children, and a name in it.
    Place = tuple[dict[str, nn.Module | None], str]
    Prepare = Callable[[nn.Module], None]
    Look = Callable[[nn.Module], Sequence[Place] | None]
else:
    PlanView = RecipeView = object  # the room above this one; its names stand in annotations alone

#: Effect of a patch's rules on gradients: nothing beyond rounding, a bounded error, or unbiased noise.
Effect = Literal["exact", "approximate", "sampled"]
#: The value that switches a recipe key off, for every patch.
OFF = "none"
#: The action of a site that is not rewritten, for every patch.
LEFT = "keep"
#: The action of a site that is not rewritten, but whose input is recomputed: it saves no input of its own.
READS = "read recomputed"
#: In the place of a patch's name: modules that no patch rewrote and that only run in a scope.
SCOPE = "scope"
_WILDCARDS = frozenset("*?[")
EXCLUDED = "excluded by the recipe's targets or ignore"
OVERWRITTEN = "an input of it is changed in place, from which it would run again in backward"


class Strict(BaseModel):
    """Plain data in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Rules(Strict):
    """The settings of one patch in a recipe. A patch may extend the rules of an earlier patch: a subclass of its rules
    class, under the same key, replaces it."""

    key: ClassVar[str]
    """The recipe key that holds these rules."""
    needs: ClassVar[tuple[tuple[str, str, tuple[object, ...]], ...]] = ()
    """Triples of a field, another field, and the values of that with which the first has an effect."""

    @property
    def is_off(self) -> bool:
        return getattr(self, "method", None) == OFF

    def without_method(self) -> tuple[str, ...]:
        """The fields that were given and have no effect, because the method, which is none, was not."""
        given, fields = self.model_fields_set, type(self).model_fields
        idle = self.is_off and "method" in fields and "method" not in given
        return tuple(name for name in fields if name in given) if idle else ()

    def without_effect(self) -> Iterator[str]:
        """A sentence for each field that was given and has no effect, because of the value of another field."""
        idle = dict.fromkeys(self.without_method(), "method")
        for name, other, values in () if self.is_off else self.needs:
            if getattr(self, name) != type(self).model_fields[name].default and getattr(self, other) not in values:
                idle[name] = other
        for name, other in idle.items():
            yield f"{self.key}.{name} has no effect, because {self.key}.{other} is {getattr(self, other)}."

    @property
    def effect(self) -> Effect:
        """The effect of the rules on gradients."""
        return "exact"

    @property
    def folds(self) -> bool:
        """Whether the rules change the weights of a checkpoint."""
        return False

    @property
    def changes_outputs(self) -> bool:
        """Whether folds may change hidden states that the model returns."""
        return False

    @property
    def runs_attention(self) -> str | None:
        """The implementation of attention that the rules set; None: the model's own."""
        return None

    def patterns(self, sites: Sites) -> Iterator[Patterns]:
        """The settings that choose modules by their names, with the names of a model that has these `sites`."""
        return iter(())

    def in_memory(self) -> Mapping[str, str]:
        """Field -> value to use for a model in memory, because its weights are not changed."""
        return {}


def one_or_more(*words: str) -> BeforeValidator:
    """Turn one pattern into a tuple of one, and a list into a tuple; leave the strings in `words` alone."""

    def as_tuple(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(value)
        return (value,) if isinstance(value, str) and value not in words else value

    return BeforeValidator(as_tuple)


@dataclass(frozen=True)
class Entry:
    """One row of the coverage table: a site, what happens to it and why."""

    kind: str
    site: str
    action: str
    reason: str

    @property
    def rewritten(self) -> bool:
        return self.action not in (LEFT, READS)


@dataclass
class Live:
    """A model while a plan is applied to it."""

    model: nn.Module
    modules: Mapping[str, nn.Module]
    plan: PlanView
    folded: Collection[str]
    """Names of modules whose affine is already folded into other weights of the model."""
    scopes: Mapping[str, ScopeRewrite]
    """Module name -> the scope in which the module will run."""
    rewritten: dict[str, list[str]] = field(default_factory=dict)
    """Patch, or :data:`SCOPE` -> names of the modules that it has rewritten so far."""
    refused: list[tuple[str | None, str, str]] = field(default_factory=list)
    """(patch, module, reason)"""

    def done(self, patch: str) -> Collection[str]:
        """Names of the modules that `patch` has rewritten so far."""
        return self.rewritten.get(patch, ())

    def attempt(self, patch: str, name: str, rewrite: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Call `rewrite` on the module `name`; if it raises ValueError, note a refusal with the error's text."""
        from memopt.environment.partitioned import gathered, offloads

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
        """Note that a part of the rewrite of module `name` could not be done."""
        self.refused.append((patch, name, reason))


@dataclass(frozen=True)
class Rows:
    """The wording of a patch's rows in the coverage table, one row for each site."""

    kind: str
    actions: Mapping[str, str]
    """Action -> the participle in its count ('12 shared'), in the order of output."""
    noun: str = ""
    plural: str = ""
    """`noun` and `plural` are empty if these rows revise rows of another patch."""
    sites: str = ""
    """The field of `Sites` with these places; empty if :meth:`Patch.propose` finds them in another way."""
    fold: str | None = None
    """The action that changes a checkpoint's weights."""
    unfolded: str = LEFT
    """The action that replaces `fold` where a checkpoint's files do not allow it."""
    are_selected: bool = True
    """Whether a recipe's ``targets`` and ``ignore`` apply to these sites."""


@dataclass(frozen=True)
class Patterns:
    """A setting of a recipe that chooses modules by their names."""

    setting: str
    patterns: str | tuple[str, ...]
    """Patterns for :func:`any_matches`, or a word such as ``auto``."""
    modules: Collection[str]
    """The names that the setting chooses from."""
    noun: str

    def idle(self) -> Iterator[str]:
        """The patterns that match nothing; none of them if there is nothing to choose from."""
        for pattern in () if isinstance(self.patterns, str) or not self.modules else self.patterns:
            if not any(any_matches(name, (pattern,)) for name in self.modules):
                yield pattern


@dataclass(frozen=True)
class InScopes:
    """The effect of a patch inside scopes (`memopt.patches.scope`)."""

    families: frozenset[str] = frozenset()
    """Families of recompute rules (`memopt.recompute.rules`) that hold in every scope."""
    outside: Collection[str] = ()
    """Modules that get a scope of their own, unless they are inside a block."""
    excluded: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Modules inside scopes -> families that do not hold in them."""
    modes: Mapping[str, Mode] = field(default_factory=dict)
    """Module -> the context around each of its calls, with and without gradients, inside its scope if it has one."""
    prepare: Callable[[str], Prepare] | None = None
    """Name of a scope's module -> a function of that module, called when linears inside were exchanged (first call
    included). Unused where scopes are always open."""
    look: Look | None = None
    """A function of the first block of each stack, called before the first training step, and when modules at the
    places that it returned last were exchanged. It is called again at the next call where it returns None."""
    compression: Compression | None = None
    """How saved tensors that are not recomputed are stored."""
    compressed: Collection[str] = ()
    """Modules whose saved tensors `compression` stores."""
    exchanges: bool = False
    """Whether saved tensors are exchanged when a scope ends. Scopes are then always open, to see every reader."""


class Patch:
    """One way to save fewer bytes. Subclasses override the methods that they need; the defaults do nothing."""

    name: ClassVar[str]
    """The name of the patch's folder."""
    after: ClassVar[tuple[str, ...]] = ()
    """Patches whose decisions this one reads, or whose rows stand above its rows; any of them may be missing."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Folders of `patches/` and `kernels/` whose code or words it uses, beside its own folder and those in `after`."""
    rows: ClassVar[Rows | None] = None
    """None if the patch has no rows in the coverage table."""
    rules: ClassVar[type[Rules] | None] = None
    """None if the patch has no rules of its own; it may follow the rules of other patches."""

    # --- decide: no torch --------------------------------------------------------------------------------------------

    def propose(self, sites: Sites) -> Iterable[tuple[str, Any]]:
        """(name, site) of each place that the patch may rewrite; each becomes a row."""
        found = getattr(sites, self.rows.sites) if self.rows is not None and self.rows.sites else ()
        return ((site if isinstance(site, str) else site.name, site) for site in found)

    def decide(self, site: Any, plan: PlanView) -> tuple[str, str] | None:
        """The action for a site, and the reason; None if sites of this kind get no row under the recipe."""
        raise NotImplementedError

    def decisions(self, plan: PlanView) -> Iterator[Entry]:
        """A row for each decided site; it replaces a row that `plan` already has for that site."""
        for name, site in self.propose(plan.sites):
            if self.rows is not None and (decided := self.decide(site, plan)) is not None:
                yield Entry(self.rows.kind, name, *decided)

    def notes(self, plan: PlanView) -> Iterator[str]:
        """Sentences for the user of the plan, such as a cost."""
        return iter(())

    # --- scope -------------------------------------------------------------------------------------------------------

    def scope(self, plan: PlanView) -> InScopes:
        """The patch's effect inside scopes."""
        return InScopes()

    # --- apply, on a live model --------------------------------------------------------------------------------------

    def apply(self, live: Live) -> None:
        """Rewrite the chosen sites. Each rewrite first checks that the live module is what its site describes."""

    def finish(self, live: Live) -> None:
        """Called after every patch has been applied and the scopes have been set."""


def any_matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of `patterns` matches the module `name`, or a module around it."""
    parts = [name]
    while name := name.rpartition(".")[0]:
        parts.append(name)
    return any(_matches(part, pattern) for pattern in patterns for part in parts)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern (shell wildcards) matches the dotted `name`, or the end of it: PEFT puts names in front."""
    if name == pattern or name.endswith(f".{pattern}"):
        return True
    return not _WILDCARDS.isdisjoint(pattern) and any(fnmatchcase(name, each) for each in (pattern, f"*.{pattern}"))
