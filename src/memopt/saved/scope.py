"""Save a handle instead of a tensor that can be recomputed, in every operation inside a scope.

Inside a :class:`RecomputeScope` every tensor that any operation saves for backward passes through a saved-tensor
hook. If the tensor (or the base of which it is a view) was made by a node with a rule (`memopt.recompute.rules`), a
:class:`Handle` to that node is saved. Backward recomputes the tensor once for all its handles and frees it with the
last handle. Any other tensor is saved as autograd would save it, or passed to the hook that was active outside
(activation checkpointing, offloading, a memory report), so scopes compose with such hooks in both orders.

A handle finds its tensor through the graph, not by address: it owns the producing node, and the node owns its saved
tensors. A handle never replaces a tensor that was changed in place (version > 0).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memopt.recompute.expression import Expression, step
from memopt.recompute.graph import expression_of, may_be_repeated, may_have_rule, nodes_read
from memopt.recompute.operations import at_hand
from memopt.recompute.rules import FAMILIES, Node, saves_output
from memopt.recompute.versions import check_version
from memopt.saved.handles import Handle, Once, once_in
from memopt.saved.kept import Forwarded, Kept, ShapeOnly, alias_of, may_be_a_function, may_write_into_saved
from memopt.saved.pinned import Holder, Packed, PinnedStorages
from memopt.saved.slots import Compression, Compressor, Packing, Slot, settle
from memopt.saved.whole import FollowedHooks, is_kept_whole, saving
from memopt.torch_compat import (
    PLAIN_TYPES,
    current_graph_task_id,
    held,
    no_torch_function,
    saved_tensors_hooks_disabled,
    top_saved_tensors_hooks,
    unpack_hooks,
)

S = TypeVar("S", bound=Slot)
#: A tensor that is kept as it is, with its version, or an object whose `unpack` returns the tensor.
Saved = Packed | tuple[Tensor, int]


class RecomputeScope:
    """Context manager: inside it, outputs that can be recomputed are saved as handles.

    Entering does nothing if gradients are off, such a scope is already active, saved-tensor hooks are disabled, or the
    code is being compiled (the compiler's partitioner does this job itself).

    Args:
        families: families of rules that apply (`memopt.recompute.rules.FAMILIES`).
        compression: stores saved tensors that are not recomputed; needs `hidden`.
        hidden: the hidden states that the code inside reads; their size decides which tensors are worth compressing.
        proofs: handle -> whether it was seen to give its tensor; kept from one call of a module to the next.
    """

    def __init__(
        self,
        families: frozenset[str] = FAMILIES,
        compression: Compression | None = None,
        hidden: Tensor | None = None,
        proofs: dict[Any, bool] | None = None,
    ) -> None:
        self._families = families
        self._proofs = {} if proofs is None else proofs
        self._compression = compression if hidden is not None else None
        self._hidden = hidden
        self._entered: list[tuple[saved_tensors_hooks, _Pack] | None] = []
        self.replaced: bool | None = None
        """After the scope: whether any tensor was kept in another way than without it; None if it did not enter."""

    def __enter__(self) -> None:
        self._entered.append(self._enter())

    def _enter(self) -> tuple[saved_tensors_hooks, _Pack] | None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or saved_tensors_hooks_disabled() is not None:
            return None
        outer, inside = top_saved_tensors_hooks(False), None
        if outer is not None and isinstance(outer[0], _Pack):
            inside = outer[0]
            if outer[0].families == self._families and self._compression in (None, outer[0].compression):
                return None
            outer = outer[0].outer
        pack = _Pack(self._families, outer, self._compression, self._hidden, self._proofs, inside=inside)
        hooks = (saved_tensors_hooks if pack.compressor is None else FollowedHooks)(pack, _unpack)
        hooks.__enter__()
        return hooks, pack

    def __exit__(self, *error: object) -> None:
        entered = self._entered.pop()
        if entered is not None:
            hooks, pack = entered
            hooks.__exit__(*error)
            pack.settle()
            self.replaced = pack.replaces


class _Pack:
    """The pack hook of one scope."""

    __slots__ = (
        "_borrowed", "_compressor", "_made_inside", "_outer_unpack", "_pinned", "_proofs", "_proved", "_replaces",
        "_slots", "compression", "families", "inside", "memopt_outer_pack", "outer",
    )  # fmt: skip

    def __init__(
        self,
        families: frozenset[str],
        outer: tuple[Callable[..., Any], Callable[..., Any]] | None,
        compression: Compression | None,
        hidden: Tensor | None,
        proofs: dict[Any, bool],
        inside: _Pack | None,
    ) -> None:
        self._proofs, self._proved = proofs, 0
        self.families, self.outer, self.compression, self.inside = families, outer, compression, inside
        pair: tuple[Any, Any] = outer or (None, None)
        self.memopt_outer_pack, self._outer_unpack = pair
        # Activation checkpointing runs this code twice and must see the same tensors both times, but the second run
        # starts from detached inputs. So under a foreign hook only nodes made inside this scope count. A function that
        # no other scope has unpacks their tensors and marks them. Sequence numbers do not: each thread counts its own.
        restricted = outer is not None and not getattr(outer[0], "memopt_observer", False)
        self._made_inside: list[Callable[..., Any]] = []
        if restricted:
            self._outer_unpack = functools.partial(self._outer_unpack)
            around: _Pack | None = self
            while around is not None:
                around._made_inside.append(self._outer_unpack)
                around = around.inside
        # Leave tensors alone that a foreign hook keeps, and the second run of reentrant checkpointing: it uses its
        # tensors at once.
        exchanges = not restricted and current_graph_task_id() == -1
        self._pinned = PinnedStorages() if exchanges else None
        self._compressor: Compressor | None = None
        self._borrowed: Compressor | None = None
        if compression is not None and hidden is not None and exchanges:
            self._compressor = compression(hidden)
        elif inside is not None:  # the scope around it compresses
            self.compression, self._borrowed = inside.compression, inside.compressor
        self._slots: list[weakref.ref[Slot]] = []
        self._replaces = self.compressor is not None or inside is not None  # whose families would apply without this

    def __call__(self, tensor: Tensor, frame: FrameType | None = None) -> Saved:
        base = tensor._base
        node: Node = tensor.grad_fn if base is None else base.grad_fn
        if node is not None and may_have_rule(node):
            handle = self._handle(tensor, of_casts_only=may_write_into_saved(frame or sys._getframe().f_back))
            if handle is not None:
                return handle
        if node is not None and (once := self._once(tensor, tensor if base is None else base, node)) is not None:
            return once
        if self.memopt_outer_pack is None and self.compressor is None:
            if tensor.is_leaf:
                # A view that was made without gradients may own a graph through its base.
                return (tensor if base is None else alias_of(tensor)), tensor._version
            if self._pinned is None or type(tensor) not in PLAIN_TYPES or not self._pinned.applies_to(tensor):
                return tensor.detach(), tensor._version
        return self._kept(tensor, by_function=may_be_a_function(frame or sys._getframe().f_back))

    def _kept(self, tensor: Tensor, *, by_function: bool) -> Packed:
        """The object for autograd in place of a tensor that is kept as it is, at least until the module is done."""
        packed, holder = self._held(tensor)
        if self._pinned is not None and holder is not None and not by_function and type(tensor) in PLAIN_TYPES:
            self._pinned.saved(holder, tensor)
        compressor = self.compressor
        # A leaf that an operation of PyTorch saves is data: a mask, a cast of a frozen weight.
        is_made = by_function or not tensor.is_leaf
        if compressor is not None and holder is not None and is_made and not is_kept_whole(tensor):
            packed = compressor.saved(packed, holder, tensor, needs_strides=by_function)
        return packed

    @property
    def replaces(self) -> bool:
        """Whether any tensor was, or may have been, kept in another way than without the scope."""
        return self._replaces or (self._pinned is not None and self._pinned.has_copied)

    @property
    def is_free(self) -> bool:
        """Whether the scope may exchange saved tensors: not under a foreign hook, and not inside a backward."""
        return self._pinned is not None

    @property
    def compressor(self) -> Compressor | None:
        """The compressor of this scope, or of the scope around it."""
        return self._compressor or self._borrowed

    def _handle(self, tensor: Tensor, *, of_casts_only: bool = False) -> Handle | None:
        """A counted handle of `tensor`; None if it cannot be recomputed."""
        followed = self._followed(tensor, of_casts_only=of_casts_only)
        if followed is None:
            return None
        self._replaces = True
        if self._made_inside:
            followed.memopt_unpack = self._outer_unpack  # marks it as made inside, like a tensor of the foreign hook
        return followed.taken()

    def _followed(self, tensor: Tensor, *, of_casts_only: bool = False) -> Handle | None:
        """A handle of `tensor`, not counted as a reader yet; None if it cannot be recomputed."""
        base = tensor if tensor._base is None else tensor._base
        node: Node = base.grad_fn
        is_whole = saving.whole and self.compressor is not None
        if is_whole or node is None or not may_have_rule(node) or tensor._version != 0:
            return None
        expression = expression_of(node)
        if base.is_complex() and not tensor.is_complex() and not base.is_conj():  # a rotation by a complex factor
            base, expression = torch.view_as_real(base.detach()), expression.then(step(torch.view_as_real))
        rule = expression.rule
        if rule is None or rule.family not in self.families or not _is_plain_view(tensor, base):
            return None
        follows = may_be_repeated(expression, rule, of_casts_only=of_casts_only)
        if not follows or not all(self._keeps(*each) for each in nodes_read(expression)):
            return None
        handle = Handle(expression, tensor, base, shared_by=None if of_casts_only else node)
        if not expression.to_prove:
            return handle if rule.keeps_enough(expression.node) else None
        if of_casts_only and tensor.numel() < base.numel():
            return None  # each part that a function may write into would recompute the whole base
        keeps_enough = rule.keeps_enough(expression.node) or saves_output(expression.node)
        return handle if keeps_enough and self._is_proven(expression, handle, base) else None

    def _is_proven(self, expression: Expression, handle: Handle, base: Tensor) -> bool:
        """Whether `handle` was seen to give its tensor, in this call of the module or in an earlier one."""
        # A foreign hook cannot unpack its tensors in the forward.
        if not self.is_free or self.compressor is not None:
            return False
        if handle.is_shared:
            return True
        self._proved += 1
        key = self._proved, expression.to_prove, base.dtype
        if key not in self._proofs:
            self._proofs[key] = handle.gives(base)
        return self._proofs[key]

    def _once(self, tensor: Tensor, base: Tensor, node: Node) -> Once | None:
        """The object to keep for a tensor that repeats a smaller one; None for other tensors."""
        if not self.is_free or self.compressor is not None or not _is_plain_view(tensor, base):
            return None
        found = once_in(tensor, base, node)
        if found is None:
            return None
        self._replaces = True
        return Once(self._keep(found[0]), found[1], tensor)

    def _held_unless_recomputed(self, tensor: Tensor) -> tuple[Packed, Holder | None]:
        handle = self._handle(tensor)
        return self._held(tensor) if handle is None else (handle, None)

    def _held(self, tensor: Tensor) -> tuple[Packed, Holder | None]:
        """The object for autograd in place of `tensor`, and its holder; None if the tensor may not be exchanged."""
        holder = Kept(tensor) if self.memopt_outer_pack is None else self.memopt_outer_pack(tensor)
        packed = holder if self.memopt_outer_pack is None else Forwarded(holder, self._outer_unpack)
        return packed, holder if hasattr(holder, "keep") else None

    def _keep(self, tensor: Tensor) -> Packed:
        return self._held(tensor)[0]

    def slot(self, make: Callable[[Packing], S]) -> S | None:
        """A slot whose tensor may be exchanged; None if a foreign hook keeps saved tensors, or inside a backward."""
        if self._pinned is None:
            return None
        slot = make(Packing(self._held, self._held_unless_recomputed, self._followed, self._keep))
        # Settle with the outermost scope: a reader of an output may be outside of an inner scope.
        outermost = self
        while outermost.inside is not None:
            outermost = outermost.inside
        outermost._slots.append(weakref.ref(slot))
        self._replaces = outermost._replaces = True
        return slot

    def settle(self) -> None:
        """Called when the module is done: replace kept tensors by smaller ones."""
        if self._pinned is not None:
            self._pinned.settle()
        settle(self._slots)
        if self._compressor is not None:
            self._compressor.settle()

    def _keeps(self, node: Node, field: str | None) -> bool:
        """Whether the saved tensors of `node` (only that of `field`, if given) exist and passed through allowed hooks.

        Allowed are hooks of scopes and observers and the unpack hook outside of this scope; under a foreign hook, only
        that of this scope or of one inside it. Another foreign hook (checkpointing of the node's module alone) may
        return each tensor only once, or run its region again early. With `field`, the tensor must be no parameter.
        """
        try:
            hooks = [hook for hook in unpack_hooks(node, field) if hook is not None]
        except RuntimeError:  # backward has freed them
            return False
        # Sharded training may have freed a parameter before a reader uses it.
        if field is not None and isinstance(at_hand(held(node, field)), (nn.Parameter, type(None))):
            return False
        if self._made_inside:
            return bool(hooks) and all(hook in self._made_inside for hook in hooks)
        return all(hook in (_unpack, self._outer_unpack) or getattr(hook, "memopt_observer", False) for hook in hooks)


def in_a_scope() -> bool:
    """Whether a scope's hook is the innermost saved-tensor hook, which gets the tensors saved here."""
    return _innermost() is not None


class _UnseenPack(_Pack):
    """A scope's pack hook that hides its operations from active function modes, to save their time."""

    __slots__ = ()

    def __call__(self, tensor: Tensor, frame: FrameType | None = None) -> Saved:
        with no_torch_function():
            return super().__call__(tensor, frame or sys._getframe().f_back)


def applies(family: str) -> bool:
    """Whether readers in the innermost scope save handles of this family's outputs, wherever these are produced, and
    nothing is quantised. False under a foreign hook, which runs the code again or keeps tensors elsewhere."""
    pack = _innermost()
    return pack is not None and family in pack.families and pack.compressor is None and pack.is_free


class _Unseen(threading.local):
    depth = 0


#: Whether :func:`packing_unseen` is active in this thread: its `depth` is not 0.
unseen = _Unseen()


@contextlib.contextmanager
def packing_unseen() -> Iterator[None]:
    """Inside, function modes do not see operations of the innermost scope. Only where :func:`applies` is true."""
    pack = _innermost()
    assert pack is not None
    before, pack.__class__ = pack.__class__, _UnseenPack
    unseen.depth += 1
    try:
        yield
    finally:
        unseen.depth -= 1
        pack.__class__ = before


def recomputes(tensor: Tensor) -> bool:
    """Whether an operation that saves `tensor` here saves a handle, because `tensor` can be recomputed."""
    return (pack := _innermost()) is not None and pack._followed(tensor) is not None


def new_slot(make: Callable[[Packing], S]) -> S | None:
    """A slot in the innermost scope; None if there is no scope, or as in `_Pack.slot`."""
    pack = _innermost()
    return None if pack is None else pack.slot(make)


def saving_by(pack: Callable[[Tensor], Any]) -> saved_tensors_hooks:
    """Inside, saved tensors go through `pack` of a slot."""
    return saved_tensors_hooks(pack, _unpack)


def saving_shape_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Inside, in a scope, operations save only the shape of `tensor`; their backward must not read its values."""
    pack = _innermost()
    if pack is None:
        return contextlib.nullcontext()
    pack._replaces, whole = True, weakref.ref(tensor)  # weak: PyTorch keeps the hook as long as the saved tensors
    return saved_tensors_hooks(lambda saved: ShapeOnly(saved) if saved is whole() else pack(saved), _unpack)


def _innermost() -> _Pack | None:
    """The pack hook of the innermost scope; None if another hook is inside it."""
    top = top_saved_tensors_hooks(False)
    return top[0] if top is not None and isinstance(top[0], _Pack) else None


def _is_plain_view(tensor: Tensor, base: Tensor) -> bool:
    """Whether size, strides and offset are enough to make `tensor` from its base."""
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.dtype == base.dtype
        and tensor.is_conj() == base.is_conj()
        and tensor.is_neg() == base.is_neg()
    )


def _unpack(packed: Saved) -> Tensor:
    if type(packed) is tuple:
        tensor, version = packed
        if tensor._version != version:
            check_version(tensor, version)
        return tensor
    return packed.unpack()  # type: ignore[union-attr]
