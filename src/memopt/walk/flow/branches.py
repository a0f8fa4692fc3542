"""Branches of a forward that no call took: conditions on values are inverted, and inputs of other lengths are run.

A fold that is legal in every observed call may be wrong in a branch that no call took. A condition on values that had
one outcome only is therefore inverted in a further forward (`memopt.walk.aten.decisions`). Where the outcome of a
comparison of sizes depends on the length of the inputs, calls of other lengths are added, to see both outcomes.
"""

from __future__ import annotations

import dis
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memopt.torch_compat import tree_leaves, tree_map
from memopt.walk.aten.decisions import Comparison, Decisions, Place
from memopt.walk.calls.arguments.request import LENGTH, ODD_LENGTH
from memopt.walk.calls.batch import rows_of
from memopt.walk.calls.inputs import Call, Runner, first_to_run, proposed, run_once
from memopt.walk.models.config import one_line

#: Greatest length that is tried to invert a comparison of sizes; twice the first length, where that is more.
LONGEST = 256
#: Most places that are inverted (with more, no norm is folded); most lengths that are tried, the first two included.
MOST_PLACES, MOST_LENGTHS = 32, 8


class Branches:
    """Runs calls through `run`, and records the conditions on values and the comparisons of sizes in their forwards."""

    def __init__(self, run: Runner) -> None:
        self._run = run
        self._turned: frozenset[Place] = frozenset()
        self._needed: frozenset[Place] = frozenset()
        self.exploring = False
        """True from the first call of `take` or `lengths` on: all later calls are added by this class."""
        self._answers: dict[Place, set[bool]] = defaultdict(set)
        self._first: dict[Place, tuple[Call, bool, frozenset[Place]]] = {}
        self._sizes: dict[str, list[Comparison]] = {}

    def run(self, model: nn.Module, call: Call) -> Any:
        """Run a call and record its decisions; the signature is that of a `Runner`."""
        decisions = Decisions(self._turned)
        try:
            with decisions:
                output = self._run(model, call)
        except Exception:
            # Record nothing of a failed call: its arguments may not fit the model, and of several inverted places
            # any one may have failed. With one inverted place, that place has been observed.
            if len(self._turned - self._needed) == 1:
                self._note(decisions, model, call)
            raise
        self._note(decisions, model, call)
        if not model.training and not self._turned:
            self._sizes[call.label] = decisions.sizes
        return output

    def _note(self, decisions: Decisions, model: nn.Module, call: Call) -> None:
        for place, answers in decisions.values.items():
            self._answers[place] |= answers
            self._first.setdefault(place, (call, model.training, self._turned))

    def take(self, model: nn.Module) -> str:
        """Run the branches on values that no call took. Returns why some branch was not observed; empty if all were."""
        self.exploring, tried, own_files = True, set[Place](), _files(model)
        # Invert all places with one outcome at once: one forward may observe most of them.
        together = {place for place in self._answers if self._is_open(place)}
        if len(together) > 1:
            self._turn(model, *self._first[min(together)], together)
        while place := next((p for p in self._answers if self._is_open(p) and p not in tried), None):
            if len(tried) == MOST_PLACES:
                return f"its forward decides by values at more than {MOST_PLACES} places"
            tried.add(place)
            error = self._turn(model, *self._first[place], {place})
            # Ignore errors outside of the modules' files: that code calls no module, and its mask may not fit inverted.
            if error is not None and place[0] in own_files and not _is_raised(error):
                where = f"{place[0].rpartition('/')[2]}:{place[1]}"
                return f"a branch on values, at {where}, cannot be observed ({one_line(error)})"
        return ""

    def _is_open(self, place: Place) -> bool:
        return len(self._answers[place]) == 1

    def _turn(
        self, model: nn.Module, call: Call, training: bool, needed: frozenset[Place], places: set[Place]
    ) -> Exception | None:
        """Run `call` with `places` inverted, and the places `needed` to reach them; returns the error if it fails."""
        self._needed, self._turned = needed, needed | places
        try:
            run_once(model, call, self.run, training)
        except Exception as error:  # a branch that is never taken may do anything
            return error
        finally:
            self._needed = self._turned = frozenset()
        return None

    def lengths(self, model: nn.Module, inputs: Mapping[str, Any] | None = None) -> list[Call]:
        """Run calls of lengths at which comparisons of sizes have the other outcome, and return the calls that ran.
        Without `inputs`, the inputs are guessed. In `inputs`, a size is a length if the model runs with another one."""
        self.exploring = True
        if inputs is None:

            def guessed(length: int) -> list[Call]:
                variants = proposed(model, ("plain", f"length {length}"), 0)
                return [call for call in variants if not call.label.startswith("plain")]

            return self._of_lengths(model, "plain", "odd", (LENGTH, ODD_LENGTH), guessed)
        calls: list[Call] = []
        for size in _sizes_in(inputs):

            def resized(length: int, size: int = size) -> Iterator[Call]:
                given = tree_map(lambda value: _resized(value, size, length), dict(inputs))
                yield Call(f"inputs with {length} for {size}", given)

            for other in (size - 1, size + 1, 2 * size, size // 2):
                if found := first_to_run(model, resized(other), self.run):
                    calls += [*found, *self._of_lengths(model, "inputs", found[0].label, (size, other), resized)]
                    break
        return calls

    def _of_lengths(
        self,
        model: nn.Module,
        first: str,
        second: str,
        lengths: tuple[int, int],
        tries: Callable[[int], Iterable[Call]],
    ) -> list[Call]:
        """Calls of lengths that invert comparisons in the calls labelled `first` and `second`, which have `lengths`."""
        calls, tried = list[Call](), set(lengths)
        while len(tried) < MOST_LENGTHS and (length := next(self._missing(first, second, lengths, tried), None)):
            tried.add(length)
            calls += first_to_run(model, tries(length), self.run)
        return calls

    def _missing(self, first: str, second: str, lengths: tuple[int, int], tried: set[int]) -> Iterator[int]:
        for label, sizes in list(self._sizes.items()):
            others = self._sizes.get(label.replace(first, second, 1)) if label.startswith(first) else None
            for one, other in _pairs(sizes, others or []):
                yield from _other_side(one, other, lengths, tried)


def _files(model: nn.Module) -> set[str | None]:
    """The files that define the classes of the model's modules."""
    classes = {cls for kind in {type(module) for module in model.modules()} for cls in kind.__mro__}
    return {getattr(sys.modules.get(cls.__module__), "__file__", None) for cls in classes}


def _is_raised(error: Exception) -> bool:
    """Whether a ``raise`` statement raised it, as in a branch that refuses wrong inputs, and not a failed operation."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _pairs(sizes: Sequence[Comparison], others: Sequence[Comparison]) -> Iterator[tuple[Comparison, Comparison]]:
    """Pairs of comparisons, one of each forward, at one place and with one operation: only their numbers differ."""
    by_place: dict[tuple[Place, str], list[Comparison]] = defaultdict(list)
    for other in others:
        by_place[other.place, other.operation].append(other)
    for one in sizes:
        if same := by_place[one.place, one.operation]:
            yield one, same.pop(0)


def _sizes_in(inputs: Mapping[str, Any]) -> list[int]:
    """Sizes that may be a length: all but 1 and the number of rows. Sizes of integer tensors come first."""
    tensors = [value for value in tree_leaves(dict(inputs)) if isinstance(value, Tensor)]
    tensors.sort(key=lambda tensor: tensor.is_floating_point())
    sizes = [size for tensor in tensors for size in (*tensor.shape[1:], *tensor.shape[:1])]
    return [size for size in dict.fromkeys(sizes) if size > 1 and size != rows_of(inputs)]


def _resized(value: Any, size: int, length: int) -> Any:
    """A tensor with each dimension of `size` cut or repeated to `length`; any other value unchanged."""
    if isinstance(value, Tensor):
        for dim in (dim for dim in range(value.dim()) if value.shape[dim] == size):
            value = value.index_select(dim, torch.arange(length, device=value.device) % size)
    return value


def _other_side(one: Comparison, other: Comparison, lengths: tuple[int, int], tried: set[int]) -> Iterator[int]:
    """Lengths at which a comparison has an outcome that no length in `tried` gives; its sides are linear in length."""
    first, second = lengths
    longest = max(LONGEST, 2 * first)
    slope, limit = ((a - b) / (first - second) for a, b in ((one.left, other.left), (one.right, other.right)))

    def left(length: int) -> float:
        return one.left + slope * (length - first)

    def right(length: int) -> float:
        return one.right + limit * (length - first)

    if one.operation == "%":
        if slope and one.right:
            for divides in (True, False):
                if not any((left(n) % right(n) == 0) == divides for n in tried if right(n)):
                    near = sorted(range(1, longest), key=lambda n: abs(n - first))
                    yield from [n for n in near if right(n) and (left(n) % right(n) == 0) == divides][:1]
        return
    if slope == limit:
        return
    border = first - (one.left - one.right) / (slope - limit)
    wanted = [] if any(n < border for n in tried) else [math.ceil(border) - 1]
    wanted += [] if any(n > border for n in tried) else [math.floor(border) + 1]
    wanted += [round(border)] if border == round(border) and one.operation in ("eq", "ne") else []
    yield from (n for n in wanted if 1 <= n <= longest and n not in tried)
