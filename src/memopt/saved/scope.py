"""Keep a handle instead of a tensor that can be made again, wherever autograd saves one.

Inside a :class:`RecomputeScope` every tensor that any operation saves for backward passes through a saved-tensor
hook. If the tensor (or the base of which it is a view) was made by a node with a rule (`memopt.saved.rules`), a
:class:`Handle` to that node is kept; backward makes the tensor again once for all its holders and lets it go with the
last of them. Everything else is kept as autograd would keep it, or handed to the hook that was active outside
(activation checkpointing, offloading, a memory report), so scopes compose with those in both orders.

Identity comes from the graph, not from addresses: the handle owns the producing node, and the node owns what it
saved. A tensor that was changed in place since (version > 0) is never replaced by a handle.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from memopt.saved.copies import Source, Step, done_again, source_of
from memopt.saved.pinned import PinnedStorages
from memopt.saved.rules import RULES, Node, Rule
from memopt.saved.savers import may_be_a_function
from memopt.saved.versions import is_unchanged

_METADATA_KEY = "memopt"
#: Subclasses (sharded, nested, quantised tensors) may not be made of a size, strides and an offset.
_PLAIN_TYPES = (Tensor, nn.Parameter, FakeTensor)
#: Under these names nodes of PyTorch's own show the hooks of the tensors that the rules read.
_RAW_SAVED = ("_raw_saved_self", "_raw_saved_other", "_raw_saved_result", "_raw_saved_output")
ALL_FAMILIES = frozenset({"norm", "activation", "gated_mlp"})


class RecomputeScope:
    """Context manager: inside it, outputs that can be made again are kept as handles.

    Entering is free where it has nothing to do: gradients are off, such a scope is already active, saved-tensor
    hooks are disabled, or the code is being compiled (the compiler's partitioner does this job itself).

    Args:
        families: which rules apply (``norm``, ``activation``, ``gated_mlp``).
    """

    def __init__(self, families: frozenset[str] = ALL_FAMILIES) -> None:
        self._families = families
        self._entered: list[tuple[saved_tensors_hooks, PinnedStorages | None] | None] = []

    def __enter__(self) -> None:
        self._entered.append(self._enter())

    def _enter(self) -> tuple[saved_tensors_hooks, PinnedStorages | None] | None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        autograd: Any = torch._C._autograd  # the hook stack has no public reader
        if autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
            return None
        outer = autograd._top_saved_tensors_default_hooks(False)
        if outer is not None and isinstance(outer[0], _Pack):
            if outer[0].families == self._families:
                return None
            outer = outer[0].outer
        pack = _Pack(self._families, outer)
        hooks = saved_tensors_hooks(pack, _unpack)
        hooks.__enter__()
        return hooks, pack.pinned

    def __exit__(self, *error: object) -> None:
        entered = self._entered.pop()
        if entered is not None:
            hooks, pinned = entered
            hooks.__exit__(*error)
            if pinned is not None:
                pinned.settle()


class _Pack:
    """The pack hook of one scope."""

    __slots__ = ("_first_node", "_outer_pack", "_outer_unpack", "families", "outer", "pinned")

    def __init__(self, families: frozenset[str], outer: tuple[Callable[..., Any], Callable[..., Any]] | None) -> None:
        self.families, self.outer = families, outer
        self._outer_pack: Callable[..., Any] | None = None
        self._outer_unpack: Callable[..., Any] | None = None
        if outer is not None:
            self._outer_pack, self._outer_unpack = outer
        # Activation checkpointing runs this code twice and must see the same tensors both times, but the second run
        # starts from detached inputs. So under a foreign hook only nodes made inside this scope count.
        restricted = outer is not None and not getattr(outer[0], "memopt_observer", False)
        # What a foreign hook keeps is its own affair.
        self.pinned = None if restricted else PinnedStorages()
        autograd: Any = torch._C._autograd
        self._first_node: int = autograd._get_sequence_nr() if restricted else -1

    def __call__(self, tensor: Tensor) -> Handle | _Kept | _Forwarded:
        base = tensor._base
        if base is None:
            base = tensor
        node: Node = base.grad_fn
        if node is not None and tensor._version == 0 and _is_plain_view(tensor, base):
            source = source_of(node)
            rule = RULES.get(source.node.name()) if source.node is not None else None
            # A function of somebody's may write into what it alone holds, and a clone is its own.
            own = not source.is_only_cast and may_be_a_function(sys._getframe().f_back)
            if rule is not None and not own and _is_followed(rule, source) and self._applies(rule, source.node):
                return Handle(source, rule, tensor, base)
        holder = _Kept(tensor) if self._outer_pack is None else self._outer_pack(tensor)
        if self.pinned is not None and hasattr(holder, "keep") and type(tensor) in _PLAIN_TYPES:
            self.pinned.saved(holder, tensor)
        return holder if self._outer_pack is None else _Forwarded(holder, self._outer_unpack)

    def _applies(self, rule: Rule, node: Node) -> bool:
        number = node._sequence_nr()
        if rule.family not in self.families or number < self._first_node or not rule.keeps_enough(node):
            return False
        # A node made inside a foreign hook too (checkpointing of the node's module alone) has its tensors kept by that
        # hook, which may give each back only once.
        return _kept_by_a_scope(node)


def _is_followed(rule: Rule, source: Source) -> bool:
    """Whether what was done to the output of a node with `rule` may be done again.

    Between its making and its copy a tensor may be changed behind autograd's back. Where the node keeps it, reading it
    then is an error, and where there is a witness, that tells. Of a copy between two others nothing tells, but casts
    are made on the spot, by autocast or an adapter.
    """
    if rule.of_copies_only:
        return source.copies == 1 or (source.copies == 0 and source.casts > 0)
    return source.is_only_cast or (source.copies == 1 and source.casts == 0 and is_unchanged(source.node))


def _kept_by_a_scope(node: Node) -> bool:
    """Whether the tensors that `node` saved are there, and passed through no hook but a scope's or an observer's."""
    try:
        saved = getattr(node, "_raw_saved_tensors", None) or [
            getattr(node, name) for name in _RAW_SAVED if hasattr(node, name)
        ]
        hooks = [getattr(tensor, "unpack_hook", None) for tensor in saved]
    except RuntimeError:  # backward has been through it
        return False
    return all(hook in (None, _unpack) or getattr(hook, "memopt_observer", False) for hook in hooks)


def _is_plain_view(tensor: Tensor, base: Tensor) -> bool:
    """Whether size, strides and offset say all about `tensor` that its base does not."""
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.dtype == base.dtype
        and tensor.is_conj() == base.is_conj()
        and tensor.is_neg() == base.is_neg()
    )


def _unpack(packed: Handle | _Kept | _Forwarded) -> Tensor:
    return packed.unpack()


class _Kept:
    """A tensor kept as it is. Hooks switch autograd's own version check off, so it is made here."""

    __slots__ = ("__weakref__", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        # A non-leaf would own the node that owns it: a reference cycle that only a detached alias avoids. A leaf is
        # kept itself, because sharded training may exchange its data between forward and backward.
        self.keep(tensor if tensor.is_leaf else tensor.detach())

    def keep(self, tensor: Tensor) -> None:
        self.tensor, self._version = tensor, tensor._version

    def unpack(self) -> Tensor:
        if self.tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {self.tensor._version}; "
                f"expected version {self._version} instead."
            )
        return self.tensor


class _Forwarded:
    """A tensor that the outer hook keeps.

    Checkpointing's hook gives each tensor back only once per backward. A handle that reads its node's saved tensors
    takes that one turn, so the tensor stays here until the node itself asks.
    """

    __slots__ = ("_early", "_packed", "_unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor] | None) -> None:
        self._packed, self._unpack = packed, unpack
        self._early: Tensor | None = None

    def unpack(self) -> Tensor:
        tensor = self._early
        if tensor is None:
            assert self._unpack is not None
            tensor = self._unpack(self._packed)
        self._early = tensor if _remaking.depth else None
        return tensor


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


class _Remaking(threading.local):
    """Whether this thread is making a tensor again (and not running a node's backward)."""

    depth = 0


_remaking = _Remaking()


_Form = tuple[tuple[Step, ...], tuple[int, ...], torch.device]
"""What was done to a node's output, and how the result lies in memory."""


class _Remade:
    """The remade output of one node while its holders need it; lives in the node's metadata, refers to no node."""

    __slots__ = ("holders", "served", "values")

    def __init__(self) -> None:
        self.holders = 0
        self.served = 0
        self.values: dict[_Form, Tensor] = {}

    def release(self, *_: object) -> None:
        self.served = 0
        self.values.clear()


class Handle:
    """Stands for a tensor that `node` can make again."""

    __slots__ = ("_form", "_node", "_offset", "_remade", "_rule", "_size", "_stride")

    def __init__(self, source: Source, rule: Rule, tensor: Tensor, base: Tensor) -> None:
        node = source.node
        self._node, self._rule = node, rule
        for what, how in source.steps:
            if what == "constant":
                how.read(base)
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset() - base.storage_offset()
        self._form: _Form = (source.steps, base.stride(), tensor.device)
        remade = node.metadata.get(_METADATA_KEY)
        if remade is None:
            remade = node.metadata[_METADATA_KEY] = _Remade()
            # All holders come before the node in backward: when its turn comes, nothing needs the value any more.
            node.register_prehook(remade.release)
        remade.holders += 1
        self._remade: _Remade = remade

    def unpack(self) -> Tensor:
        remade = self._remade
        value = remade.values.get(self._form)
        if value is None:
            value = remade.values[self._form] = self._make()
        remade.served += 1
        if remade.served >= remade.holders:
            remade.release()
        return value.as_strided(self._size, self._stride, value.storage_offset() + self._offset)

    def _make(self) -> Tensor:
        steps, stride, device = self._form
        value = next((value for (done, *_), value in self._remade.values.items() if not done), None)
        if value is None:
            _remaking.depth += 1
            try:
                # Whether backward is run inside an autocast region must not matter.
                with torch.no_grad(), _without_autocast(device):
                    value = self._rule.remake(self._node)
            finally:
                _remaking.depth -= 1
        for step in steps:
            value = done_again(value, step)
        value = value.to(device)
        if value.stride() != stride:
            laid_out = torch.empty_strided(value.size(), stride, dtype=value.dtype, device=device)
            value = laid_out.copy_(value)
        return value
