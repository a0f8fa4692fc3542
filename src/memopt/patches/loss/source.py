"""The source of uncomputed logits: a call of the head, its input, and the operations on the logits since.

Also the warnings, one for each place, about code that makes a training step compute its logits whole.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from memopt.environment.partitioned import is_partitioned, version_of_partitioned
from memopt.kernels.base.autograd import as_leaf, autocast_as
from memopt.patches.swap import is_swapped, swap_state
from memopt.recompute.expression import Step, after
from memopt.torch_compat import no_dispatch, storage_id

#: For each tensor its version (the number of changes in place) and its storage.
Versions = tuple[tuple[int, int], ...]
T = TypeVar("T")
#: Head -> reasons why its logits were computed whole in a training step.
whole: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation on logits, which can run on any number of their rows."""

    name: str
    """For the user: "scale 0.25"."""
    step: Step
    """Applied to the logits; beside them it reads `own`, then the results of the operations `forms` on the logits."""
    own: tuple[Tensor, ...] = ()
    """Tensors of one element, or of one element for each column."""
    forms: tuple[tuple[Operation, ...], ...] = ()
    by_column: bool = True
    """Whether the operation mixes no columns, just as it mixes no rows."""
    casts_up: bool = False
    """Whether the operation is only a cast to a wider dtype."""
    narrows: bool = False
    """Whether the operation only takes the first columns."""
    versions: Versions = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", versions_of(self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that the operation reads beside the logits."""
        return (*self.own, *(tensor for form in self.forms for each in form for tensor in each.tensors))

    def reading(self, of: Callable[[Tensor], Tensor]) -> Operation:
        """This operation with ``of(tensor)`` in the place of each of `tensors`."""
        forms = tuple(tuple(each.reading(of) for each in form) for form in self.forms)
        return dataclasses.replace(self, own=tuple(map(of, self.own)), forms=forms)

    def run(self, logits: Tensor, columns: slice | None = None) -> Tensor:
        """`logits`, of all columns or (`by_column`) of a slice of them, after this operation."""
        return self.of(logits, [run(form, logits, columns) for form in self.forms], columns)

    def of(self, logits: Tensor, forms: Sequence[Tensor] = (), columns: slice | None = None) -> Tensor:
        """`logits` after this operation, given the computed results of its `forms`."""
        if self.narrows and columns is not None:
            return logits  # the slice has only columns that remain
        own = [each if columns is None or each.numel() == 1 else each[columns] for each in self.own]
        return after(logits, (self.step,), [*own, *forms])


def run(operations: Iterable[Operation], logits: Tensor, columns: slice | None = None) -> Tensor:
    """`logits` after these operations. A caller's variable for `logits` keeps them alive meanwhile."""
    for operation in operations:
        logits = operation.run(logits, columns)
    return logits


def tensors_of(module: nn.Module) -> tuple[Tensor, ...]:
    """Parameters and buffers of the module."""
    return tuple(chain(module.parameters(), module.buffers()))


class Snapshot:
    """A few numbers of the tensors that a call of a head read. If they change, its logits can no longer be computed: an
    error. Version counters do not count a step of a fused optimizer, an exchange of weights through ``.data`` (averaged
    weights) or a write to a tensor of inference mode."""

    def __init__(self, tensors: Sequence[Tensor], *, is_late: bool) -> None:
        """`is_late` is true for a call without gradients; that of another call becomes true when its backward begins.
        From then on a change is likely, and every read of the logits compares: that synchronises a GPU."""
        # Tensors of a trace have no numbers, and ZeRO-3 fetches those of its weights for a call alone.
        has_numbers = (type(each) in (Tensor, nn.Parameter) and not each.is_meta for each in tensors)
        self.tensors = tensors if all(has_numbers) and not any(map(is_partitioned, tensors)) else ()
        self._numbers, self.is_late = self._read(), is_late

    def is_unchanged(self) -> bool:
        pairs = zip(self._read(), self._numbers, strict=True)
        return all(now == was if isinstance(was, bytes) else torch.equal(now, was) for now, was in pairs)

    @torch.no_grad()
    def _read(self) -> list[Any]:
        """About a thousand numbers of each tensor: a small step of an optimizer changes few bf16 numbers. On a GPU they
        stay there, since copying them would wait for it."""
        found: list[Any] = []
        with no_dispatch():  # modes around the call may round results
            for tensor in self.tensors:
                count = round(1024 ** (1 / max(1, tensor.dim())))
                few = tensor[tuple(slice(None, None, max(1, n // count)) for n in tensor.shape)]
                few = few.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
                found.append(few.numpy().tobytes() if few.is_cpu else few)
        return found


@dataclass(frozen=True, eq=False)
class Head:
    """One call of a head."""

    module: nn.Module
    stock: Callable[..., Tensor]
    transposed: bool | None
    """For a head x W^T + b, whether its weight is stored as (in, out). None for any other head."""
    autocast: torch.dtype | None
    tensors: tuple[Tensor, ...]
    """Parameters and buffers of the head."""
    versions: Versions
    lean: bool = False
    """Whether a cross-entropy keeps the logits whole, in their own dtype."""
    gathers: bool = False
    """Whether the weights are whole only inside calls of the head (ZeRO-3)."""
    room: int = 0
    """Bytes that the loss may take beside the gradients of `x` and of the weight, at least."""
    records: bool = True
    """Whether the call was one with gradients."""
    snapshot: Snapshot = field(default_factory=lambda: Snapshot((), is_late=True))

    @property
    def is_unchanged(self) -> bool:
        """Whether the module still has the tensors it was called with."""
        now = tensors_of(self.module)
        return len(now) == len(self.tensors) and all(map(operator.is_, now, self.tensors))

    def __call__(self, x: Tensor) -> Tensor:
        with autocast_as(self.autocast, x):
            return self.stock(self.module, x)


@dataclass(frozen=True, eq=False)
class Source:
    """The call, the input and the operations that logits are computed from."""

    head: Head
    x: Tensor
    """(..., in); in the graph where `tracked`."""
    width: int
    dtype: torch.dtype
    tracked: bool
    """Whether the logits require gradients."""
    operations: tuple[Operation, ...] = ()
    versions: Versions = ()
    """Versions of `x`."""
    rows: object = field(default_factory=object)
    """An object that all logits of the same rows share."""
    family: list[weakref.ref[Any]] = field(default_factory=list)
    """All logits of one call of the head, as far as they are alive."""
    losses: list[str] = field(default_factory=list)
    """Functions that read logits of that call by chunks; their gradients do not pass through the logits."""
    product_rows: int = 1
    """Rows of each product whose numbers the user gets (`memopt.patches.loss.rows.product_rows`)."""
    read: list[str] = field(default_factory=list)
    """Functions that returned such numbers; the logits, if computed later, must have the same numbers."""
    moments: dict[int, Callable[[Tensor], Any]] = field(default_factory=OrderedDict)
    """Tensor hooks to run when backward reaches these logits, whatever their gradient is."""
    device: torch.device | None = None
    """The device to which the logits were moved; None for the head's device."""
    product_width: int = 0
    """Columns of the head's product: more than `width` where some of them were left out."""
    fetches: tuple[Callable[[Tensor], Any], ...] = ()
    """Hooks that fetch ZeRO-3 weights of the modules that returned these logits, outermost module first."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-1], self.width)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in the graph, beside `x`."""
        found = (*self.head.tensors, *(t for operation in self.operations for t in operation.tensors))
        return distinct(tensor for tensor in found if tensor.requires_grad)

    @functools.cached_property
    def cut(self) -> Source:
        """This source with a leaf for each operation's tensor in the graph: no gradient then includes another's."""
        leaves: dict[int, Tensor] = {}

        def leaf(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad or any(tensor is each for each in self.head.tensors):
                return tensor
            return leaves.setdefault(id(tensor), as_leaf(tensor))

        # Never return `self`: the cached reference would be a cycle, which holds `x` until garbage is collected.
        return dataclasses.replace(self, operations=tuple(operation.reading(leaf) for operation in self.operations))

    @property
    def without_rows(self) -> Source:
        """This source without `x` and `family`, for a backward that saves x as a tensor."""
        return dataclasses.replace(self, x=(nothing := torch.empty(0)), versions=versions_of((nothing,)), family=[])

    def values(self, x: Tensor, rows: int = 0) -> Tensor:
        """The logits of the rows `x`, (..., in). With `rows`, x is (n, in), and the product has zeros below it."""
        count = len(x)
        return run(
            self.operations,
            self.head(x) if rows <= count else self.head(nn.functional.pad(x, (0, 0, 0, rows - count)))[:count],
        )

    def in_call(self, function: Callable[[Source], T]) -> T:
        """``function(self)`` where the head's weights are whole: inside a call of the head, if `head.gathers`. The
        hooks by which ZeRO-3 gathers weights then get `x` as the head's input and the result as its output."""
        if not self.head.gathers:
            return function(self)
        if self.losses:
            warnings.warn(
                f"memopt: logits that '{self.losses[0]}' has read are read again, for which ZeRO-3 gathers the weights "
                "of their head on every rank: a rank that reads them alone waits for the others for ever. Compute "
                "metrics of a training step on every rank, or patch with loss.method=none.",
                stacklevel=2,
            )

        def inside(x: Tensor) -> T:
            head = dataclasses.replace(self.head, gathers=False)
            return function(dataclasses.replace(self, head=head, x=x, versions=versions_of((x,))))

        result: T = self.head.module(self.x, Inside(inside))
        return result

    def whole(self) -> Tensor:
        """The logits of all rows."""
        return self.in_call(Source._whole).to(self.device or self.x.device)

    def _whole(self) -> Tensor:
        self.check(values=True)
        y = self.head(self.x)
        if self.read and self.x.shape[:-1].numel() != self.product_rows:
            flat, rows = y.detach().view(-1, y.shape[-1]), self.x.detach().reshape(-1, self.x.shape[-1])
            before = dataclasses.replace(self, operations=())
            with torch.no_grad():
                for start in range(0, len(rows), self.product_rows):
                    part = slice(start, start + self.product_rows)
                    flat.data[part] = before.values(rows[part], self.product_rows)
        for operation in self.operations:
            y = operation.run(y)
        return y

    def register_hooks_on(self, tensor: Tensor) -> None:
        """Register `moments` and `fetches` as hooks of `tensor`, which was computed from these logits."""
        for hook in (*self.moments.values(), *self.fetches) if tensor.requires_grad else ():
            tensor.register_hook(hook)

    def check(self, *, values: bool = False) -> None:
        """Raises a RuntimeError if a tensor from which the logits are computed was changed in place or replaced. With
        `values`, numbers of the tensors that the call read are compared too, if that may synchronise a GPU."""
        for operation in self.operations:
            if versions_of(operation.tensors) != operation.versions:
                raise RuntimeError(
                    "These logits were never computed, and a tensor that they were combined with "
                    f"('{operation.name}') was changed in place or replaced since. Combine them with a copy of it, as "
                    "in logits + bias.clone(), or patch with loss.method=none."
                )
        same = versions_of(self.head.tensors) == self.head.versions and versions_of((self.x,)) == self.versions
        snapshot = self.head.snapshot
        compares = values and (snapshot.is_late or all(tensor.is_cpu for tensor in snapshot.tensors))
        if same and self.head.is_unchanged and (not compares or snapshot.is_unchanged()):
            return
        raise RuntimeError(
            "These logits were never computed, and the weights of their head, or its input, were changed in place "
            "or replaced since its forward (by an optimizer's step, for example, which is a part of backward where "
            "gradients are released). Read outputs.logits before that, as in "
            "logits = outputs.logits.detach().clone().as_subclass(torch.Tensor), or patch with loss.method=none."
        )


@dataclass(frozen=True, eq=False)
class Inside:
    """A second argument for a head's call: the head runs `function` in the place of its forward."""

    function: Callable[[Tensor], Any]
    """Called with the head's input, as its hooks have passed it on."""


def distinct(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Each tensor once: autograd's gradient of a tensor that is read twice already sums both reads."""
    return tuple({id(tensor): tensor for tensor in tensors}.values())


def versions_of(tensors: Iterable[Tensor]) -> Versions:
    """Version and storage of each tensor; the storage, since versions do not count an exchange of ``.data``."""
    return tuple(
        (version_of_partitioned(), 0)
        if is_partitioned(tensor)
        else (0 if tensor.is_inference() else tensor._version, storage_id(tensor.untyped_storage()))
        for tensor in tensors
    )


def say_whole(head: nn.Module, why: str) -> None:
    """Warn, once a reason, that logits of `head` are computed whole in a training step. Not of a head with fewer
    classes than inputs (of a detector, a tagger): its logits are smaller than its input."""
    if why not in whole.setdefault(head, []):
        whole[head].append(why)
        state = swap_state(head) if is_swapped(head) else None
        if getattr(state, "classes", 1) < getattr(state, "inputs", 0):
            return
        same = "the loss and its gradients are the same, without the saving"
        warnings.warn(f"memopt: the logits of this step are computed whole, since {why}; {same}.", stacklevel=2)


def note(func: Any, head: nn.Module) -> None:
    """Say that `func` reads logits of `head` whole, and where it was called."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(func.__self__, "__name__", name)
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "memopt"):
        frame = frame.f_back
    if frame is not None:
        adapted = frame.f_globals.get("__name__", "").startswith("peft.")
        hint = " (adapters were added to the head after the patch: patch again)" if adapted else ""
        say_whole(head, f"'{name}' reads them at {frame.f_code.co_filename}:{frame.f_lineno}{hint}")
