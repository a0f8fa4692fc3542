"""What a patch is: one way to keep fewer bytes for backward, in a folder of its own, behind one registered object.

Nothing here imports torch, nor does a patch's registered object (`patches/NAME/patch.py`): what touches a live model is
in the folder's other files, imported when it is applied or checked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from memopt.checks import Check
    from memopt.patches.functions import Mode
    from memopt.patches.scope import ScopeRewrite
    from memopt.saved.compressible import Compression
    from memopt.walk.sites import Sites

#: What a patch's rules do to gradients: nothing beyond rounding, a bounded error, or noise without bias.
Effect = Literal["exact", "approximate", "sampled"]
#: The value of a key that is off, whatever its patch.
OFF = "none"
#: The action of a site that is left as it is, whatever its patch.
LEFT = "keep"
EXCLUDED = "excluded by the recipe's targets or ignore"


class Strict(BaseModel):
    """Plain data in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Rules(Strict):
    """What a recipe says to one patch; its key is `Patch.key`."""

    #: Field -> its old spellings, as memopt.json files of older versions have them.
    old_spellings: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    #: The key's name, and fields that are gone, in such files.
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
        """The fields that differ for a model in memory, whose weights nobody changes."""
        return {}


def one_or_more(*words: str) -> BeforeValidator:
    """A pattern alone is a tuple of one, a list (from JSON) a tuple; `words` mean something of their own."""

    def as_tuple(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(value)
        return (value,) if isinstance(value, str) and value not in words else value

    return BeforeValidator(as_tuple)


@dataclass(frozen=True)
class Output:
    """What one call of a module returned."""

    rows: int
    """Elements of all dimensions but the last."""
    width: int
    itemsize: int


@dataclass(frozen=True)
class Entry:
    """One row of the coverage table: a site, what happens to it and why."""

    kind: str
    site: str
    action: str
    reason: str

    @property
    def rewritten(self) -> bool:
        return self.action != LEFT


R = TypeVar("R", bound=Rules)


class RecipeView(Protocol):
    """What a patch sees of a recipe."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    def rules(self, kind: type[R]) -> R:
        """The rules of that kind; their defaults where the recipe has none."""

    def selects(self, name: str) -> bool:
        """Whether the module `name` may be rewritten."""

    def without(self, *effects: Effect) -> tuple[str, ...]:
        """Settings (KEY=VALUE) that switch off what has one of these effects."""


class PlanView(Protocol):
    """What a patch sees of a plan; while decisions are made, of what was decided before it."""

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
        """Call `rewrite` on the module `name`; a ValueError is a refusal, with its reason."""

    def refuse(self, name: str, reason: str) -> None: ...


class Section(Protocol):
    """What a patch adds to a report."""

    @property
    def key(self) -> str:
        """Its field of the JSON document."""

    def lines(self) -> Iterable[str]: ...
    def to_dict(self) -> dict[str, Any]: ...


class Trial(Protocol):
    """A checkpoint of which a patch measures something: its models, and a training step on a probe batch."""

    @property
    def source(self) -> str | Path: ...
    @property
    def recipe(self) -> RecipeView: ...
    @property
    def probe(self) -> str:
        """What the batch is, in words; once there was a step."""

    def stock(self) -> nn.Module: ...
    def patched(self, *settings: str) -> nn.Module:
        """The patched model in fp32, with keys of its recipe changed."""

    def plan(self, model: nn.Module) -> PlanView: ...
    def step(self, model: nn.Module) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients of the probe batch, in fp32; eval mode."""


class Patch:
    """One way to keep fewer bytes. Subclasses override what they need; every default means: nothing."""

    name: ClassVar[str]
    """That of its folder."""
    after: ClassVar[tuple[str, ...]] = ()
    """Patches whose decisions it reads, or whose rows stand above its own."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Folders of `patches/` and `kernels/`, beside its own, whose code it uses."""
    kind: ClassVar[str | None] = None
    """Of its rows in the coverage table; None where it has none."""
    noun: ClassVar[str] = ""
    plural: ClassVar[str] = ""
    actions: ClassVar[Mapping[str, str]] = {}
    """What it does to a site -> the participle that counts such sites, in order."""
    folding: ClassVar[str | None] = None
    """The action that changes a checkpoint's weights."""
    unfolded: ClassVar[str] = LEFT
    """What is done instead where a checkpoint's files do not allow a fold."""
    key: ClassVar[str | None] = None
    """Its key of a recipe; None where it obeys the rules of other patches."""
    rules: ClassVar[type[Rules]] = Rules
    section: ClassVar[str | None] = None
    """The field that it adds to a report's JSON document."""

    # --- deciding: no torch ------------------------------------------------------------------------------------------

    def propose(self, sites: Sites) -> Iterable[tuple[str, Any]]:
        """(name, site) of each place that it may rewrite; each becomes a row."""
        return ()

    def decide(self, site: Any, plan: PlanView) -> tuple[str, str]:
        """What happens to a site, and why."""
        raise NotImplementedError

    def decisions(self, plan: PlanView) -> Iterator[Entry]:
        """A row for each site that it proposes."""
        for name, site in self.propose(plan.sites):
            action, reason = self.decide(site, plan)
            yield Entry(self.kind or self.name, name, action, reason)

    def targets(self, plan: PlanView) -> Collection[str]:
        """Names of modules that ``targets`` and ``ignore`` of this recipe may mean."""
        return [name for name, _ in self.propose(plan.sites)]

    def notes(self, plan: PlanView) -> Iterator[str]:
        """What a user of the plan should know: a price, a pattern of its rules that matches nothing."""
        return iter(())

    def changed_outputs(self, plan: PlanView) -> Iterable[str]:
        """Fields of the model's output that its folds change."""
        return ()

    # --- levels of single blocks: no torch ---------------------------------------------------------------------------

    def levels(self, plan: PlanView) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """Level, in words -> block that can have it -> the names that its settings take: ways in which a block saves
        less than under `plan`, exactly and for more work. Each saves less than the one before."""
        return {}

    def at_levels(self, chosen: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        """Settings (KEY=VALUE) under which what each level of `chosen` names has that level, and no other block any."""
        return ()

    def faster(self, plan: PlanView) -> Mapping[str, tuple[str, ...]]:
        """What takes less work than `plan` and saves more, exactly, in words -> its settings (KEY=VALUE)."""
        return {}

    # --- files of training engines: no torch --------------------------------------------------------------------------

    def engine_settings(self, recipe: RecipeView, blocks: Sequence[str]) -> Mapping[str, str]:
        """What the recipe means in settings that engines have of their own: ``gradient_checkpointing`` (``some`` or
        ``all`` of `blocks`, the model's), ``attn_implementation``."""
        return {}

    # --- scopes: no torch --------------------------------------------------------------------------------------------

    def families(self, recipe: RecipeView) -> frozenset[str]:
        """Families of recompute rules (`memopt.recompute_rules`) that hold inside scopes."""
        return frozenset()

    def scoped(self, plan: PlanView) -> Iterable[str]:
        """Modules that should be scopes where they are outside of blocks."""
        return ()

    def unscoped(self, plan: PlanView) -> Mapping[str, frozenset[str]]:
        """Modules inside scopes -> families that do not hold in them."""
        return {}

    def compression(self, recipe: RecipeView) -> Compression | None:
        """How scopes store the saved tensors that are not recomputed."""
        return None

    def compressed(self, plan: PlanView) -> Iterable[str]:
        """Modules in which that is so."""
        return ()

    def settles(self, plan: PlanView) -> bool:
        """Whether saved tensors are exchanged when a scope ends: then it sees every reader, and is always open."""
        return False

    def prepares(self, plan: PlanView, scope: str) -> Callable[[nn.Module], None] | None:
        """What is called for the module `scope`, whose scope may stay closed, when the linears inside are new."""
        return None

    def mode(self, plan: PlanView, scope: str) -> Mode | None:
        """The context around each call of the module `scope`, with and without gradients; None: it has none."""
        return None

    # --- on a live model ---------------------------------------------------------------------------------------------

    def apply(self, live: Live) -> None:
        """Rewrite the chosen sites. Each rewrite proves on the module itself that it is what its site says."""

    def finish(self, live: Live) -> None:
        """Called when every patch has been applied and the scopes are in place."""

    def own_bytes(self, plan: PlanView, outputs: Mapping[str, Sequence[Output]]) -> Mapping[str, int]:
        """Module that it rewrites -> bytes of its own results that it saves at most, given the outputs of each module
        in the stock model. One that is not named here may save what the stock module does."""
        return {}

    def recomputed(self, plan: PlanView) -> Iterable[str]:
        """Modules inside blocks whose output no linear saves, since it is recomputed."""
        return ()

    def remarks(self, model: nn.Module) -> Iterable[str]:
        """What `memopt.summary` says of a patched model beside the plan: what was set on the model since."""
        return ()

    def unsaved(self, plan: PlanView) -> Iterable[str]:
        """Modules whose output nobody saves, since it is recomputed."""
        return ()

    # --- measuring ---------------------------------------------------------------------------------------------------

    def at_most(self, recipe: RecipeView) -> tuple[str, ...]:
        """Settings (KEY=VALUE) under which an approximate recipe is as far off as it can be."""
        return ()

    def alike(self, recipe: RecipeView) -> tuple[str, ...]:
        """Settings under which two runs are off by the same: no random numbers but those of sampled gradients."""
        return ()

    def derivative_errors(self, model: nn.Module) -> AbstractContextManager[list[float]]:
        """Inside, the relative errors of derivatives that the patched modules of `model` make, as they run."""
        return nullcontext([])

    def checks(self, trial: Trial) -> Iterable[Check]:
        """What `memopt verify` checks of the gradient, beside its size and error."""
        return ()

    def module_checks(self, modules: Mapping[str, nn.Module], limit: float) -> Iterable[Check]:
        """What `memopt verify` checks of the patch's own modules among `modules`, those of a model in a wide dtype.

        Args:
            limit: the largest relative difference that its roundings explain.
        """
        return ()

    def report(self, trial: Trial, *, trains_all: bool, note: Callable[[str], None]) -> Section | None:
        """What `memopt report` says beside the bytes."""
        return None


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern of ``targets`` or ``ignore`` names the module `name`."""
    return fnmatchcase(name, pattern) or name.endswith("." + pattern) or name == pattern


def any_matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of `patterns` names the module `name`."""
    return any(matches(name, pattern) for pattern in patterns)
