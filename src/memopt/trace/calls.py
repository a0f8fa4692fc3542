"""Calls of a model's pure functions: a trace runs one call of each form, and counts the other calls as copies of it.

A scan in plain PyTorch loops over chunks of tokens: thousands of operations in a call, and most of the time of a trace.
Calls on tensors of the same form allocate, free and compute alike in every block.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import checkpoint

from memopt.recompute.pure import NotPureError, call_on, form_of, with_tensors, without_tensors
from memopt.torch_compat import (
    FakeTensor,
    current_node,
    known_values,
    sequence_number,
    storage_id,
    tensor_uses,
    top_saved_tensors_hooks,
    tree_leaves,
)
from memopt.trace.followed import Call, Ends, Followed, Run, forms_of
from memopt.trace.operations import Operation
from memopt.trace.storages import Lifetime
from memopt.trace.timeline import Timeline
from memopt.walk.models.plain import exchanged, is_kernel
from memopt.walk.sites import FunctionSite


@contextlib.contextmanager
def counted_calls(sites: Iterable[FunctionSite], cuda: bool, timeline: Timeline) -> Iterator[None]:
    """Inside, the functions of `sites` run once for each form of a call; `timeline` counts copies for the other calls.
    `cuda`: whether a CUDA device is imitated (`memopt.trace.emulate`), which decides which tensors a call saves."""
    counter = _Counter(timeline, cuda)
    names = dict.fromkeys(name for site in sites for name in site.functions)
    found = [(sys.modules[home], name) for home, name in names if home in sys.modules]
    functions = [(home, name, getattr(home, name, None)) for home, name in found]
    plain = [(home, name, value) for home, name, value in functions if callable(value) and not is_kernel(value)]
    with exchanged([(home, name, counter.counted(value)) for home, name, value in plain]):
        yield


#: The records of the latest calls, of all traces; None for a call that cannot be counted.
_known: dict[tuple[Call, tuple[bool, ...] | None], Followed | None] = {}
_MOST_KNOWN = 16


class _Counter:
    def __init__(self, timeline: Timeline, cuda: bool) -> None:
        self.timeline, self._cuda = timeline, cuda
        self._follows = False
        self.again: dict[int, _Again] = {}
        """Id of the storage that a call saves -> that call, which checkpointing ran again."""

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose call is counted if an alike call was traced, or can be traced on its own now."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            known = self._call((function, args, kwargs), tensors)
            run = functools.partial(call_on, function, without_tensors((args, kwargs)))
            followed = known and self.followed(known, run)
            if not known or not followed:
                return function(*args, **kwargs)
            again = _Again(self, known, followed, run)
            outputs = _AgainFunction.apply(again, *tensors) if known.graph else again.forward(tensors)  # type: ignore[no-untyped-call]
            return with_tensors(followed.returned, outputs)

        return call

    def _call(self, call: tuple[Any, Any, Any], tensors: Sequence[Tensor]) -> Call | None:
        if self._follows or not tensors or torch.is_autocast_enabled("cpu"):
            return None  # autocast is set per device, and caches casts of weights between calls
        if not all(isinstance(each, FakeTensor) and known_values(each) is None for each in tensors):
            return None
        graph = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        hooks: Literal["", "dropping", "keeping"] = ""
        if graph and (around := top_saved_tensors_hooks(True)) is not None:
            if getattr(around[0], "__module__", None) != checkpoint.__name__:
                return None  # unknown hooks may keep or free saved tensors
            hooks = "dropping" if current_node() is None else "keeping"
        function, args, kwargs = call
        try:
            form = form_of(args, kwargs)
        except NotPureError:
            return None
        plain = tuple(each for each in tree_leaves((args, kwargs)) if not isinstance(each, Tensor))
        context = torch.is_grad_enabled(), current_node() is None, self._cuda
        forms, storages = forms_of(tensors)
        parameters = tuple(map(self.timeline.is_parameter, storages))
        return Call(forms, (function, form, plain, context), parameters, graph, hooks)

    def followed(self, call: Call, run: Run, wanted: tuple[bool, ...] | None = None) -> Followed | None:
        """The record of a call; `wanted`: which outputs are given a gradient, by default all that require one."""
        if (call, wanted) not in _known:
            if len(_known) == _MOST_KNOWN:
                del _known[next(iter(_known))]
            self._follows = True
            _known[call, wanted] = None
            try:
                # A call that was counted in the first run of a checkpointed block must be counted in the recomputation
                # too. Repeat it: Python's garbage collector may have freed other storages meanwhile.
                for _ in range(3 if call.hooks == "keeping" else 1):
                    with contextlib.suppress(Exception):  # the call itself raises it
                        _known[call, wanted] = Ends(self.timeline, call, wanted).followed(run)
                    if _known[call, wanted] is not None:
                        break
            finally:
                self._follows = False
        return _known[call, wanted]


class _AgainFunction(torch.autograd.Function):
    """A call that does not run, but is counted as a copy of an alike call."""

    __memopt_saves__ = "storages that are counted, not made"

    @staticmethod
    def forward(ctx: Any, again: _Again, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.again = again
        ctx.set_materialize_grads(False)
        outputs = again.forward(tensors)
        if again.is_checkpointed:
            ctx.save_for_backward(again.saved())
        ctx.mark_non_differentiable(*again.followed.outputs.constants(outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        again = ctx.again
        if again.is_checkpointed:  # the recomputed call, which runs now or ran before
            again = again.run_again(*ctx.saved_tensors)
        return None, *again.backward(gradients)


class _Again:
    """One call, counted as a copy of an alike call (`followed`)."""

    def __init__(self, counter: _Counter, call: Call, followed: Followed, run: Run) -> None:
        self.followed = followed
        self._counter, self._timeline, self._call, self._run = counter, counter.timeline, call, run
        self._module = self._timeline.where()
        self._lives: dict[Lifetime, Lifetime] = {}
        """Lifetime in the alike call -> lifetime in this call."""
        self._open: dict[Lifetime, None] = {}
        """Lifetimes of this call that have not ended and have no storage."""
        self._kept: dict[Lifetime, torch.UntypedStorage] = {}
        """Lifetime in the alike call -> storage of an argument or output that the graph of this call keeps."""
        weakref.finalize(self, _end, self._timeline, self._open)

    @property
    def is_checkpointed(self) -> bool:
        return self._call.hooks != ""

    def saved(self) -> Tensor:
        """A tensor without bytes, by which `run_again` finds this call."""
        with self._timeline.silent():
            saved = torch.empty(0, dtype=torch.uint8)
        if self._call.hooks == "keeping":
            storage, calls = saved.untyped_storage(), self._counter.again
            calls[storage_id(storage)] = self
            weakref.finalize(storage, calls.pop, storage_id(storage), None)
        return saved

    def run_again(self, saved: Tensor) -> _Again:
        """The recomputed call that saved `saved`."""
        return self._counter.again.pop(storage_id(saved.untyped_storage()))

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        followed = self.followed
        with self._timeline.silent():
            bases = followed.outputs.bases()
            outputs = followed.outputs.on(bases)
        arguments = dict(zip(followed.lives[0], forms_of(tensors)[1], strict=True))
        made = dict(zip(followed.lives[1], (base.untyped_storage() for base in bases), strict=True))
        self._add_lives(arguments)
        self._count(followed.forward, followed.computed[0], made)
        if self._call.graph:
            kept = {life for allocated, life in followed.backward if not allocated}
            self._kept = {life: storage for life, storage in {**arguments, **made}.items() if life in kept}
        return outputs

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        followed = self._as_given(tuple(each is not None for each in gradients))
        if followed is None:
            self._kept.clear()
            _end(self._timeline, self._open)
            return [None] * len(self._call.arguments.each)
        given = dict(zip(followed.lives[2], (each for each in gradients if each is not None), strict=True))
        self._add_lives({life: each.untyped_storage() for life, each in given.items()})
        with self._timeline.silent():
            bases = [
                given.get(life, base)  # a gradient that is passed on
                for life, base in zip(followed.lives[3], followed.gradients.bases(), strict=True)
            ]
            found = iter(followed.gradients.on(bases))
        made = {
            life: base.untyped_storage()
            for life, base in zip(followed.lives[3], bases, strict=True)
            if life not in given
        }
        only = {life for life, each in given.items() if tensor_uses(each) == 1}
        self._count(followed.backward, followed.computed[1], made, only)
        self._kept.clear()
        _end(self._timeline, self._open)
        return [next(found) if has else None for has in followed.has_gradient]

    def _as_given(self, given: tuple[bool, ...]) -> Followed | None:
        """The record of the call for the outputs that have a gradient; None if then no argument gets a gradient."""
        mine = self.followed
        if given == tuple(form.requires_grad for form in mine.outputs.each):
            return mine
        found = self._counter.followed(self._call, self._run, given)
        if found is None:
            return None
        names = dict(zip(_made(mine), _made(found), strict=True))
        self._lives = {names[life]: value for life, value in self._lives.items()}
        self._kept = {names[life]: value for life, value in self._kept.items()}
        return found

    def _add_lives(self, storages: Mapping[Lifetime, torch.UntypedStorage]) -> None:
        found = {life: self._timeline.life(storage) for life, storage in storages.items()}
        self._lives.update({life: mine for life, mine in found.items() if mine is not None})

    def _count(
        self,
        steps: Sequence[tuple[bool, Lifetime]],
        computed: Sequence[Operation],
        made: Mapping[Lifetime, torch.UntypedStorage],
        only: Collection[Lifetime] = (),
    ) -> None:
        """Count the allocations and frees in `steps`, and the operations `computed` between them. `made`: lifetime in
        the alike call -> storage that exists already. `only`: lifetimes of given gradients to which nothing else
        refers, so that the call frees them."""
        timeline, done = self._timeline, 0
        for number, (allocated, life) in enumerate(steps):
            while done < len(computed) and computed[done].moment <= number:
                timeline.operations.append(computed[done].at(len(timeline.events)))
                done += 1
            if allocated:
                self._allocate(life, made.get(life))
            elif life in self._kept:
                del self._kept[life]
            elif (mine := self._lives.get(life)) in self._open or life in only:
                assert mine is not None
                self._open.pop(mine, None)
                timeline.end(mine)
                mine.died_in = self._node(life.died_in)
        timeline.operations += (each.at(len(timeline.events)) for each in computed[done:])

    def _allocate(self, like: Lifetime, storage: torch.UntypedStorage | None) -> None:
        mine = Lifetime(
            like.nbytes,
            like.birth,
            born=-1,
            before=like.before and self._lives.get(like.before),
            node=self._node(like.node),
            recomputed=like.recomputed,
            module=like.module and self._module,
        )
        self._lives[like] = mine
        if storage is None:
            self._open[mine] = None
        self._timeline.add(mine, storage)

    def _node(self, number: float) -> float:
        """The number of a node in this call; it differs for the node in whose backward the function is called."""
        node = current_node() if number == self.followed.node else None
        return number if node is None else sequence_number(node)


def _made(followed: Followed) -> list[Lifetime]:
    return [*followed.lives[0], *(life for allocated, life in followed.forward if allocated)]


def _end(timeline: Timeline, lives: dict[Lifetime, None]) -> None:
    for life in lives:
        timeline.end(life)
    lives.clear()
