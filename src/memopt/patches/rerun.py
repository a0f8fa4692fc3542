"""Run a module again in backward, under the conditions of its forward.

These conditions are its weights, buffers and modes (:class:`Held`), its random numbers, autocast, and the function
modes around it (:class:`Around`), with the hooks of modules inside. Callers take care of inputs and the module's hooks.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from memopt.kernels.base.autograd import autocast_as, autocast_dtype
from memopt.patches.swap import is_watched, original_class
from memopt.recompute.versions import changed_in_place, versions_of
from memopt.torch_compat import DirectFunction, hook_flags, kernels_of_attention, module_hooks, no_dispatch

#: Attributes that a module's forward depends on beside its tensors: train mode, and PEFT's active adapters and scales.
MODES = ("training", "_active_adapter", "_disable_adapters", "scaling")
#: A table that holds a value (parameters, buffers or attributes of a module, say), and the value's key there.
Slot = tuple[dict[Any, Any], Any]
#: A table of hooks of a module: id -> hook or flag.
HookTable = MutableMapping[int, Any]
ABSENT = object()
#: Types that may be changed in place, and types that are compared by value.
CONTAINERS, NUMBERS = (list, dict, set, deque), (int, float, str)
PLAIN = (type(None), bool, *NUMBERS)
#: Attributes that every module has, a replica of `nn.DataParallel` has too, and memopt's own.
OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "_is_replica", "_former_parameters", "_memopt"})
#: Attributes that hold weights where a tool computes them (hypernetworks, weight norm, FSDP1's views).
WEIGHTS = ("weight", "bias")


class _Active(threading.local):
    def __init__(self) -> None:
        self.modes: list[type[RepeatedMode]] = []


_active = _Active()


class RepeatedMode(TorchFunctionMode):
    """A mode whose class takes no arguments. While it is active in this thread, :func:`active_modes` returns it."""

    def __enter__(self) -> Any:
        _active.modes.append(type(self))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _active.modes.pop()


def active_modes() -> tuple[type[RepeatedMode], ...]:
    """Classes of the :class:`RepeatedMode` that are active in this thread, the outermost first."""
    return tuple(dict.fromkeys(_active.modes))


@contextmanager
def inside(modes: tuple[type[RepeatedMode], ...]) -> Iterator[None]:
    """Inside, new modes of these classes are active; :func:`active_modes` returned the classes in the forward."""
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        yield


def slots_of(module: nn.Module) -> list[Slot]:
    """Parameters, buffers, `MODES` and plain attributes of `module` and of the modules inside it."""
    slots: list[Slot] = []
    for each in module.modules() if module._modules else (module,):
        own = vars(each)
        slots += [(own, name) for name in MODES if name in own]
        # Hooks keep counters as attributes of their modules; a weight is read whoever set it.
        found = () if is_watched(each) else own.keys() - OF_EVERY_MODULE - {*MODES, *WEIGHTS}
        slots += [(own, name) for name in found if _is_state(own[name])]
        slots += [(own, name) for name in WEIGHTS if name in own or each._parameters.get(name) is not None]
        for table in (each._parameters, each._buffers):
            slots += [(table, name) for name, tensor in table.items() if tensor is not None]
    return slots


def _is_state(value: Any) -> bool:
    """Whether an attribute is a tensor, a number, or a container of numbers, such as the scales of adapters. A tensor
    with a gradient may be a result of the last call, whose graph it would keep alive."""
    if isinstance(value, Tensor):
        return not value.requires_grad
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, CONTAINERS) else (value,)
    return all(type(each) in PLAIN for each in inside)


def has_gradient(value: Any, depth: int = 3) -> bool:
    """Whether `value` is, or holds, a tensor with a gradient."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, nn.Module):  # in a container it is no child
        return any(each.requires_grad for each in value.parameters())
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    return depth > 0 and any(has_gradient(each, depth - 1) for each in inside)


class Held:
    """The values in some slots at the time of a forward, and the versions of the tensors among them."""

    __slots__ = ("_own", "_results", "_tensors", "_trained", "slots", "values", "versions")

    def __init__(self, slots: Sequence[Slot], *, copies: bool = False) -> None:
        """With `copies`, containers are copied, because the forward may change them in place."""
        self.slots, self.values = slots, _standing_in(slots)
        if copies:
            self.values = list(map(copied, self.values))
        results = [i for i, value in enumerate(self.values) if type(value) is Tensor and value.grad_fn is not None]
        results = [i for i in results if slots[i][1] not in WEIGHTS]
        for i in results:  # without their graphs, which would hold that of the forward before, and so on
            self.values[i] = self.values[i].detach().requires_grad_()
        self._results = {id(self.values[i]) for i in results}
        self._tensors = [value for value in self.values if isinstance(value, Tensor)]
        self.versions = versions_of(self._tensors)
        self._trained = [each.requires_grad for each in self._tensors]
        self._own: set[int] = set()

    def settle(self) -> list[nn.Parameter]:
        """Called after the forward. Returns the parameters that the forward itself changed, by their versions. PEFT
        registers a parametrisation of a weight in each call (adapters of experts and routers). That counts as a change
        in place, though no number changes. So :meth:`lent` does not look at versions of these parameters."""
        moved = (a != b for a, b in zip(versions_of(self._tensors), self.versions, strict=True))
        own = [each for each, has in zip(self._tensors, moved, strict=True) if has and isinstance(each, nn.Parameter)]
        self._own = set(map(id, own))
        return own

    @contextmanager
    def trained_as_before(self) -> Iterator[None]:
        """Inside, parameters require gradients as at the forward. PEFT freezes adapters that are switched off."""
        pairs = zip(self._tensors, self._trained, strict=True)
        changed = [pair for pair in pairs if pair[0].requires_grad != pair[1] and isinstance(pair[0], nn.Parameter)]
        try:
            for each, was in changed:  # twice the same parameter if two modules share it
                each.requires_grad_(was)
            yield
        finally:
            for each, was in changed:
                each.requires_grad_(not was)

    @property
    def state(self) -> list[Tensor]:
        """The tensors that are no parameters."""
        return [each for each in self._tensors if not isinstance(each, nn.Parameter)]

    @property
    def has_moved(self) -> bool:
        """Whether any of the tensors was changed in place since."""
        return versions_of(self._tensors) != self.versions

    def moved(self) -> list[int]:
        """Indices of slots whose tensor was changed in place, or that hold another value now."""
        after = versions_of(self._tensors)
        moved = {id(t) for t, a, b in zip(self._tensors, after, self.versions, strict=True) if a != b}
        pairs = zip(_standing_in(self.slots), self.values, strict=True)
        return [i for i, (now, value) in enumerate(pairs) if id(value) in moved or not is_same(now, value)]

    def lent(
        self,
        module: nn.Module,
        why: str,
        instead: Mapping[int, Tensor] | None = None,
        is_read: Callable[[int, dict[Any, Any], Any], bool] | None = None,
    ) -> list[tuple[Slot, Any]]:
        """(slot, value) for each slot that has to be set before `module` runs again.

        Args:
            why: the end of the error text: the reason why the module runs again, and a remedy.
            instead: index of a slot -> a copy of its tensor from before the forward, which changed it in place.
            is_read: whether the tensor in a slot (index, table, name) must not have changed. By default none may.

        Raises:
            RuntimeError: a tensor was changed in place since the forward, and `instead` has no copy of it.
        """
        now = _standing_in(self.slots)
        if not instead and all(map(is_, now, self.values)) and not self.has_moved:
            return []
        lent: list[tuple[Slot, Any]] = []
        versions = iter(zip(versions_of(self._tensors), self.versions, strict=True))
        for i, (slot, value) in enumerate(zip(self.slots, self.values, strict=True)):
            version, expected = next(versions) if isinstance(value, Tensor) else (0, 0)
            if instead and i in instead:
                lent.append((slot, instead[i].clone()))  # the copy stays clean: with retain_graph the module runs again
            elif isinstance(value, Tensor) and now[i] is not value and not _has_memory(value):
                continue  # sharding freed the forward's tensor and has gathered equal values into another one
            elif version != expected and id(value) not in self._own and (is_read is None or is_read(i, *slot)):
                owner = _name_of(slot, module)
                raise changed_in_place(f"'{slot[1]}' {list(value.shape)} of {owner}", version, expected, why)
            elif now[i] is not value and (isinstance(value, CONTAINERS) or not is_same(now[i], value)):
                # Also of equal contents: the second run may add to a container.
                lent.append((slot, _Apart.apply(value) if id(value) in self._results else copied(value)))
        return lent


def _name_of(slot: Slot, module: nn.Module) -> str:
    """The class of `module`, and the name of the module inside it that `slot` belongs to."""
    named = module.named_modules()
    owner = next((n for n, m in named if any(slot[0] is t for t in (m._parameters, m._buffers, vars(m)))), "")
    return ".".join(filter(None, (original_class(module).__name__, owner)))


def copied(value: Any) -> Any:
    """`value`, or a copy if it is a container, which may be changed in place; lists are copied recursively."""
    if type(value) is list:
        return list(map(copied, value))
    return copy.copy(value) if isinstance(value, CONTAINERS) else value


class _Apart(DirectFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def apart(values: Sequence[Any], *, leaves: bool = False) -> list[Any]:
    """`values` with another tensor, of the same memory, for each one in the graph, also inside tuples, lists and dicts.
    A hook that a module's second run registers is then none of the tensor whose gradient backward computes later. With
    `leaves`, for tensors that are leaves: a first run saves them in the way in which the second run saves others."""
    others: dict[int, Tensor] = {}
    is_left = [leaves and not (isinstance(each, Tensor) and each.is_leaf) for each in values]
    return [each if left else _other(each, others) for each, left in zip(values, is_left, strict=True)]


def _other(value: Any, others: dict[int, Tensor]) -> Any:
    if type(value) is Tensor and value.requires_grad:
        if id(value) not in others:
            others[id(value)] = _Apart.apply(value)
        return others[id(value)]
    if type(value) in (tuple, list):
        return type(value)(_other(each, others) for each in value)
    return {key: _other(each, others) for key, each in value.items()} if type(value) is dict else value


def is_same(a: Any, b: Any) -> bool:
    """Whether two values of a slot are one object, or equal numbers, texts, or containers of the same objects."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, CONTAINERS):
        values = [[*each, *each.values()] if isinstance(each, dict) else each for each in (a, b)]
        return len(a) == len(b) and all(map(is_same if type(a) is list else is_, *values))
    return type(a) in NUMBERS and bool(a == b)


def _standing_in(slots: Sequence[Slot]) -> list[Any]:
    return [table.get(name, ABSENT) for table, name in slots]


@contextmanager
def standing(values: Sequence[tuple[Slot, Any]]) -> Iterator[None]:
    """Inside, the slots hold these values; afterwards they hold their previous values again."""
    slots = [slot for slot, _ in values]
    now = list(zip(slots, _standing_in(slots), strict=True))
    try:
        _put(values)
        yield
    finally:
        _put(now)


def tables_of_hooks(modules: Iterable[nn.Module]) -> list[HookTable]:
    """The tables of hooks of `modules`, which a module never replaces."""
    return [table for module in modules for table in (*module_hooks(module), *hook_flags(module))]


@contextmanager
def hooks_as_before(hooked: Sequence[tuple[HookTable, dict[int, Any]]]) -> Iterator[None]:
    """Inside, the same hooks run as in the first run: they may change outputs, and a module whose child has hooks saves
    other tensors. So a hook that was removed since runs once more, and one that was added since does not.
    """
    changed = [(table, had, dict(table)) for table, had in hooked if had != table]
    try:
        for table, had, _ in changed:
            table.clear()
            table.update(had)
        yield
    finally:
        for table, _, now in changed:
            table.clear()
            table.update(now)


def _put(values: Sequence[tuple[Slot, Any]]) -> None:
    for (table, name), value in values:
        if value is ABSENT:
            table.pop(name, None)
        else:
            table[name] = value


def _has_memory(tensor: Tensor) -> bool:
    """Whether `tensor` is plain and has memory: sharding frees the memory of weights after a forward."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and bool(tensor.untyped_storage().nbytes())


@contextmanager
def attending_with(kernels: list[SDPBackend] | None) -> Iterator[None]:
    """Inside, ``F.scaled_dot_product_attention`` may run these kernels (`kernels_of_attention`); None: any kernels."""
    changed = None if kernels == kernels_of_attention(with_priority=True) else kernels
    with nullcontext() if changed is None else sdpa_kernel(changed, set_priority=True):
        yield


def random_states(x: Tensor) -> tuple[Tensor, ...]:
    """States of the generators that a module with input `x` may use. memopt's seeds come from the CPU's generator."""
    with no_dispatch():  # the real states, under fake tensors too
        cpu = torch.get_rng_state()
        return (cpu, torch.cuda.get_rng_state(x.device)) if is_on_gpu(x) else (cpu,)


def have_moved(states: tuple[Tensor, ...], x: Tensor) -> bool:
    """Whether a random number was drawn since the generators were in `states`."""
    with no_dispatch():
        return not all(map(torch.equal, states, random_states(x)))


@contextmanager
def drawing_from(states: tuple[Tensor, ...], x: Tensor) -> Iterator[None]:
    """Inside, generators start from `states` of the forward; afterwards they have their previous states again."""
    if not states:
        yield
        return
    before = random_states(x)
    try:
        _set_random_states(states, x)
        yield
    finally:
        _set_random_states(before, x)


def _set_random_states(states: tuple[Tensor, ...], x: Tensor) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], x.device)


def is_on_gpu(x: Tensor) -> bool:
    """Whether `x` is a CUDA tensor and CUDA is available."""
    return x.is_cuda and torch.cuda.is_available()  # a fake CUDA tensor exists without a device


@dataclass(frozen=True, eq=False)
class Around:
    """The conditions of one forward of a module, except its random numbers."""

    module: nn.Module
    held: Held
    """What :func:`slots_of` lists, at the forward; `torch.func.functional_call` may exchange weights during it."""
    autocast: torch.dtype | None
    modes: tuple[type[RepeatedMode], ...]
    hooked: tuple[tuple[HookTable, dict[int, Any]], ...]
    """The hooks of the modules inside; callers take care of the module's own."""

    @classmethod
    def of(cls, module: nn.Module, x: Tensor) -> Around:
        """The conditions of a forward of `module` with input `x` that is about to run."""
        inside = tables_of_hooks([*module.modules()][1:] if module._modules else ())
        hooked = tuple((table, dict(table)) for table in inside)
        return cls(module, Held(slots_of(module), copies=True), autocast_dtype(x), active_modes(), hooked)

    @contextmanager
    def again(self, x: Tensor, random: tuple[Tensor, ...], why: str) -> Iterator[None]:
        """Inside, the conditions of that forward hold.

        Args:
            x: a tensor on the forward's device.
            random: states of the generators before the forward; empty if it drew no random number.
            why: as in :meth:`Held.lent`, which raises the errors.
        """
        lent = self.held.lent(self.module, why)
        with (
            autocast_as(self.autocast, x),
            drawing_from(random, x),
            standing(lent),
            inside(self.modes),
            hooks_as_before(self.hooked),
        ):
            yield
