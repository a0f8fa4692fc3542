"""A tensor that stands for logits: it holds the head's input, and what was done to the logits since.

    logits = op_n(... op_1(head(x)))            rows of x and rows of the logits belong together

What does not mix rows is recorded (`operations.py`), what ends in a few numbers a row runs by chunks (`readers.py`).
Everything else gets the true logits, computed once by the ordinary graph, and one warning says what asked for them.

The rule: what has been handed out is what the stock model hands out, in value, memory and version, or the logits become
true at that moment. All logits of one call of the head become true together, since a caller may write into what it
gets: copies are made before, views share the memory (`memory.py`), graphs and versions follow (`LazyLogits.follow`).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from memopt.environment.partitioned import fetch_before
from memopt.kernels.base.autograd import DirectFunction, refuse_double_backward
from memopt.patches.loss.memory import Memory, empty, shares_memory
from memopt.patches.loss.metadata import FACTORIES, METADATA
from memopt.patches.loss.source import Source, note
from memopt.torch_compat import tensor_hooks_slot, tree_leaves, tree_map, wrapper

#: A function of PyTorch -> what answers it for logits that were not computed, or returns NotImplemented.
HANDLERS: dict[Any, Callable[..., Any]] = {}

_GRAPH, _VERSION = (getattr(Tensor, name).__get__ for name in ("grad_fn", "_version"))


class LazyLogits(Tensor):
    """Logits that are computed when somebody reads them whole."""

    source: Source
    value: Tensor | None
    """The true logits, once they were computed; from then on they answer everything."""
    form: Tensor
    """A tensor without values that is laid out as the true logits will be."""
    memory: Memory
    made: Callable[[], Tensor] | None
    """The true logits from those that these were made of; None for the head's own output."""
    written: tuple[tuple[Source, Callable[[Tensor], object]], ...]
    """Changes in place, each with what these logits stood for before."""
    node: Any
    """The autograd node that :func:`stand_for` gave it."""
    own: tuple[Any, ...]
    """Graph and version of this tensor as they were last seen,"""
    seen: tuple[Any, ...]
    """and those of its value."""
    follows = False
    """Whether :meth:`follow` runs: C++ code asks a tensor for its class meanwhile."""
    is_users: bool
    """Whether another autograd node than ours made it, e.g. a user's function that cloned its input."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__self__", ()) is tensor_hooks_slot:
            # C++ code exchanges these where a function changes a tensor in place: this tensor's, not its value's.
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        lazy = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LazyLogits)]
        pending = [each for each in lazy if each.value is None]
        for each in () if func in METADATA else pending:
            each.look_through_fetches()
        if func in _WANT_GRADIENTS:
            hook: Any = (*args[1:], kwargs.get("hook"))[0] if func is Tensor.register_hook else None
            if pending and _waits_for_a_moment(hook):
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
            trained = [each for each in pending if each.source.head.evaluation is None]
            if handler is not None and 0 < len(trained) < len(pending) and not _writes(func, kwargs):
                # A teacher's logits are values, so that the loss of the trained ones stays in parts.
                return func(*tree_map(_evaluated, args), **tree_map(_evaluated, kwargs))
            away = any(each.source.device is not None for each in pending) and func is not Tensor.to
            if handler is not None and away and not _writes(func, kwargs):
                return _where_the_head_is(func, args, kwargs, pending[0].device)
            # Another autograd node than was last seen is a user's.
            foreign = away or any(_own_state(each)[0] is not each.node for each in pending)
            if handler is not None and len(pending) == len(lazy) and not foreign and kwargs.get("out") is None:
                if not args and "input" in kwargs:
                    named = dict(kwargs)
                    args, kwargs = (named.pop("input"),), named
                for each in pending:
                    each.source.check()
                answer = handler(*args, **kwargs)
                if answer is not NotImplemented:
                    for found in tree_leaves(answer):
                        if isinstance(found, Tensor) and type(found) is not LazyLogits and found.requires_grad:
                            for each in pending:
                                each.source.losses.append(func.__name__)
                                each.source.pass_moments_to(found)
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
        # A change in place returns what it changed.
        return next((each for each in lazy if result is each.value), result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Reached where PyTorch's C++ code calls an operator (collectives); its autograd nodes lie above this.
        def plain(leaf: Any) -> Any:
            return leaf.compute().detach() if isinstance(leaf, LazyLogits) else leaf

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def as_subclass(self, cls: Any) -> Any:
        """As of any tensor: PyTorch's reads the graph of this one in C++, which may be behind that of its value."""
        return self.compute().as_subclass(cls)

    @property
    def family(self) -> list[LazyLogits]:
        """All logits of one call of the head that are alive, the older ones first."""
        return [member for reference in self.source.family if (member := reference()) is not None]

    def look_through_fetches(self) -> None:
        """Be logits of the head again behind the nodes in which ZeRO-3 fetches weights (`fetch_before`)."""
        node: Any = None if self.grad_fn is self.node else self.grad_fn
        fetches = []
        while (found := fetch_before(node)) is not None:
            fetches.append(found)
            node = node.next_functions[0][0]
        source = getattr(node, "source", None)
        if fetches and isinstance(source, Source):
            # The head's own fetch is part of its next call.
            others = (hook for module, hook in fetches if module is not source.head.module)
            self.source = dataclasses.replace(source, fetches=(*others, *source.fetches))
            self.node, self.made = self.grad_fn, None

    def become(self, source: Source, write: Callable[[Tensor], object]) -> None:
        """Stand for `source`, which reads the same tensors of the graph, from now on: a change in place by `write`."""
        self.written, self.source = (*self.written, (self.source, write)), source
        if self.node is not None:
            self.node.source = source

    def compute(self) -> Tensor:
        """The true logits, in the graph where these are; all others of this call of the head become true as well."""
        if self.value is None:
            self.look_through_fetches()
            for each in (*self.family, self):
                each.fill()
        assert self.value is not None
        return self.value

    def fill(self) -> Tensor:
        """:meth:`compute` of these alone, and of those that they were made of."""
        if self.value is None:
            self.source.check()
            graph, marked = self.own = _own_state(self)
            self.is_users = graph is not self.node and not marked
            with torch.inference_mode(False), torch.set_grad_enabled(self.source.tracked):
                value = self._from_the_head() if self.made is None else self.made()
            with torch.inference_mode(False), torch.enable_grad():
                self.value = _RevealFunction.apply(self, value) if self.is_users else value
            if self.memory.owner() is self:
                self.memory.data = value.detach()
            self.made, self.memory = None, Memory(self)
            if marked:  # by a user's function, as changed in place
                self.own = (self.node, 0)
            self.seen = _state(self.value)
        assert self.value is not None
        return self.value

    def _from_the_head(self) -> Tensor:
        source = self.written[0][0] if self.written else self.source
        value = source.whole()
        for _, write in self.written:
            write(value)
        source.pass_moments_to(value)
        return value

    def follow(self) -> None:
        """Bring graph and version of this tensor and of its value together: C++ code reads those of the tensor.

        A user's function that marked this tensor as changed is the value's history from then on, and what has changed
        the value in place is this tensor's.
        """
        if self.value is None or self.follows:
            return
        own, seen = _own_state(self), _state(self.value)
        if (own, seen) == (self.own, self.seen):
            return
        self.follows = True
        with torch.inference_mode(False), torch.enable_grad():
            if own != self.own:
                _AdoptFunction.apply(self.value, self)
            elif seen[0] and self.seen[:2] != seen[:2]:
                _AdoptFunction.apply(self, self.value)
            else:
                torch.autograd.graph.increment_version(self)
        self.own, self.seen, self.follows = _own_state(self), _state(self.value), False


def stand_for(
    source: Source,
    parent: LazyLogits | None = None,
    step: Callable[[Tensor], Tensor] | None = None,
    form: Tensor | None = None,
) -> Any:
    """Logits that are computed from `source`, or by `step` from those of `parent`.

    Args:
        form: as `LazyLogits.form`: made from that of `parent`, of which it is a view where the logits are one. None: a
            copy, laid out alike.
    """
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
    logits.node, logits.is_users = logits.grad_fn, False
    logits.memory = Memory(logits)
    if parent is not None and step is not None:
        _make_of(logits, parent, step, is_view)
    source.family[:] = [*(reference for reference in source.family if reference() is not None), weakref.ref(logits)]
    return logits


def _make_of(logits: LazyLogits, parent: LazyLogits, step: Callable[[Tensor], Tensor], is_view: bool) -> None:
    """Let `logits` be computed from `parent`, which they hold unless that would keep a graph alive."""
    source, origin, form = logits.source, parent.memory, parent.form

    def from_parent() -> Tensor:
        value = parent.fill()
        # A user's function changed the parent after this copy of it was made.
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
    """The node of logits that were not computed: whatever finds them in a graph finds the head's input and weights.

    Its backward runs where a gradient of the logits comes past their value, e.g. from a user's function.
    """

    @staticmethod
    def forward(ctx: Any, source: Source, form: Tensor, x: Tensor, *tensors: Tensor) -> Any:
        # Not saved: nothing reads it in a step whose loss is computed by chunks, and hooks would copy it each time.
        ctx.source = source
        return wrapper(LazyLogits, form, source.dtype, source.device or x.device)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        source: Source = ctx.source
        source.check()
        with torch.enable_grad():
            leaf = source.x.detach().requires_grad_()
            y = source.cut.values(leaf)
        inputs = (leaf, *source.cut.tensors)
        return None, None, *torch.autograd.grad(y, inputs, dy.to(y.device), allow_unused=True)


class _RevealFunction(DirectFunction):
    """The value of logits whose graph goes on with a node that is not ours."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, None


class _AdoptFunction(DirectFunction):
    """Gives a tensor the graph of another one with the same value, as a change in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        ctx.is_view = type(tensor) is Tensor and tensor._is_view()
        return tensor

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # None for a part of a tensor is taken for None for all of it.
        return torch.zeros_like(dy) if ctx.is_view else None, dy


def _own_state(logits: LazyLogits) -> tuple[Any, int]:
    """The autograd node and the version of this tensor itself, whether or not it has a value."""
    read = super(LazyLogits, LazyLogits).__torch_function__
    if read(Tensor.is_inference, (), (logits,)):
        return None, 0  # it has neither
    return read(_GRAPH, (), (logits,)), read(_VERSION, (), (logits,))


def _state(value: Tensor) -> tuple[Any, ...]:
    """What a change in place of a tensor changes: its graph and its version."""
    try:
        return value.requires_grad, value.grad_fn, value._version
    except RuntimeError:  # one of several views, which may not be used any more
        return False, None, value._version


def _where_the_head_is(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """What `func` makes of logits that were moved to `device`, computed on the device of their head and moved there."""
    home = next(leaf.source.x.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LazyLogits))

    def back(leaf: Any) -> Any:
        if not isinstance(leaf, LazyLogits):
            return leaf.to(home) if isinstance(leaf, Tensor) and leaf.device == device else leaf
        return stand_for(dataclasses.replace(leaf.source, device=None), leaf, lambda value: value.to(home))

    result = func(*tree_map(back, args), **tree_map(back, kwargs))
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, result)


def _value(leaf: Any) -> Any:
    return leaf.compute() if isinstance(leaf, LazyLogits) else leaf


def _evaluated(leaf: Any) -> Any:
    """:func:`_value` of logits that nothing is recorded of."""
    return _value(leaf) if isinstance(leaf, LazyLogits) and leaf.source.head.evaluation is not None else leaf


def _shaped(leaf: Any) -> Any:
    """A tensor of the same shape, dtype and device in the place of logits that were not computed."""
    if isinstance(leaf, LazyLogits) and leaf.value is None:
        return torch.empty((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)
    return _value(leaf)


_WANT_GRADIENTS = (Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad)


def _waits_for_a_moment(hook: Any) -> bool:
    """Whether `hook` is one of those by which sharded training learns that backward begins.

    FSDP2's gathers weights then. DeepSpeed's counts the backward, and divides the gradient by the micro-batches: that
    of what was computed from these logits as well as theirs.
    """
    module = str(getattr(getattr(hook, "func", hook), "__module__", ""))
    return module.startswith(("torch.distributed.fsdp", "deepspeed.runtime"))


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__") or "out" in kwargs
