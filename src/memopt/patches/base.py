"""What a patch is: one way to save fewer bytes for backward, in a folder of its own, behind one registered object.

A patch does three things. It *decides*: `rules`, `propose`, `decide`, `notes`. It *applies* the decisions to a live
model: `apply`, `finish`; the state of each rewritten module undoes the rewrite (`memopt.patches.swap`). And it says
what it does inside the *scopes* of a model: `scope`. Methods that only some patches have are in
`memopt.patches.capabilities`.

Neither this file nor a patch's registered object (`patches/NAME/patch.py`) imports torch. Code for live models is in
the folder's other files, imported when the patch is applied or checked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

if TYPE_CHECKING:
    from torch import nn

    from memopt.patches.functions import Mode
    from memopt.patches.scope import ScopeRewrite
    from memopt.saved.slots import Compression
    from memopt.walk.sites import Sites

#: What a patch's rules do to gradients: nothing beyond rounding, a bounded error, or noise without bias.
Effect = Literal["exact", "approximate", "sampled"]
#: The value of a key that is off, whatever its patch.
OFF = "none"
#: The action of a site that is not rewritten, whatever its patch.
LEFT = "keep"
#: The action of a site that is not rewritten and reads a recomputed input: it saves no input of its own.
READS = "read recomputed"
EXCLUDED = "excluded by the recipe's targets or ignore"


class Strict(BaseModel):
    """Plain data in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Rules(Strict):
    """The part of a recipe for one patch.

    A patch may extend the rules of an earlier patch: a subclass of them, under the same key, replaces them.
    """

    key: ClassVar[str]
    """Of a recipe."""
    #: Field -> its old spellings, as memopt.json files of older versions have them.
    old_spellings: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    #: The key's old name, and removed fields, in such files.
    old_key: ClassVar[str] = ""
    old_fields: ClassVar[frozenset[str]] = frozenset()

    @property
    def is_off(self) -> bool:
        return getattr(self, "method", None) == OFF

    @property
    def effect(self) -> Effect:
        """What the rules do to gradients."""
        return "exact"

    @property
    def folds(self) -> bool:
        """Whether they change the weights of a checkpoint."""
        return False

    @property
    def changes_outputs(self) -> bool:
        """Whether folds may change hidden states that the model returns."""
        return False

    def in_memory(self) -> Mapping[str, str]:
        """The fields that differ for a model in memory, whose weights do not change."""
        return {}


def one_or_more(*words: str) -> BeforeValidator:
    """Turn a single pattern into a tuple of one, and a list (from JSON) into a tuple; `words` stay as they are."""

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


R = TypeVar("R", bound=Rules)


class RecipeView(Protocol):
    """What a patch sees of a recipe."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    def rules(self, kind: type[R]) -> R:
        """The rules of that kind; their defaults if the recipe has none."""

    def is_off(self, key: str) -> bool:
        """Whether the rules of a key are off, or no patch has them."""

    def selects(self, name: str) -> bool:
        """Whether the module `name` may be rewritten."""

    def without(self, *effects: Effect) -> tuple[str, ...]:
        """Settings (KEY=VALUE) that switch off the rules with one of these effects."""


class PlanView(Protocol):
    """What a patch sees of a plan; while decisions are made, the decisions before its own."""

    @property
    def recipe(self) -> RecipeView: ...
    @property
    def sites(self) -> Sites: ...
    @property
    def rewrites(self) -> tuple[Entry, ...]: ...
    @property
    def refusals(self) -> tuple[Entry, ...]: ...
    def chosen(self, kind: str, *actions: str) -> tuple[Any, ...]:
        """Sites of a kind whose action is one of `actions`; without any, all that are rewritten."""

    def counts(self) -> dict[str, dict[str, int]]:
        """Kind -> action -> number of sites."""

    @property
    def done(self) -> str:
        """How many sites of each kind are rewritten, as one phrase."""

    def left(self, kind: str, module: str, reason: str) -> PlanView:
        """The plan with the rewrite of `module` as a site of `kind` refused."""


class Live(Protocol):
    """A model while a plan is carried out on it."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def modules(self) -> Mapping[str, nn.Module]: ...
    @property
    def plan(self) -> PlanView: ...
    @property
    def folded(self) -> Collection[str]:
        """Names of modules whose affine has been folded away in the weights that the model holds."""

    @property
    def scopes(self) -> Mapping[str, ScopeRewrite]:
        """Module -> the scope that it will be."""

    def done(self, patch: str) -> Collection[str]:
        """Names of the modules that `patch` has rewritten so far."""

    def attempt(self, patch: str, name: str, rewrite: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Call `rewrite` on the module `name`; a ValueError is a refusal, and its text the reason."""

    def refuse(self, name: str, reason: str) -> None:
        """Note a part of the rewrite of module `name` that could not be done."""


@dataclass(frozen=True)
class Rows:
    """How the decisions of a patch stand in the coverage table: a row for each site."""

    kind: str
    actions: Mapping[str, str]
    """Action -> the participle that counts sites with it, in order."""
    noun: str = ""
    plural: str = ""
    """Both empty if these rows revise rows of another patch."""
    fold: str | None = None
    """The action that changes a checkpoint's weights."""
    unfolded: str = LEFT
    """The action if a checkpoint's files do not allow a fold."""
    are_selected: bool = True
    """Whether ``targets`` and ``ignore`` of a recipe choose among the sites."""


@dataclass(frozen=True)
class InScopes:
    """What a patch does inside scopes (`memopt.patches.scopes`)."""

    families: frozenset[str] = frozenset()
    """Families of recompute rules (`memopt.recompute.rules`) that hold in every scope."""
    outside: Collection[str] = ()
    """Modules that should be scopes if they are outside of blocks."""
    excluded: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Modules inside scopes -> families that do not hold in them."""
    modes: Mapping[str, Mode] = field(default_factory=dict)
    """Module -> the context around each call of it, with and without gradients, if it is a scope."""
    prepare: Callable[[str], Callable[[nn.Module], None] | None] | None = None
    """Name of a scope that may stay closed -> a function that is called with its module when the linears inside are
    new."""
    compression: Compression | None = None
    """How saved tensors that are not recomputed are stored."""
    compressed: Collection[str] = ()
    """Modules whose saved tensors are stored so."""
    exchanges: bool = False
    """Whether saved tensors are exchanged when a scope ends: then it sees every reader, and is always open."""


class Patch:
    """One way to save fewer bytes. Subclasses override what they need; every default does nothing."""

    name: ClassVar[str]
    """That of its folder."""
    after: ClassVar[tuple[str, ...]] = ()
    """Patches whose decisions it reads, or whose rows stand above its own; any of them may be missing."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Folders of `patches/` and `kernels/`, beside its own and those in `after`, whose code or words it uses."""
    rows: ClassVar[Rows | None] = None
    """None if it has no rows in the coverage table."""
    rules: ClassVar[type[Rules] | None] = None
    """None if it obeys the rules of other patches."""

    # --- decide: no torch --------------------------------------------------------------------------------------------

    def propose(self, sites: Sites) -> Iterable[tuple[str, Any]]:
        """(name, site) of each place that it may rewrite; each becomes a row."""
        return ()

    def decide(self, site: Any, plan: PlanView) -> tuple[str, str] | None:
        """The action for a site, and the reason; None if the recipe says nothing of such sites."""
        raise NotImplementedError

    def decisions(self, plan: PlanView) -> Iterator[Entry]:
        """A row for each proposed site; it replaces a row that `plan` has for the same site."""
        for name, site in self.propose(plan.sites):
            if self.rows is not None and (decided := self.decide(site, plan)) is not None:
                yield Entry(self.rows.kind, name, *decided)

    def notes(self, plan: PlanView) -> Iterator[str]:
        """Sentences for the user of the plan: a price, a pattern of the rules that matches nothing."""
        return iter(())

    # --- scope -------------------------------------------------------------------------------------------------------

    def scope(self, plan: PlanView) -> InScopes:
        """What it does inside scopes."""
        return InScopes()

    # --- apply, on a live model --------------------------------------------------------------------------------------

    def apply(self, live: Live) -> None:
        """Rewrite the chosen sites. Each rewrite proves on the module itself that it is what its site says."""

    def finish(self, live: Live) -> None:
        """Called after every patch has been applied and the scopes exist."""


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern of ``targets`` or ``ignore`` names the module `name`."""
    return fnmatchcase(name, pattern) or name.endswith("." + pattern) or name == pattern


def any_matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of `patterns` names the module `name`."""
    return any(matches(name, pattern) for pattern in patterns)
