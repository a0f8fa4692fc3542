"""Autograd's private names: saved-tensor hooks, graph nodes and their saved tensors, storages and their owners."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memopt.torch_compat.activations import OPERATIONS
from memopt.torch_compat.lookup import find, is_found

#: (pack, unpack), as `torch.autograd.graph.saved_tensors_hooks` takes them.
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

# -- saved-tensor hooks ---------------------------------------------------------------------------------------------

_TOP = "torch._C._autograd._top_saved_tensors_default_hooks"
_DISABLED = "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message"
_NO_SCOPE = "nothing is recomputed, sampled, coded or compressed inside a block"


def _unknown_hooks(ignore_is_tracing: bool) -> Hooks | None:
    return (lambda tensor: tensor), (lambda packed: packed)  # equal to no other pair


def _unknown_message() -> str | None:
    return "it is not known whether saved-tensor hooks are disabled"


top_saved_tensors_hooks: Callable[[bool], Hooks | None] = find(_TOP, _unknown_hooks, _NO_SCOPE)
"""The innermost pair of saved-tensor hooks that is active in this thread; None if none is.

Its argument: True to see hooks while they are traced, else False. PyTorch runs only the innermost hooks, so a scope
passes its tensors to the pair outside. Without this name no scope opens and no linear recomputes its input.
"""

saved_tensors_hooks_disabled: Callable[[], str | None] = find(_DISABLED, _unknown_message, _NO_SCOPE)
"""Why saved-tensor hooks may not be entered now (function transforms disable them); None if they may.

Entering disabled hooks is an error, so without this name no scope opens.
"""
if not is_found(_TOP):
    saved_tensors_hooks_disabled = _unknown_message
_ANSWERS = saved_tensors_hooks_disabled is not _unknown_message


def without_foreign_hooks() -> AbstractContextManager[object]:
    """Keeps saved tensors from foreign hooks (checkpointing, offloading); there are none where hooks are disabled."""
    if _ANSWERS and saved_tensors_hooks_disabled() is not None:
        return nullcontext()
    return saved_tensors_hooks(_without_its_graph, _itself)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _without_its_graph(tensor: Tensor) -> Tensor:
    # A node that saved its own output (sigmoid, softmax) with its graph would keep itself alive until backward runs it.
    return tensor.detach() if tensor.requires_grad else tensor


# -- graph nodes ----------------------------------------------------------------------------------------------------

_NUMBER = "torch._C._functions.AccumulateGrad._sequence_nr"
_NEXT_NUMBER = "torch._C._autograd._get_sequence_nr"
_UNKNOWN_TIME = "the peak in a report does not say what causes it"

find(_NUMBER, None, _UNKNOWN_TIME)
next_sequence_number: Callable[[], float] = find(_NEXT_NUMBER, lambda: math.inf, _UNKNOWN_TIME)
"""The number that the next node of this thread gets. Numbers rise by one a node, and each thread counts for itself.

A GPU's backward runs in another thread, so numbers do not order nodes of forward and backward. A trace has one thread.
"""

sequence_number: Callable[[Any], float] = methodcaller("_sequence_nr") if is_found(_NUMBER) else lambda node: -1.0
"""The number of a node, as :func:`next_sequence_number` returned it before the node was made."""

current_node: Callable[[], Any] = find(
    "torch._C._current_autograd_node", lambda: None, "the peak in a report does not say what is recomputed"
)
"""The node whose backward this thread is running; None outside of backward."""

_BACKWARD_CLASS = "torch.autograd.Function._backward_cls"
find(_BACKWARD_CLASS, None, "backward of memopt's operators takes longer")


def call_its_backward(function: Any) -> None:
    """Let autograd call the ``backward`` of `function`, a `torch.autograd.Function` without a ``vjp``, itself: the
    replaced method of ``_backward_cls`` tests at every call which of the two there is. Without this name it is not
    replaced."""
    if is_found(_BACKWARD_CLASS):
        function._backward_cls.apply = function.backward


_METADATA = "torch._C._functions.AccumulateGrad._input_metadata"
input_metadata: Callable[[Any], Any] | None = (
    attrgetter("_input_metadata")
    if find(_METADATA, None, "casts and reshaped copies of recomputable tensors are saved") is not None
    else None
)
"""One entry for each output of a node's forward operation (input of its backward) with its ``dtype`` and ``shape``.

Nodes of casts and views show the dtype and shape of their output nowhere else. None if PyTorch lacks this name.
"""

at_the_end_of_backward: Callable[[Callable[[], object]], object] = find(
    "torch.autograd.Variable._execution_engine.queue_callback",
    lambda function: None,
    "logits that are kept from inside the closure of an optimizer's step raise an error when they are read",
)
"""Calls a function without arguments when the backward that is running has ended. Called inside of it."""

current_graph_task_id: Callable[[], int] = find(
    "torch._C._current_graph_task_id", lambda: 0, "views are not copied and nothing is sampled, coded or compressed"
)
"""The number of the backward that this thread is running; -1 outside of backward.

Tensors that a forward saves inside backward (reentrant checkpointing) are used at once, so replacing them frees
nothing. Without this name every forward counts as one inside backward.
"""

# -- saved tensors of a node ----------------------------------------------------------------------------------------

#: Node of a padding by values of the tensor -> its mode, as `torch.nn.functional.pad` takes it.
PADS = {
    f"{name}Pad{rank}DBackward0": mode
    for name, mode in (("Reflection", "reflect"), ("Replication", "replicate"))
    for rank in (1, 2, 3)
}
_ATTENTIONS = ("FlashAttention", "EfficientAttention", "CudnnAttention", "FlashAttentionForCpu")
_ACTIVATED = (operation.node for operation in OPERATIONS.values() if operation.saves == "output")
_RESULTS = ("SoftmaxBackward0", "ExpBackward0", *_ACTIVATED)

#: Node of a batch norm, one for each library that computes it -> its field with eps.
BATCH_NORMS = {
    "NativeBatchNormBackward0": "eps",
    "CudnnBatchNormBackward0": "epsilon",
    "MiopenBatchNormBackward0": "epsilon",
}
_BATCH_NORM = ("input", "running_mean", "running_var", "result1", "result2", "training")
SAVED_FIELDS: dict[str, tuple[str, ...]] = {
    "MulBackward0": ("self", "other"),
    **{operation.node: ("self", *operation.constants) for operation in OPERATIONS.values() if operation.recompute},
    "ClampBackward1": ("self", "min", "max"),
    "PowBackward0": ("self", "exponent"),
    **{node: (*_BATCH_NORM, epsilon) for node, epsilon in BATCH_NORMS.items()},
    "BmmBackward0": ("self", "mat2"),
    "BaddbmmBackward0": ("batch1", "batch2", "beta", "alpha"),
    "IndexBackward0": ("indices",),
    "SelectBackward0": ("dim", "index"),
    "TransposeBackward0": ("dim0", "dim1"),
    "PermuteBackward0": ("dims",),
    "SliceBackward0": ("dim", "start", "end", "step"),
    "UnsqueezeBackward0": ("dim",),
    "ExpandBackward0": ("self_sym_sizes",),
    "RollBackward0": ("shifts", "dims"),
    "FlipBackward0": ("dims",),
    "RepeatBackward0": ("repeats",),
    "SplitBackward0": ("split_size", "dim"),
    "SplitWithSizesBackward0": ("split_sizes", "dim"),
    "UnbindBackward0": ("dim",),
    "AddBackward0": ("alpha",),
    "SubBackward0": ("alpha",),
    "DivBackward0": ("other",),
    "CatBackward0": ("dim",),
    "StackBackward0": ("dim",),
    "ConstantPadNdBackward0": ("pad",),
    **dict.fromkeys(PADS, ("padding",)),
    **dict.fromkeys(_RESULTS, ("result",)),
    **{f"ScaledDotProduct{attention}Backward0": ("output",) for attention in _ATTENTIONS},
}
"""Kind of node (its ``name()``) -> the fields that memopt reads with :func:`saved`."""

_NOT_RECOMPUTED = "outputs of some operations are saved instead of recomputed"
_UNSHOWN = frozenset(
    node
    for node, fields in SAVED_FIELDS.items()
    for field in fields
    if find(f"torch._C._functions.{node}._saved_{field}", None, _NOT_RECOMPUTED) is None
)


def shows_saved(node_name: str) -> bool:
    """Whether nodes of this kind show all their fields in `SAVED_FIELDS`; otherwise they have no rule."""
    return node_name in SAVED_FIELDS and node_name not in _UNSHOWN


def saved(node: Any, field: str) -> Any:
    """The tensor, number or tuple that `node` saved for its backward as `field`, its name in derivatives.yaml; negative
    dimensions as unsigned 64-bit numbers. Raises a RuntimeError if backward has released the saved tensors."""
    return getattr(node, "_saved_" + field)


def held(node: Any, field: str) -> Any:
    """The object that the node holds for its saved tensor `field`: the tensor, or a hook's packed object, not unpacked;
    None if PyTorch does not show it."""
    return getattr(getattr(node, "_raw_saved_" + field, None), "data", None)


_ENGINE = "torch.autograd.Variable._execution_engine.run_backward"
_engine: Callable[..., Any] | None = find(_ENGINE, None, "a trace of a step on fake tensors recomputes as the CPU does")


def run_backward(*losses: Tensor) -> None:
    """Backward from `losses`, with ones as their gradients, under the function modes that are active. PyTorch's own
    ``Tensor.backward`` disables function modes. With active modes, a checkpointed block that runs again runs as it did
    in forward. Without this name, modes are disabled."""
    ones = tuple(torch.ones_like(loss) for loss in losses)
    if _engine is None:
        torch.autograd.backward(losses, ones)
        return
    _engine(losses, ones, False, False, (), allow_unreachable=True, accumulate_grad=True)


_UNPACK_HOOK = "torch._C._autograd.SavedTensor.unpack_hook"
_RAW_OF_FUNCTIONS = "torch._C._FunctionBase._raw_saved_tensors"
_RAW_OF_OPERATIONS = "torch._C._functions.MulBackward0._raw_saved_self"
_RAW_FIELDS = tuple(
    f"_raw_saved_{field}" for field in ("self", "other", "input", "result", "output", "batch1", "batch2")
)


def _unpack_hooks(node: Any, field: str | None = None) -> list[Callable[[Any], Tensor] | None]:
    """The unpack hook of each tensor that `node` saved, or None if autograd itself holds the tensor. If the packed
    object has an attribute ``memopt_unpack``, the hook to which it passes the tensor on, that one counts. For a
    `torch.autograd.Function` all tensors count; for an operation the tensors that rules read, or only the one saved as
    `field`. A foreign hook (checkpointing of one module inside a block) may unpack a tensor only once, so nothing is
    recomputed from such nodes. Without ``SavedTensor.unpack_hook`` or the raw fields, nothing is recomputed from any
    node. Raises a RuntimeError if backward has run the node and released its tensors, or PyTorch lacks the fields."""
    raw = getattr(node, "_raw_saved_tensors", None)  # raises if they were released
    if not raw:
        fields = _RAW_FIELDS if field is None else (f"_raw_saved_{field}",)
        raw = [getattr(node, name) for name in fields if hasattr(node, name)]
        raw += getattr(node, "_raw_saved_indices", ())
        # Released fields of operations do not raise: they have neither a hook nor data.
        if any(getattr(tensor, "unpack_hook", None) is None and tensor.data is None for tensor in raw):
            raise RuntimeError("backward has been through the node")
    hooks = (getattr(tensor, "unpack_hook", None) for tensor in raw)
    return [
        getattr(None if hook is None else tensor.data, "memopt_unpack", hook)
        for hook, tensor in zip(hooks, raw, strict=True)
    ]


def _unknown_unpack_hooks(node: Any, field: str | None = None) -> list[Callable[[Any], Tensor] | None]:
    raise RuntimeError("it is not known which hooks hold the tensors of a node")


unpack_hooks = _unpack_hooks
for _name in (_UNPACK_HOOK, _RAW_OF_FUNCTIONS, _RAW_OF_OPERATIONS):
    if find(_name, None, "nothing is recomputed by a saved-tensor hook") is None:
        unpack_hooks = _unknown_unpack_hooks

# -- tensors and storages -------------------------------------------------------------------------------------------

_TENSOR_HOOKS = "torch.Tensor._backward_hooks"
tensor_hooks: Callable[[Tensor], object] = (
    attrgetter("_backward_hooks")
    if find(_TENSOR_HOOKS, True, "linears save their input") is not True
    else lambda tensor: True
)
"""The hooks of ``Tensor.register_hook``, None or empty if there are none. A hooked tensor is not recomputed inside
a linear, where the hook would not run; without this name every tensor counts as hooked."""
tensor_hooks_slot: object = getattr(Tensor, "_backward_hooks", None)
"""The descriptor of these hooks, as a subclass's ``__torch_function__`` gets it; None without this name."""

_ADDRESS = "torch.UntypedStorage._cdata"
_COUNT = "torch._C._storage_Use_Count"
_STORAGES = "views are not copied out of larger storages, and nothing is sampled, coded or compressed"

find(_ADDRESS, None, _STORAGES)
storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata") if is_found(_ADDRESS) else id
"""The identity of a storage (also of a meta tensor), valid while anything refers to it: its address in C++.

Without this name, the id of its Python object, which lives as long.
"""

storage_use_count: Callable[[int], float] = find(_COUNT, lambda identity: math.inf, _STORAGES)
"""How many tensors and other owners refer to the storage with this :func:`storage_id`.

A storage that only autograd refers to may be replaced by something smaller. Without this name no storage is.
"""
if not is_found(_ADDRESS):
    storage_use_count = lambda identity: math.inf  # noqa: E731 - the number would be read as an address

_USES = "activations in place behind batch norms save no more than stock ones"
tensor_uses: Callable[[Tensor], float] = find("torch.Tensor._use_count", lambda tensor: math.inf, _USES)
"""How many owners a tensor has in C++ (its Python object, the engine that passes a gradient on). Without this name
infinite, so that no tensor's memory is overwritten or freed."""

_WEAK, _REVIVE = "torch.multiprocessing.reductions.StorageWeakRef", "torch.UntypedStorage._new_with_weak_ptr"
_AT_ADDRESS = "a report may miss storages that were allocated where a freed one had been"
_weak: Any = find(_WEAK, None, _AT_ADDRESS)
_revive: Any = find(_REVIVE, None, _AT_ADDRESS)


def weak_storage(storage: torch.UntypedStorage) -> Any:
    """A weak reference to a storage, for :func:`living_storage`; it reserves the :func:`storage_id` of the storage.
    Without PyTorch's ``StorageWeakRef``, a weak reference of Python, which does not reserve the address."""
    return weakref.ref(storage) if _weak is None or _revive is None else _weak(storage)


def living_storage(reference: Any) -> torch.UntypedStorage | None:
    """The storage of a :func:`weak_storage`; None after the storage was freed."""
    storage: torch.UntypedStorage | None = (
        reference() if isinstance(reference, weakref.ref) else _revive(reference.cdata)
    )
    return storage
