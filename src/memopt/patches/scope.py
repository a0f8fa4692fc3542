"""Modules inside which operations save handles in place of tensors that can be recomputed (`memopt.saved`).

Most readers of such tensors are plain linears. They save the sources of the recomputation (`memopt.recompute.specs`)
and need no scope. Other readers, and small views of large storages, are found only when a block runs. So a scope that
replaced nothing stays closed for the next calls of that form, and is opened again after `LOOK_AGAIN` calls.

:func:`choose_scopes` chooses these modules, and the settings of each scope.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from memopt.kernels.base.autograd import autocast_dtype
from memopt.patches.base import InScopes, PlanView
from memopt.patches.functions import Mode, run_inside
from memopt.patches.swap import Notes, is_swapped, steps_aside, swap_forward, swap_state, wraps_any_forward
from memopt.recompute.specs import Region, is_under_foreign_hooks
from memopt.saved.scope import RecomputeScope
from memopt.saved.slots import Compression
from memopt.torch_compat import has_any_global_hook, module_hooks
from memopt.walk.sites import is_inside, parent

if TYPE_CHECKING:
    from memopt.patches.base import Look, Place, Prepare

#: Calls after which a scope that replaced nothing is opened once more, because a model may change between steps.
LOOK_AGAIN = 64
_CLOSED: AbstractContextManager[None] = nullcontext()
_CLOSED_INSIDE: AbstractContextManager[None] = nullcontext()
"""A closed scope under foreign hooks. A `Region` is still needed there: outputs carry specs only inside one."""
_NOT_QUANTISED = "saved tensors are not quantised, and gradients are exact; quantising needs eager mode"


class ScopeHistory(Notes):
    """Forms of calls of one module, with the finding whether the scope replaced anything."""

    __slots__ = ("_calls_closed", "_children", "_linears", "_names", "_pre_hooks", "_stood", "proofs")

    def __init__(self) -> None:
        self._calls_closed: dict[Any, int | None] = {}
        """Form of a call -> number of calls since the scope was last open; None if the scope has to be open."""
        self.proofs: dict[Any, bool] = {}
        """Findings whether a handle gives its tensor, for `memopt.saved.scope.RecomputeScope`."""
        self._linears: list[nn.Module | None] | None = None
        self._children: list[dict[str, nn.Module | None]] = []
        self._names: list[str] = []
        """Linears and modules with a linear as child; for each one, its parent's `_modules` and its name there."""
        self._pre_hooks: tuple[Any, ...] = ()
        """Tables of forward hooks and forward pre-hooks of the modules inside. A module never replaces its tables."""
        self._stood: list[tuple[Place, nn.Module | None]] | None = None
        """The places that the last look returned, and the modules there; None before the first look."""

    def is_closed(self, form: Any, *, is_final: bool) -> bool:
        """Whether the scope can stay closed for a call of this form; with `is_final` it is never opened again."""
        calls = self._calls_closed.get(form)
        if calls is None:
            return False
        self._calls_closed[form] = calls + 1
        return is_final or calls < LOOK_AGAIN

    def note(self, form: Any, replaced: bool, *, is_final: bool) -> None:
        """Record that the scope was open for a call of this form, and whether it replaced anything."""
        if form not in self._calls_closed:
            self._calls_closed[form] = None if replaced else 0
        elif replaced and not is_final:
            self._calls_closed[form] = None
        elif self._calls_closed[form] is not None:
            self._calls_closed[form] = 0

    def sees_new_linears(self, module: nn.Module) -> bool:
        """Whether linears inside `module` were exchanged since the last call (by adapters, say); True at the first."""
        if self._linears is not None and list(map(dict.get, self._children, self._names)) == self._linears:
            return False
        self._calls_closed.clear()
        self.proofs.clear()
        self._stood = None  # who exchanges linears may have replaced more
        inside = list(module.modules())[1:]
        self._pre_hooks = tuple(table for child in inside for table in module_hooks(child)[:2])
        # Parents of linears are compared too: an adapter may wrap or release a linear without changing the linear.
        self._linears, self._children, self._names = [], [], []
        for around in module.modules():
            for name, child in around._modules.items():
                if child is not None and any(isinstance(each, nn.Linear) for each in (child, *child._modules.values())):
                    self._linears.append(child)
                    self._children.append(around._modules)
                    self._names.append(name)
        return True

    def look(self, module: nn.Module, look: Look) -> None:
        """Call `look` unless the same modules stand at the places that its last call returned."""
        if self._stood is None or any(place[0].get(place[1]) is not stood for place, stood in self._stood):
            found = look(module)
            self._stood = None if found is None else [(place, place[0].get(place[1])) for place in found]

    def has_pre_hooks(self) -> bool:
        """Whether a module inside has a forward hook or forward pre-hook, which may replace tensors."""
        # If PyTorch's private names of the tables are missing, `module_hooks` returns tables that are never empty.
        return any(self._pre_hooks)


@dataclass(frozen=True)
class ScopeRewrite:
    """Settings of the scope of one module."""

    families: frozenset[str]
    """Families of recompute rules that hold inside."""
    compression: Compression | None = None
    """How to store saved tensors that are not recomputed; None: unchanged."""
    prepare: Prepare | None = None
    """Called with the module when linears inside were exchanged; it lets them read recompute specs. None if tensors
    are kept as codes, samples or in fewer bits: the scope is then always open, because it must see every reader."""
    look: Look | None = field(default=None, compare=False)
    """Called with the module, as `memopt.patches.base.InScopes.look` says."""
    modes: tuple[Mode, ...] = ()
    """The contexts around the forward, with and without gradients."""
    history: ScopeHistory = field(default_factory=ScopeHistory, compare=False, repr=False)

    def around(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """The scope for one call of `module` with these arguments."""
        hidden = args[0] if args else None
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
            given = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            hidden = next((tensor for tensor in given if tensor.is_floating_point()), None)
        if self.prepare is None or hidden is None:
            return RecomputeScope(self.families, self.compression, hidden, self.history.proofs)
        # Global module hooks make stock forwards run that are skipped otherwise, so they are part of the form.
        # Checkpointing runs a call twice and needs the same saved tensors both times, so there the first finding stays.
        is_final = is_under_foreign_hooks()
        if is_final and self.history.has_pre_hooks():
            # FSDP2's hook on a module inside wraps its inputs in the forward, not in checkpointing's second run: what
            # can be recomputed would differ between the runs.
            return _CLOSED_INSIDE
        form = (
            hidden.dtype, hidden.dim(), hidden.is_nested or 1 in hidden.shape, hidden.requires_grad, module.training,
            autocast_dtype(hidden), bool(has_any_global_hook()), is_final,
        )  # fmt: skip
        if self.history.is_closed(form, is_final=is_final):
            return _CLOSED_INSIDE if is_final else _CLOSED
        return _Observed(self.families, self.history, form, is_final)


class _Observed(RecomputeScope):
    """A scope that records in the history whether it replaced anything."""

    def __init__(self, families: frozenset[str], history: ScopeHistory, form: Any, is_final: bool) -> None:
        super().__init__(families, proofs=history.proofs)
        self._history, self._form, self._is_final = history, form, is_final

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if error[0] is None and self.replaced is not None:
            self._history.note(self._form, self.replaced, is_final=self._is_final)


def patch_scope(module: nn.Module, scope: ScopeRewrite) -> None:
    """Make `module` run inside a scope. If checkpointing wraps the module's forward, the scope is inside the region."""
    swap_forward(module, run_scoped, scope)


@wraps_any_forward
def run_scoped(
    stock: Callable[..., Any], scope: ScopeRewrite | None, module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Run the stock forward of `module`, inside `scope` unless that is None."""
    if scope is None:
        return stock(module, *args, **kwargs)
    if scope.modes:
        stock = functools.partial(run_inside, scope.modes, stock)
    # Without gradients, train mode stands for the first run of a block by reentrant checkpointing.
    if scope.look is not None and not is_compiling() and (torch.is_grad_enabled() or module.training):
        scope.history.look(module, scope.look)
    if steps_aside(off="" if scope.compression is None else _NOT_QUANTISED):
        return stock(module, *args, **kwargs)
    return run_in_scope(scope, stock, module, *args, **kwargs)


def run_in_scope(rewrite: ScopeRewrite, run: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``run(module, *args, **kwargs)``, one forward of `module`, inside its scope."""
    if rewrite.prepare is not None and rewrite.history.sees_new_linears(module):
        rewrite.prepare(module)
    scope = rewrite.around(module, args, kwargs)
    if scope is _CLOSED:
        return run(module, *args, **kwargs)
    with Region(repeats=not rewrite.history.has_pre_hooks()) as region:
        with scope:
            output = run(module, *args, **kwargs)
        region.leaves(output)
    return output


@contextlib.contextmanager
def running_scopes(model: nn.Module) -> Iterator[list[str]]:
    """Inside, the names of the running modules of `model` with a scope, the innermost last, behind an empty name. For
    checks of the tensors that are saved when a scope ends."""
    running = [""]

    def enter(name: str, *call: Any) -> None:
        running.append(name)

    def leave(*call: Any) -> None:
        running.pop()

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            state = swap_state(module) if is_swapped(module) else None
            if isinstance(getattr(state, "scope", state), ScopeRewrite):
                hooks.enter_context(module.register_forward_pre_hook(functools.partial(enter, name)))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        yield running


def choose_scopes(plan: PlanView, every: Sequence[InScopes]) -> dict[str, ScopeRewrite]:
    """Module name -> its scope; `every` is the effect of each patch."""
    default = frozenset[str]().union(*(each.families for each in every))
    families = _scoped_families(plan, every, default)
    scopes = {name: ScopeRewrite(rules) for name, rules in families.items()}
    prepare = next((each.prepare for each in every if each.prepare is not None), None)
    if prepare is not None and not any(each.exchanges for each in every):
        scopes = {name: replace(scope, prepare=prepare(name)) for name, scope in scopes.items()}
    for each in every:
        for name in each.compressed if each.compression is not None else ():
            if name and plan.recipe.selects(name):
                scopes[name] = ScopeRewrite(families.get(name, default), each.compression)
    scopes = {name: scope for name, scope in scopes.items() if name not in plan.sites.without_hooks}
    look = next((each.look for each in every if each.look is not None), None)
    stacks = {parent(name): name for name in reversed(plan.sites.blocks) if name in scopes}
    scopes |= {name: replace(scopes[name], look=look) for name in stacks.values()}
    modes = {name: tuple(each.modes[name] for each in every if name in each.modes) for name in scopes}
    return {name: replace(scope, modes=modes[name]) for name, scope in scopes.items()}


def innermost(name: str, scopes: Mapping[str, ScopeRewrite]) -> ScopeRewrite:
    """The scope of the module `name`; without one, a scope with the families of the innermost scope around it."""
    if name in scopes:
        return scopes[name]
    around = [scope for scope in scopes if is_inside(name, scope)]
    if not around:
        return ScopeRewrite(frozenset())
    scope = scopes[max(around, key=len)]
    return ScopeRewrite(scope.families, prepare=scope.prepare)


def _scoped_families(plan: PlanView, every: Sequence[InScopes], default: frozenset[str]) -> dict[str, frozenset[str]]:
    """Module with a scope -> families of rules that hold inside it. Scopes are the blocks in which something is
    rewritten and, outside of blocks, the modules that patches name in `InScopes.outside`. Modules inside for which a
    patch excludes families get a narrower scope of their own."""
    blocks, rewritten = plan.sites.blocks, {entry.site for entry in plan.rewrites}
    scopes = {block: default for block in blocks if any(is_inside(name, block) for name in rewritten)}
    outside = (name for each in every for name in each.outside if name and not _is_in_any(name, blocks))
    scopes |= dict.fromkeys(outside, default)
    for each in every:
        for name, excluded in each.excluded.items():
            if _is_in_any(name, scopes):
                scopes[name] = scopes.get(name, default) - excluded
    return scopes


def _is_in_any(name: str, modules: Collection[str]) -> bool:
    return any(is_inside(name, module) for module in modules)
