"""Give one module instance another forward, and undo it.

The instance's ``__class__`` becomes a subclass of its own class with another `forward`. Parameters, buffers, hooks,
training flag, device, `isinstance`, class name, deepcopy and state dict keys stay as they are. Other instances of the
class, and other models, are not changed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling

from memopt.environment.partitioned import is_parallel_forward
from memopt.patches.compiled import is_being_compiled
from memopt.patches.reads import Reads
from memopt.saved.observer import is_observed
from memopt.torch_compat import (
    compiled_module,
    forward_mode_level,
    has_any_global_hook,
    interpreter_stack,
    module_hooks,
    proxy_mode,
    replicating,
    tracing_state,
)

_ORIGINAL = "_memopt_original_class"
_STATE = "_memopt"
_READS = "_memopt_reads"
_KNOWN = "_memopt_known_forward"
_WRAPS = "_memopt_wraps_any_forward"
_ATTRIBUTES = "_memopt_attributes"
_FORWARD = "_memopt_forward"
_NOTHING = object()
_LINEAR = nn.Linear.forward

S = TypeVar("S")
#: forward(original_forward, state, module, *args, **kwargs)
Forward = Callable[..., Any]

_classes: dict[tuple[type[nn.Module], Forward, Callable[..., Any]], type[nn.Module]] = {}


def swap_forward(module: nn.Module, forward: Forward, state: object, reads: Reads | None = None) -> None:
    """Make `module` run ``forward(stock_forward, state, module, ...)``; `state` is small plain data kept on `module`.
    If one of the values in `reads`, which the stock forward reads, has changed, the module runs its stock forward.

    If the forward of the module's class is replaced later, the module runs the new one, because `forward` was proved
    against the old one only. A `forward` marked with :func:`wraps_any_forward` runs anyway, around the new one. Raises
    a ValueError if the module is already swapped, or its forward was replaced on the instance."""
    if hasattr(type(module), _ORIGINAL):
        raise ValueError("it is already patched, or a tool has made its own class from a patched one")
    if "forward" in vars(module):
        by = replaced_by(module) or "a wrapper"
        raise ValueError(f"its forward was replaced on the instance by {by}; patch the model before that tool wraps it")
    try:
        swapped = _subclass(type(module), forward)
        module.__class__ = swapped
    except TypeError as error:
        raise ValueError(f"its class cannot get another forward: {error}") from None
    module.__dict__[_STATE] = state
    if reads is not None:
        module.__dict__[_READS] = reads


def wraps_any_forward(forward: Forward) -> Forward:
    """Mark a forward that calls the stock forward and does not depend on its code."""
    setattr(forward, _WRAPS, True)
    return forward


def with_attributes(**attributes: object) -> Callable[[Forward], Forward]:
    """Mark a forward: classes of modules with this forward also get these attributes (properties, for example)."""

    def mark(forward: Forward) -> Forward:
        setattr(forward, _ATTRIBUTES, attributes)
        return forward

    return mark


def restore_forward(module: nn.Module) -> None:
    """Undo :func:`swap_forward`. If a tool has since replaced the class by a subclass of its own, that class stays."""
    if _ORIGINAL in vars(type(module)):
        module.__class__ = original_class(module)
    del module.__dict__[_STATE]
    module.__dict__.pop(_READS, None)


@contextlib.contextmanager
def stock_forwards(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, the swapped modules among `modules` run the forward of their original class."""
    swapped = [(module, type(module)) for module in modules if is_swapped(module)]
    for module, _ in swapped:
        module.__class__ = original_class(module)
    try:
        yield
    finally:
        for module, cls in swapped:
            module.__class__ = cls


class Rewrite:
    """Base class of states of swapped modules for which more than the forward has to be undone."""

    def undo(self, module: nn.Module) -> None:
        """Called when `module` has its stock forward again."""


class Notes:
    """Base class of what a state notes about the calls of its module. A copy of the module starts with none."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


def _anew(state: Any) -> Any:
    """`state` with notes of its own."""
    if isinstance(state, Notes):
        return type(state)()
    if not is_dataclass(state) or isinstance(state, type):
        return state
    parts = {field.name: (part := getattr(state, field.name), _anew(part)) for field in fields(state) if field.init}
    return replace(state, **{name: new for name, (part, new) in parts.items() if new is not part})


def _settle(module: nn.Module, replica: nn.Module) -> None:
    """Prepare a replica for its call: others run at the same time, and its children and tensors are copies."""
    own = vars(replica)
    if _STATE in own:
        own[_STATE] = _anew(own[_STATE])
    if own.get(_READS) is not None and own[_READS].hold(module):
        del own[_READS]


@dataclass(frozen=True)
class Layer:
    """Arguments of :func:`swap_forward` for a module; `forward` is called as ``forward(stock, state, module, ...)``."""

    forward: Forward
    state: object
    reads: Reads | None


def layer_of(module: nn.Module) -> Layer | None:
    """The layer of a swapped module; None for a module that is not swapped."""
    if not is_swapped(module):
        return None
    return Layer(getattr(type(module), _FORWARD), swap_state(module), vars(module).get(_READS))


def unswap(module: nn.Module) -> None:
    """Undo the rewrite of a swapped module: its forward, and what :meth:`Rewrite.undo` of its state undoes."""
    state = swap_state(module)
    restore_forward(module)
    if isinstance(state, Rewrite):
        state.undo(module)


def steps_aside(*, off: str = "", without_gradients: bool = True) -> bool:
    """Whether patched modules should run their stock forward: gradients are off (unless `without_gradients` is False),
    or a compiler or transform is active.

    Under a compiler, its partitioner chooses the saved tensors; `off` is as in
    `memopt.patches.compiled.is_being_compiled`. Function transforms (`torch.func`), forward-mode derivatives and traces
    need stock operations.
    """
    return (
        (without_gradients and not is_grad_enabled())
        or (is_compiling() and is_being_compiled(off))
        or interpreter_stack() is not None
        or forward_mode_level() >= 0
        or tracing_state() is not None
        or proxy_mode() is not None
    )


def is_swapped(module: nn.Module) -> bool:
    return _STATE in vars(module) and hasattr(type(module), _ORIGINAL)


def is_as_patched(module: nn.Module) -> bool:
    """Whether the forward of a swapped module's original class, and the values that it reads, are unchanged."""
    reads = module.__dict__.get(_READS)
    is_known: bool = getattr(type(module), _KNOWN) is original_class(module).forward
    return is_known and (reads is None or reads.hold(module))


def is_watched(module: nn.Module) -> bool:
    """Whether `module` has to be called: it (or every module) has hooks, a replaced forward, or is parametrised."""
    if any(module_hooks(module)) or (has_any_global_hook() and not is_observed()):
        return True
    return "forward" in module.__dict__ or "parametrizations" in module._modules or nn.Linear.forward is not _LINEAR


def parameters_of(module: nn.Module) -> Mapping[str, Tensor | None]:
    """The parameters of `module`, with a weight and bias that stand in for parameters as plain attributes: of a replica
    of `nn.DataParallel`, or of FSDP1's modules in a forward that checkpointing repeats. Not a weight that a hook
    computes before each forward."""
    if "weight" in module._parameters:
        return module._parameters
    own = vars(module)
    aside = {} if any(module_hooks(module)[1]) else {name: own.get(name) for name in ("weight", "bias")}
    return {**module._parameters, **{name: each for name, each in aside.items() if type(each) is Tensor}}


def replaced_by(module: nn.Module) -> str | None:
    """Name of the Python module that defines the function which replaces the forward of `module` on the instance.

    None if no function replaces it, or if a wrapper passes all arguments on to the class's forward, as accelerate's
    hooks do. A wrapper with named arguments counts as a replacement: TRL's computes the loss itself if it is asked to,
    and calls the stock forward otherwise.
    """
    if compiled_module(module) is not None:
        return None  # it compiles the forward of the module inside
    own, owner, outermost = _layers(type(module).forward), None, None
    for layer in _layers(vars(module).get("forward")):
        if layer in own:
            return owner
        name = getattr(layer, "__globals__", {}).get("__name__", type(layer).__module__)
        outermost, owner = outermost or name, owner or (name if _names_arguments(layer) else None)
    return owner or outermost


def _layers(forward: Any) -> list[Any]:
    """`forward` without method or partial, followed by the functions that it wraps, the outermost first."""
    layers = []
    while forward is not None:
        layers.append(getattr(forward, "__func__", getattr(forward, "func", forward)))  # of a method, of a partial
        forward = getattr(forward, "__wrapped__", None)
    return layers


def shadowed(model: nn.Module) -> dict[str, list[str]]:
    """:func:`replaced_by` -> names of the swapped modules of `model` whose forward it replaces. Forwards of
    transformers' parallel plans are left out: they call the forward that the module had before, memopt's."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if not is_swapped(module) or is_parallel_forward(vars(module).get("forward")):
            continue
        if (owner := replaced_by(module)) is not None:
            found.setdefault(owner, []).append(name)
    return found


def _names_arguments(function: Callable[..., Any]) -> bool:
    """Whether a wrapper of a forward has named arguments after its first one, the module."""
    try:
        _, *more = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # without a signature, or without an argument
        return False
    return any(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in more)


def swap_state(module: nn.Module) -> object:
    """The state that was passed to :func:`swap_forward`."""
    return vars(module)[_STATE]


def state_of(module: nn.Module, kind: type[S]) -> S | None:
    """:func:`swap_state` of a swapped module if it is of this kind; None for any other module."""
    state = swap_state(module) if is_swapped(module) else None
    return state if isinstance(state, kind) else None


def states_in(model: nn.Module, kind: type[S]) -> Iterator[tuple[str, nn.Module, S]]:
    """(name, module, state) of each module inside `model` with a state of this kind."""
    for name, module in model.named_modules():
        if (state := state_of(module, kind)) is not None:
            yield name, module, state


def original_class(module: nn.Module) -> type[nn.Module]:
    """The module's class before the swap; its present class if it is not swapped."""
    cls: type[nn.Module] = getattr(type(module), _ORIGINAL, type(module))
    return cls


def _subclass(cls: type[nn.Module], forward: Forward) -> type[nn.Module]:
    known = cls.forward
    key = (cls, forward, known)
    if key not in _classes:
        wraps_any = getattr(forward, _WRAPS, False)

        @functools.wraps(cls.forward)
        def patched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Looked up at every call, because a tool may replace the forward of the class later.
            stock = cls.forward
            state = self.__dict__.get(_STATE, _NOTHING)
            if state is _NOTHING or not (stock is known or wraps_any):
                return stock(self, *args, **kwargs)
            if not wraps_any:  # no operator and no proof is for tensors with rows of different lengths
                for given in (args, kwargs.values()):
                    for value in given:
                        if isinstance(value, Tensor) and value.is_nested:
                            return stock(self, *args, **kwargs)
            reads = self.__dict__.get(_READS)
            if reads is not None and not is_compiling() and not reads.hold(self):
                return stock(self, *args, **kwargs)
            return forward(stock, state, self, *args, **kwargs)

        def reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
            # The class has no importable name, so a pickle names the function that builds it.
            own: Any = getattr(cls, "__getstate__", None)
            plain = own is None or own is getattr(object, "__getstate__", None)
            return _rebuild, (cls, forward), dict(vars(self)) if plain else own(self)

        # The class keeps the stock name, because wrapping policies, device maps and printed models use it.
        body = {
            "forward": patched,
            "__reduce_ex__": reduce,
            _ORIGINAL: cls,
            _KNOWN: known,
            _FORWARD: staticmethod(forward),
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            **replicating(cls, _settle),
            **getattr(forward, _ATTRIBUTES, {}),
        }
        _classes[key] = types.new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(body))
    return _classes[key]


def _rebuild(cls: type[nn.Module], forward: Forward) -> nn.Module:
    """An empty instance of the swapped class; the unpickler (or deepcopy) sets its state."""
    swapped = _subclass(cls, forward)
    module: nn.Module = swapped.__new__(swapped)
    return module
