"""Trace forward and backward of one step from the config alone: the saved tensors, and the purpose of every storage."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from memopt.errors import ModelError
from memopt.torch_compat import storage_id
from memopt.trace.account import Account, account
from memopt.trace.calls import counted_calls
from memopt.trace.estimate import Built, build_trained, quiet, traced
from memopt.trace.events import PARTS, Activations, Event, Moment, Parameter, Part, Storage, Trace, living, peak_of
from memopt.trace.quantised import quantisation_state
from memopt.trace.storages import Lifetime, distinct_bytes, storages
from memopt.trace.timeline import Record, record
from memopt.trace.training import Step
from memopt.walk.models.alike import Run, places, take_out
from memopt.walk.models.attention import without_packages
from memopt.walk.models.config import one_line


class Subject(NamedTuple):
    """A model to trace, and the runs of blocks that were left out of it."""

    built: Built
    runs: tuple[Run, ...]


@quiet()
def subject(of: Step, groups: int | None = None) -> Subject:
    """The model of `of`, which can be traced at any size. `groups` is the number of alike groups of blocks in it, by
    default all; `Trace.runs` will have the left-out blocks."""
    runs: list[Run] = []

    def shrink(model: PreTrainedModel) -> None:
        # Adapters are added later. Alike blocks get alike adapters, unless a target names a single module.
        single = any("." in name for name in (*of.training.lora_targets, *of.training.modules_to_save))
        if groups is not None and not (single if of.adapters is None else not of.adapters.are_alike):
            runs.extend(take_out(model, of.sites.blocks, groups, several=True))

    with without_packages():
        return Subject(build_trained(of, shrink), tuple(runs))


@quiet()
def trace(of: Step, on: Subject | None = None) -> Trace:
    """Trace one step; raises the errors of `memopt.trace.estimate.traced`.

    Args:
        of: the model, and how it is patched and trained.
        on: the result of `subject` for a step that differs from `of` in its size alone, which the trace uses up; by
            default the whole model of `of`.
    """
    built, runs = subject(of) if on is None else on
    with traced(of, built) as model:
        batch = distinct_bytes(model.arguments)
        cuda = of.training.cuda_kernels
        calls = partial(counted_calls, of.sites.functions, cuda)
        found = record(model.trained, model.run, during_backward=model.choices(), within=calls, cuda=cuda)
        events, numbers = step_events(found)
        operations = tuple(each.at(bisect_left(numbers, each.moment)) for each in found.operations)
        parameters = tuple(with_idle(parameters_of(model.trained), model.trained, of.sites.blocks))
        root = next(name for name, module in model.trained.named_modules() if module is model.model)
    for run in runs:
        parameters = with_all_blocks(parameters, run)
    return Trace(
        of.training,
        parameters,
        batch,
        events,
        living(events),
        tuple(model.notes),
        of.sites.blocks,
        operations,
        runs,
        None if runs else activations(found, root),
    )


@quiet()
def trace_account(of: Step, *, whole: bool = False) -> Account:
    """Count the tensors that one forward of the model, stock or patched, saves for backward; `whole`: trace forward and
    backward as well, for ``Account.trace``. Raises a ModelError if the model cannot be built or traced from its config,
    or peft is missing for LoRA."""
    with traced(of) as model:
        saved = account(model.model, model.run, blocks=of.sites.blocks, sites=of.sites, notes=model.notes)
    if not whole:
        return saved
    try:
        return replace(saved, trace=trace(of))
    except ModelError as error:  # the saved bytes are known all the same
        cause = error.__cause__ or error
        why = f"{type(cause).__name__}: {one_line(cause)}"
        return replace(saved, notes=(*saved.notes, f"Peak of a step: unknown, since backward fails ({why})."))


def parameters_of(model: nn.Module) -> Iterator[Parameter]:
    """Every parameter and buffer of `model`, each storage once; a 4-bit parameter with its quantisation state."""
    seen: set[int] = set()
    buffers = dict(model.named_buffers())
    embedding = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, tensor in (*model.named_parameters(), *buffers.items()):
        nbytes = 0
        for storage in storages([tensor, *quantisation_state(tensor)]):
            if storage_id(storage) not in seen:
                seen.add(storage_id(storage))
                nbytes += storage.nbytes()
        if nbytes:
            form, embeds = (tuple(tensor.shape), tensor.dtype, nbytes), id(tensor) in embedding
            yield Parameter(name, *form, tensor.requires_grad, is_buffer=name in buffers, embeds=embeds)


def with_idle(parameters: Iterable[Parameter], model: nn.Module, blocks: Sequence[str]) -> Iterator[Parameter]:
    """`parameters` after a backward, marked as idle if they have no gradient. Not in a block that has gradients if a
    parameter whose name differs in numbers alone has one: an expert that got no token in this step gets some in
    another, and weights that only choose indices never get a gradient."""
    block_at = places(blocks)
    reached = {name for name, each in model.named_parameters() if each.grad is not None}
    running, alike = {block_at(name) for name in reached} - {-1}, {_unnumbered(name) for name in reached}
    for each in parameters:
        may_run = block_at(each.name) in running and _unnumbered(each.name) in alike
        yield replace(each, is_idle=each.trained and each.name not in reached and not may_run)


def _unnumbered(name: str) -> str:
    return ".".join("" if part.isdecimal() else part for part in name.split("."))


def with_all_blocks(parameters: Sequence[Parameter], run: Run) -> tuple[Parameter, ...]:
    """`parameters`, with the parameters of the blocks that `run` left out inserted at their place."""
    place_of, names, end = places(run.names), run.names, run.start + run.left_out
    found: list[Parameter] = []
    for is_buffer in (False, True):
        those = [each for each in parameters if each.is_buffer == is_buffer]
        behind = next((at for at, each in enumerate(those) if place_of(each.name) >= end), len(those))
        found += those[:behind]
        for place in range(run.start, end):
            like = run.like(place)
            found += (
                replace(each, name=each.name.replace(names[like], names[place], 1))
                for each in those
                if place_of(each.name) == like
            )
        found += those[behind:]
    return tuple(found)


def step_events(found: Record) -> tuple[tuple[Event, ...], list[int]]:
    """The events of a recorded forward and backward, and the index of each in ``found.events``."""
    merged = _summed_in_place(found)
    firsts = set(merged.values())
    made: dict[Lifetime, Storage] = {}
    events, numbers = [], []
    for index, life in enumerate(found.events):
        sum_of = merged.get(life)
        if life in merged and life.born == index:
            continue  # it was added into the storage that holds the first term
        if sum_of is None and life in firsts and life.died == index:
            continue
        root = life
        while root in merged:
            root = merged[root]
        allocated = root.born == index
        if allocated:
            made[root] = _storage(root, found)
        moment: Moment = "forward" if index < found.forward_ends else "backward"
        if index >= found.backward_ends:
            moment = "optimizer step"
        elif made[root].part == "loss":
            moment = "loss"
        events.append(Event(made[root], allocated, moment))
        numbers.append(index)
    return tuple(events), numbers


def activations(found: Record, root: str = "") -> Activations:
    """The live storages of a recorded step, without gradients of parameters. Names of modules are relative to `root`,
    the model inside the wrappers of adapters."""

    def named(module: str) -> str:
        return module.removeprefix(root).removeprefix(".") if module.startswith(root) else ""

    counted = [(event, at) for event, at in zip(*step_events(found), strict=True) if event.storage.part != "gradients"]
    live = dict.fromkeys(PARTS, 0)
    most = dict(live)
    for event, _ in counted:
        part = event.storage.part
        live[part] += event.change
        most[part] = max(most[part], live[part])
    peak = peak_of((), [event for event, _ in counted])
    alive = tuple(replace(each, module=named(each.module)) for each in peak.alive)
    kept = sum(event.change for event, at in counted if at < found.forward_ends)
    return Activations(kept, replace(peak, where=named(peak.where), alive=alive), most)


def _storage(life: Lifetime, found: Record) -> Storage:
    birth = life.birth
    part: Part
    if life in found.gradients:
        part = "gradients"
    elif life.born >= found.backward_ends:
        part = "optimizer transients"
    elif birth.of_parameter:
        part = "weight copies"
    else:
        part = found.part_of(life, found.forward_ends)
    return Storage(life.nbytes, part, life.module, birth.operation, birth.dtype, birth.shape)


def _summed_in_place(found: Record) -> dict[Lifetime, Lifetime]:
    """Sum of gradients -> its first term, where autograd's engine adds in place outside of a trace.

    The engine sums gradients of one tensor in the first one's storage, unless something else refers to it; under a
    dispatch mode, as in a trace, it allocates a new one (InputBuffer::add in torch/csrc/autograd/input_buffer.cpp).
    """
    events = found.events
    merged: dict[Lifetime, Lifetime] = {}
    for index, life in enumerate(events[found.forward_ends :], found.forward_ends):
        first = life.before
        if life.born != index or first is None or life.node != -1 or first.nbytes != life.nbytes:
            continue
        if index < first.died <= index + 2:
            merged[life] = first
    return merged
