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

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from memopt.saved.copies import Step, below_copies, done_again
from memopt.saved.pinned import PinnedStorages
from memopt.saved.rules import RULES, Node, Rule

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
        self._hooks: saved_tensors_hooks | None = None
        self._pinned: PinnedStorages | None = None

    def __enter__(self) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        autograd: Any = torch._C._autograd  # the hook stack has no public reader
        if autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
            return
        outer = autograd._top_saved_tensors_default_hooks(False)
        if outer is not None and isinstance(outer[0], _Pack):
            if outer[0].families == self._families:
                return
            outer = outer[0].outer
        pack = _Pack(self._families, outer)
        self._pinned = pack.pinned
        self._hooks = saved_tensors_hooks(pack, _unpack)
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._hooks is not None:
            hooks, self._hooks = self._hooks, None
            hooks.__exit__(*error)
        if self._pinned is not None:
            pinned, self._pinned = self._pinned, None
            pinned.settle()


class _Pack:
    """The pack hook of one scope."""

    __slots__ = ("_first_node", "_outer_pack", "_outer_unpack", "_start", "families", "outer", "pinned")

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
        self._start: int = autograd._get_sequence_nr()
        self._first_node = self._start if restricted else -1

    def __call__(self, tensor: Tensor) -> Handle | _Kept | _Forwarded:
        base = tensor._base
        if base is None:
            base = tensor
        node: Node = base.grad_fn
        if node is not None and tensor._version == 0 and _is_plain_view(tensor, base):
            source, steps, copied = below_copies(node)
            rule = RULES.get(source.name()) if source is not None else None
            if rule is not None and (copied or not rule.of_copies_only) and self._applies(rule, source):
                return Handle(source, rule, steps, tensor, base)
        holder = _Kept(tensor) if self._outer_pack is None else self._outer_pack(tensor)
        if self.pinned is not None and hasattr(holder, "keep") and type(tensor) in _PLAIN_TYPES:
            self.pinned.saved(holder, tensor)
        return holder if self._outer_pack is None else _Forwarded(holder, self._outer_unpack)

    def _applies(self, rule: Rule, node: Node) -> bool:
        number = node._sequence_nr()
        if rule.family not in self.families or number < self._first_node or not rule.keeps_enough(node):
            return False
        # A node made inside this scope, but inside a foreign hook too (checkpointing of the node's module alone), has
        # its tensors kept by that hook, which may give each back only once.
        return number < self._start or _kept_by_a_scope(node)


def _kept_by_a_scope(node: Node) -> bool:
    """Whether the tensors that `node` saved passed through no hook but a scope's."""
    saved = getattr(node, "_raw_saved_tensors", None) or [
        getattr(node, name) for name in _RAW_SAVED if hasattr(node, name)
    ]
    return all(getattr(tensor, "unpack_hook", None) in (None, _unpack) for tensor in saved)


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


class _Remade:
    """The remade output of one node while its holders need it; lives in the node's metadata, refers to no node."""

    __slots__ = ("holders", "served", "values")

    def __init__(self) -> None:
        self.holders = 0
        self.served = 0
        self.values: dict[tuple[Step, ...], Tensor] = {}

    def release(self, *_: object) -> None:
        self.served = 0
        self.values.clear()


class Handle:
    """Stands for a tensor that `node` can make again."""

    __slots__ = ("_base_stride", "_device", "_node", "_offset", "_remade", "_rule", "_size", "_steps", "_stride")

    def __init__(self, node: Node, rule: Rule, steps: tuple[Step, ...], tensor: Tensor, base: Tensor) -> None:
        self._node, self._rule, self._steps = node, rule, steps
        self._size, self._stride, self._device = tensor.size(), tensor.stride(), tensor.device
        self._offset = tensor.storage_offset() - base.storage_offset()
        self._base_stride = base.stride()
        remade = node.metadata.get(_METADATA_KEY)
        if remade is None:
            remade = node.metadata[_METADATA_KEY] = _Remade()
            # All holders come before the node in backward: when its turn comes, nothing needs the value any more.
            node.register_prehook(remade.release)
        remade.holders += 1
        self._remade: _Remade = remade

    def unpack(self) -> Tensor:
        remade = self._remade
        value = remade.values.get(self._steps)
        if value is None:
            value = remade.values[self._steps] = self._make()
        remade.served += 1
        if remade.served >= remade.holders:
            remade.release()
        return value.as_strided(self._size, self._stride, value.storage_offset() + self._offset)

    def _make(self) -> Tensor:
        value = self._remade.values.get(())
        if value is None:
            _remaking.depth += 1
            try:
                # Whether backward is run inside an autocast region must not matter.
                with torch.no_grad(), _without_autocast(self._device):
                    value = self._rule.remake(self._node)
            finally:
                _remaking.depth -= 1
        for step in self._steps:
            value = done_again(value, step)
        value = value.to(self._device)
        if value.stride() != self._base_stride:
            value = torch.empty_strided(value.size(), self._base_stride, dtype=value.dtype, device=value.device).copy_(
                value
            )
        return value
