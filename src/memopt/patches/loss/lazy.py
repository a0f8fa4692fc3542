"""A tensor that stands for uncomputed logits: it holds the head's input and the operations on the logits since.

    logits = op_n(... op_1(head(x)))            a row of the logits depends on the same row of x only

Operations that do not mix rows are recorded (`operations.py`); functions that return a few numbers a row run by chunks
(`readers.py`). Any other function gets the true logits, computed once by the ordinary graph, and one warning names it.

Every result has the value, the shared memory and the version of the stock model's result. Where that is impossible, the
logits are computed at once, together with all others of that call of the head, since a caller may write into them:
copies are made first, views share the memory (`memory.py`), graphs and versions are kept equal (`LazyLogits.follow`).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from memopt.environment.partitioned import fetch_before
from memopt.kernels.base.autograd import refuse_double_backward
from memopt.patches.loss.checkpointed import Around
from memopt.patches.loss.kept import note_backward, wait
from memopt.patches.loss.memory import (
    FACTORIES,
    METADATA,
    WANT_GRADIENTS,
    AdoptFunction,
    Memory,
    RevealFunction,
    empty,
    shares_memory,
    state_of,
    waits_for_a_moment,
    writes,
)
from memopt.patches.loss.source import Source, note
from memopt.torch_compat import (
    DirectFunction,
    checkpointing_hook,
    eagerly,
    tensor_hooks_slot,
    tree_leaves,
    tree_map,
    wrapper,
)

#: A function of PyTorch -> the handler that runs it on uncomputed logits, or returns NotImplemented.
HANDLERS: dict[Any, Callable[..., Any]] = {}

_GRAPH, _VERSION = (getattr(Tensor, name).__get__ for name in ("grad_fn", "_version"))


class LazyLogits(Tensor):
    """Logits that are computed when a function reads all of them."""

    source: Source
    value: Tensor | None
    """The true logits, once they are computed; from then on every function runs on this tensor."""
    form: Tensor
    """A meta tensor with the shape, strides and storage offset of the true logits."""
    memory: Memory
    made: Callable[[], Tensor] | None
    """Computes the true logits from the logits that these were made from; None for the head's own output."""
    written: tuple[tuple[Source, Callable[[Tensor], object]], ...]
    """Changes in place: the source before each change, and the function that makes the change."""
    node: Any
    """The autograd node that :func:`stand_for` gave this tensor."""
    own: tuple[Any, ...]
    """The autograd node and the version of this tensor after the last :meth:`follow`."""
    seen: tuple[Any, ...]
    """The graph and the version of `value` after the last :meth:`follow`."""
    follows = False
    """Whether :meth:`follow` is running: C++ code reads the class of this tensor meanwhile."""
    is_users: bool
    """Whether a foreign autograd node made this tensor, e.g. a user's function that cloned its input."""
    is_read: bool
    """Whether anything was computed from these logits, or made of them."""
    around: Around
    """Where these logits were made."""

    @classmethod
    @eagerly
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__self__", ()) is tensor_hooks_slot:
            # C++ code exchanges these hooks where a function changes a tensor in place: this tensor's, not `value`'s.
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        again = func not in METADATA and checkpointing_hook() is not None
        if again:
            args, kwargs = tree_map(_as_first_read, (args, kwargs))
        lazy = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LazyLogits)]
        pending = [each for each in lazy if each.value is None]
        for each in () if func in METADATA else pending:
            each.accept_weight_fetches()
        if func in WANT_GRADIENTS:
            hook: Any = (*args[1:], kwargs.get("hook"))[0] if func is Tensor.register_hook else None
            if pending and waits_for_a_moment(hook):
                handle = RemovableHandle(lazy[0].source.moments)
                lazy[0].source.moments[handle.id] = hook
                return handle
            inputs = (*args[1:], kwargs.get("inputs"))[0] if func is torch.autograd.grad else lazy
            for each in tree_leaves(inputs):
                if isinstance(each, LazyLogits) and each.source.losses:
                    raise RuntimeError(
                        f"'{each.source.losses[0]}' has read these logits a part at a time, so they have no gradient "
                        f"of their own for '{func.__name__}'. Call logits.retain_grad() before that function reads "
                        "them, or patch with loss.method=none."
                    )
        if pending:
            if func in METADATA:
                return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            if func in FACTORIES:
                return func(*tree_map(_shaped, args), **tree_map(_shaped, kwargs))
            handler = HANDLERS.get(func)
            trained = [each for each in pending if each.source.head.records]
            if handler is not None and 0 < len(trained) < len(pending) and not writes(func, kwargs):
                # Compute the logits without a graph (a teacher's): the loss of the trained logits still runs by chunks.
                return func(*tree_map(_evaluated, args), **tree_map(_evaluated, kwargs))
            away = any(each.source.device is not None for each in pending) and func is not Tensor.to
            if handler is not None and away and not writes(func, kwargs):
                return _where_the_head_is(func, args, kwargs, pending[0].device)
            # A tensor whose autograd node is no longer `node` went through a user's autograd function.
            foreign = away or not all(each.is_as_made for each in pending)
            if handler is not None and len(pending) == len(lazy) and not foreign and kwargs.get("out") is None:
                if not args and "input" in kwargs:
                    args, kwargs = (kwargs["input"],), {name: each for name, each in kwargs.items() if name != "input"}
                for each in pending:
                    each.source.check(values=each.source.head.records and each.source.head.snapshot.is_late)
                with Around.unseen() if again else nullcontext():
                    answer = handler(*args, **kwargs)
                if answer is not NotImplemented:
                    for each in pending:
                        each.is_read |= answer is not each
                    for found in tree_leaves(answer):
                        if isinstance(found, Tensor) and type(found) is not LazyLogits and found.requires_grad:
                            note_backward(found, {each.source.head.snapshot for each in pending})
                            for each in pending:
                                each.source.losses.append(func.__name__)
                                each.source.register_hooks_on(found)
                    return answer
            if trained:
                note(func, trained[0].source.head.module)
        for each in lazy:
            each.compute()
        family = [member for each in lazy for member in each.family]
        for each in family:
            each.follow()
        result = func(*tree_map(_value, args), **tree_map(_value, kwargs))
        for each in family:
            each.follow()
        # A function that changes a tensor in place returns that tensor: this one, not its value.
        return next((each for each in lazy if result is each.value), result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Reached where C++ code calls an operator itself (collectives); autograd has recorded that call already.
        def plain(leaf: Any) -> Any:
            return leaf.compute().detach() if isinstance(leaf, LazyLogits) else leaf

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def as_subclass(self, cls: Any) -> Any:
        """`value` as `cls`: PyTorch's method would read this tensor's own graph, which may lag behind its value's."""
        value = _as_first_read(self).compute()
        for each in self.family:
            each.follow()
        return value.as_subclass(cls)

    @property
    def family(self) -> list[LazyLogits]:
        """All logits of one call of the head that are alive, the older ones first."""
        return [member for reference in self.source.family if (member := reference()) is not None]

    @property
    def is_as_made(self) -> bool:
        """Whether no user's autograd function took this tensor's place in the graph."""
        return _own_state(self)[0] is self.node

    def accept_weight_fetches(self) -> None:
        """Accept nodes in which ZeRO-3 fetches weights (`fetch_before`) as part of this tensor's own graph."""
        node: Any = None if self.grad_fn is self.node else self.grad_fn
        fetches = []
        while (found := fetch_before(node)) is not None:
            fetches.append(found)
            node = node.next_functions[0][0]
        source = getattr(node, "source", None)
        if fetches and isinstance(source, Source):
            # The next call of the head makes the head's own fetch itself.
            others = (hook for module, hook in fetches if module is not source.head.module)
            self.source = dataclasses.replace(source, fetches=(*others, *source.fetches))
            self.node, self.made = self.grad_fn, None

    def stand_in(self, source: Source) -> LazyLogits:
        """Uncomputed logits of `source`, for a reader of these logits, which were computed since."""
        with torch.inference_mode(False), torch.enable_grad():
            others: LazyLogits = stand_for(source, form=self.form)
        others.made = self.compute
        return others

    def become(self, source: Source, write: Callable[[Tensor], object]) -> None:
        """Record a change in place by `write`: from now on stand for `source`, with the same tensors in the graph."""
        self.written, self.source = (*self.written, (self.source, write)), source
        if self.node is not None:
            self.node.source = source

    def compute(self) -> Tensor:
        """The true logits, with this tensor's graph. Also computes all other logits of the same call of the head."""
        if self.value is None:
            self.accept_weight_fetches()
            for each in (*self.family, self):
                each.fill()
        assert self.value is not None
        return self.value

    def fill(self) -> Tensor:
        """As :meth:`compute`, but only for this tensor and the logits that it was made from."""
        if self.value is None:
            self.source.check()
            graph, marked = self.own = _own_state(self)
            self.is_users = graph is not self.node and not marked
            with torch.inference_mode(False), torch.set_grad_enabled(self.source.tracked), self.around.restored():
                value = self._from_the_head() if self.made is None else self.made()
            with torch.inference_mode(False), torch.enable_grad():
                self.value = RevealFunction.apply(self, value) if self.is_users else value
            if self.memory.owner() is self:
                self.memory.data = value.detach()
            self.made, self.memory = None, Memory(self)
            if marked:  # dirty, by a user's autograd function
                self.own = (self.node, 0)
            self.seen = state_of(self.value)
        assert self.value is not None
        return self.value

    def _from_the_head(self) -> Tensor:
        source = self.written[0][0] if self.written else self.source
        value = source.whole()
        for _, write in self.written:
            write(value)
        source.register_hooks_on(value)
        return value

    def follow(self) -> None:
        """Give this tensor and its value the same graph and version: C++ code reads the graph of this tensor. If a
        user's autograd function marked this tensor dirty, the value adopts this tensor's graph. If an operation changed
        the value in place, this tensor adopts the value's graph."""
        if self.value is None or self.follows:
            return
        own, seen = _own_state(self), state_of(self.value)
        if (own, seen) == (self.own, self.seen):
            return
        self.follows = True
        with torch.inference_mode(False), torch.enable_grad():
            if own != self.own:
                AdoptFunction.apply(self.value, self)
            elif seen[0] and self.seen[:2] != seen[:2]:
                AdoptFunction.apply(self, self.value)
            else:
                torch.autograd.graph.increment_version(self)
        self.own, self.seen, self.follows = _own_state(self), state_of(self.value), False


def stand_for(
    source: Source,
    parent: LazyLogits | None = None,
    step: Callable[[Tensor], Tensor] | None = None,
    form: Tensor | None = None,
) -> Any:
    """A tensor for logits that are computed from `source`, or by `step` from the logits `parent`. `form` is as
    `LazyLogits.form`: a view of the form of `parent` if the logits are a view of it; None for a copy with the layout of
    `parent`."""
    is_view = parent is not None and form is not None and shares_memory(parent.form, form)
    if form is None and parent is not None and parent.form.is_contiguous() and not parent.form.storage_offset():
        form = parent.form
    elif form is None:
        form = empty(source.shape, None if parent is None else parent.form)
    logits: LazyLogits
    if source.tracked:
        logits = _StandingFunction.apply(source, form, source.x, *source.tensors)
    else:
        logits = wrapper(LazyLogits, form, source.dtype, source.device or source.x.device)
    logits.source, logits.value, logits.form, logits.made, logits.written = source, None, form, None, ()
    logits.node, logits.is_users, logits.is_read = logits.grad_fn, False, False
    logits.memory, logits.around = Memory(logits), Around()
    if parent is not None and step is not None:
        _make_of(logits, parent, step, is_view)
    source.family[:] = [*(reference for reference in source.family if reference() is not None), weakref.ref(logits)]
    if not source.tracked:
        wait(logits)
    return logits


def _make_of(logits: LazyLogits, parent: LazyLogits, step: Callable[[Tensor], Tensor], is_view: bool) -> None:
    """Let `logits` be computed from `parent`. They hold only its memory if `parent` would keep a graph alive."""
    source, origin, form = logits.source, parent.memory, parent.form

    def from_parent() -> Tensor:
        value = parent.fill()
        # is_users: a user's function changed the parent after this copy was made, so compute the copy from its source.
        return source.whole() if parent.is_users and not is_view else step(value)

    def from_memory() -> Tensor:
        return step(origin.view(form))

    if source.tracked == parent.source.tracked:
        logits.made = from_parent
    else:
        origin.settle()
        logits.made = from_memory
    if is_view:
        logits.memory = origin
    else:
        logits.memory.step, logits.memory.origin = from_memory, origin


class _StandingFunction(DirectFunction):
    """The autograd node of uncomputed logits, with edges to the head's input, weights and the operations' tensors. Its
    backward runs where a gradient reaches the logits without passing `value`, e.g. from a user's function."""

    @staticmethod
    def forward(ctx: Any, source: Source, form: Tensor, x: Tensor, *tensors: Tensor) -> Any:
        # Do not save x: a step whose loss runs by chunks never reads it here, and saved-tensor hooks would copy it.
        ctx.source = source
        return wrapper(LazyLogits, form, source.dtype, source.device or x.device)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        source: Source = ctx.source
        source.check()
        source.head.snapshot.is_late = True
        with torch.enable_grad():
            leaf = source.x.detach().requires_grad_()
            y = source.cut.values(leaf)
        inputs = (leaf, *source.cut.tensors)
        return None, None, *torch.autograd.grad(y, inputs, dy.to(y.device), allow_unused=True)


def _own_state(logits: LazyLogits) -> tuple[Any, int]:
    """The autograd node and the version of this tensor itself, whether or not it has a value."""
    read = super(LazyLogits, LazyLogits).__torch_function__
    if read(Tensor.is_inference, (), (logits,)):
        return None, 0  # an inference tensor has neither
    return read(_GRAPH, (), (logits,)), read(_VERSION, (), (logits,))


def _where_the_head_is(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Run `func` on logits that were moved to `device`: on their head's device, with the results moved to `device`."""
    home = next(leaf.source.x.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LazyLogits))

    def back(leaf: Any) -> Any:
        if not isinstance(leaf, LazyLogits):
            return leaf.to(home) if isinstance(leaf, Tensor) and leaf.device == device else leaf
        return stand_for(dataclasses.replace(leaf.source, device=None), leaf, lambda value: value.to(home))

    result = func(*tree_map(back, args), **tree_map(back, kwargs))
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, result)


def _as_first_read(leaf: Any) -> Any:
    """For logits that a checkpointed function reads, logits in the state that its first run read."""
    is_read_again = isinstance(leaf, LazyLogits) and checkpointing_hook() is not None
    return leaf.around.as_first_read(leaf) if is_read_again else leaf


def _value(leaf: Any) -> Any:
    return leaf.compute() if isinstance(leaf, LazyLogits) else leaf


def _evaluated(leaf: Any) -> Any:
    """:func:`_value` of logits from a call without gradients; any other argument as it is."""
    return _value(leaf) if isinstance(leaf, LazyLogits) and not leaf.source.head.records else leaf


def _shaped(leaf: Any) -> Any:
    """For uncomputed logits, a tensor of their shape, dtype and device; :func:`_value` of any other argument."""
    if isinstance(leaf, LazyLogits) and leaf.value is None:
        return torch.empty((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
    return _value(leaf)
