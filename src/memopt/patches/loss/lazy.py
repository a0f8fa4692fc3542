"""A tensor that stands for logits: it holds the head's input, and what was done to the logits since.

    logits = op_n(... op_1(head(x)))            rows of x and rows of the logits belong together

What does not mix rows is recorded (`operations.py`), what ends in a few numbers a row runs by chunks (`readers.py`).
Everything else gets the true logits, computed once by the ordinary graph, and one warning says what asked for them.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from memopt.kernels.base.autograd import DirectFunction, refuse_double_backward
from memopt.partitioned import fetch_before
from memopt.patches.loss.source import Source
from memopt.torch_compat import tree_leaves, tree_map, wrapper

#: A function of PyTorch -> what answers it for logits that were not computed, or returns NotImplemented.
HANDLERS: dict[Any, Callable[..., Any]] = {}

_READ = """
    shape dtype device layout ndim requires_grad is_leaf grad_fn is_cuda is_cpu is_mps is_xpu is_meta is_sparse
    is_quantized is_nested is_mkldnn itemsize nbytes names retains_grad output_nr _base
"""
_CALLED = """
    size dim numel nelement ndimension element_size is_floating_point is_complex is_signed is_contiguous stride
    get_device is_inference __len__ __hash__ storage_offset has_names is_same_size _is_view
"""
#: What reads no value.
_METADATA = {getattr(Tensor, name).__get__ for name in _READ.split() if hasattr(Tensor, name)} | {
    getattr(owner, name) for name in _CALLED.split() for owner in (Tensor, torch) if hasattr(owner, name)
}

_LIKE = "empty_like full_like ones_like zeros_like rand_like randint_like randn_like"
_NEW = "new_empty new_full new_ones new_zeros"
#: What reads no value, either, and makes a tensor of the same shape, or dtype and device.
_FACTORIES = {getattr(torch, name) for name in _LIKE.split()} | {getattr(Tensor, name) for name in _NEW.split()}


class LazyLogits(Tensor):
    """Logits that are computed when somebody reads them whole."""

    source: Source
    value: Tensor | None
    """The true logits, once they were computed; from then on they answer everything."""
    parent: LazyLogits | None
    step: Callable[[Tensor], Tensor] | None
    """From the parent's value to this one's; None for the head's own output."""
    root: weakref.ref[LazyLogits] | None
    """In place of a parent that is in a graph, for logits that are not: they do not keep that graph alive."""
    node: Any
    """The autograd node that :func:`stand_for` gave it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        lazy = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, LazyLogits)]
        pending = [each for each in lazy if each.value is None]
        for each in () if func in _METADATA else pending:
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
            if func in _METADATA:
                return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            if func in _FACTORIES:
                return func(*tree_map(_shaped, args), **tree_map(_shaped, kwargs))
            handler = HANDLERS.get(func)
            away = any(each.source.device is not None for each in pending) and func is not Tensor.to
            if handler is not None and away and not _writes(func, kwargs):
                return _where_the_head_is(func, args, kwargs, pending[0].device)
            foreign = away or any(each.is_foreign for each in pending)
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
            if func is not Tensor.as_subclass:
                _note(func, pending[0].source.head.module)
        if func in (Tensor.register_hook, Tensor.retain_grad):
            for each in lazy:
                each.compute_family()
        if _writes(func, kwargs):  # views share memory, copies were taken before: bring all to that state
            for each in lazy:
                each.compute_family()
        result = func(*tree_map(_value, args), **tree_map(_value, kwargs))
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

    @property
    def is_foreign(self) -> bool:
        """Whether another autograd node than its own made it, e.g. a user's function that cloned its input."""
        return self.grad_fn is not self.node

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
            self.node, self.parent, self.root, self.step = self.grad_fn, None, None, None

    def become(self, source: Source) -> None:
        """Stand for `source`, which reads the same tensors of the graph, from now on: a change in place."""
        self.source = source
        if self.node is not None:
            self.node.source = source

    def compute(self) -> Tensor:
        """The true logits, in the graph where these are."""
        if self.value is None:
            self.look_through_fetches()
            self.source.check()
            if self.is_foreign:
                self.value = _RevealFunction.apply(self)
            else:
                with torch.inference_mode(False), torch.set_grad_enabled(self.source.tracked):
                    parent = self.parent if self.root is None else self.root()
                    if parent is None or self.step is None:
                        self.value = self.source.whole()
                        self.source.pass_moments_to(self.value)
                    else:
                        self.value = self.step(parent.compute())
            self.parent = self.root = self.step = None
        assert self.value is not None
        return self.value

    def compute_family(self) -> None:
        for reference in self.source.family:
            member = reference()
            if member is not None:
                member.compute()


def stand_for(source: Source, parent: LazyLogits | None = None, step: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Logits that are computed from `source`, or by `step` from those of `parent`."""
    logits: LazyLogits
    if source.tracked:
        logits = _StandingFunction.apply(source, source.x, *source.tensors)
    else:
        logits = wrapper(LazyLogits, source.shape, source.dtype, source.device or source.x.device)
    root = None
    if parent is not None and step is not None and parent.source.tracked and not source.tracked:
        steps = [step]
        while parent.parent is not None and parent.step is not None:
            steps.append(parent.step)
            parent = parent.parent
        root, parent, step = weakref.ref(parent), None, functools.partial(_through, steps[::-1])
    logits.source, logits.value, logits.parent, logits.root, logits.step = source, None, parent, root, step
    logits.node = logits.grad_fn
    source.family[:] = [*(reference for reference in source.family if reference() is not None), weakref.ref(logits)]
    return logits


def _through(steps: list[Callable[[Tensor], Tensor]], value: Tensor) -> Tensor:
    return functools.reduce(lambda y, step: step(y), steps, value)


class _StandingFunction(DirectFunction):
    """The node of logits that were not computed: whatever finds them in a graph finds the head's input and weights.

    Its backward runs where a gradient of the logits comes past their value, e.g. from a user's function.
    """

    @staticmethod
    def forward(ctx: Any, source: Source, x: Tensor, *tensors: Tensor) -> Any:
        # Not saved: nothing reads it in a step whose loss is computed by chunks, and hooks would copy it each time.
        ctx.source = source
        return wrapper(LazyLogits, source.shape, source.dtype, source.device or x.device)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        source: Source = ctx.source
        source.check()
        with torch.enable_grad():
            leaf = source.x.detach().requires_grad_()
            y = source.values(leaf)
        return None, *torch.autograd.grad(y, (leaf, *source.tensors), dy.to(y.device), allow_unused=True)


class _RevealFunction(DirectFunction):
    """The value of logits whose graph goes on with a node that is not ours."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits) -> Tensor:
        return logits.source.whole()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


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


#: Head -> why its logits were computed whole in a training step.
whole: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()


def say_whole(head: nn.Module, why: str) -> None:
    """Warn, once a reason, that logits of `head` are computed whole in a training step."""
    if why not in whole.setdefault(head, []):
        whole[head].append(why)
        same = "the loss and its gradients are the same, without the saving"
        warnings.warn(f"memopt: the logits of this step are computed whole, since {why}; {same}.", stacklevel=2)


def _note(func: Any, head: nn.Module) -> None:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(func.__self__, "__name__", name)
    place = next(_places(), None)
    if place is not None:
        say_whole(head, f"'{name}' reads them at {place[0]}:{place[1]}")


def _places() -> Iterator[tuple[str, int]]:
    """Where the functions that are running were called, the innermost first, PyTorch and this package left out."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("torch", "memopt"):
            yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
