"""The attributes that a module's forward reads, found by running a copy, and a check whether they have changed.

A patched forward was compared with the stock forward once, when the module was patched. If an attribute, a method or a
tensor that the stock forward reads has changed since, the module runs its stock forward.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from memopt.torch_compat import no_forward_hooks

_TABLES = ("_parameters", "_buffers", "_modules")
#: Ignored attributes: those of every nn.Module, memopt's, and marks that transformers and accelerate set on modules.
_INTERNAL = frozenset(vars(nn.Module())) | {"_memopt", "_memopt_reads", "_is_hf_initialized", "_old_forward"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, nn.Module)
#: The most values inside one list or object that are compared at each call.
_MOST_LEAVES = 64


class Missing:
    """Stands for the value of a missing attribute. The class itself is used: it survives copies and pickles."""


class Reads:
    """The values that the forward of one module read. It holds no reference to the module, which refers to it."""

    def __init__(self, values: Iterable[tuple[Any, ...]] = (), tensors: Iterable[list[Any]] = ()) -> None:
        """`values` are (owner, None for the module; its table or None; name; value; leaves of a value that may be
        changed in place, else None). Owners may also be child modules, settings and classes. `tensors` are [owner,
        name, copy of the value, `requires_grad`, tensor last seen with that value, its stamp]."""
        self.values = [each if each[3:] else (*each, vars(each[0]).get(each[2], Missing), None) for each in values]
        self.tensors = list(tensors)

    def hold(self, module: nn.Module) -> bool:
        """Whether `module` still has these values. Only tensors that were replaced or written to are compared."""
        own = module.__dict__
        for owner, table, name, value, leaves in self.values:
            held = own if owner is None else owner.__dict__
            now = (held if table is None else held[table]).get(name, Missing)
            if leaves is not None:
                found = _leaves(now)
                if len(found) != len(leaves) or not all(map(_is_same, found, leaves)):
                    return False
            elif now is not value and not _is_same(now, value):
                return False
        return not self.tensors or all(_has_value(module, seen) for seen in self.tensors)

    def __reduce__(self) -> tuple[Any, ...]:
        # Methods may have no importable name, so unpickling looks the values of classes up again.
        return Reads, ([each[:3] if isinstance(each[0], type) else each for each in self.values], self.tensors)

    def add(self, key: Any, owner: Any, name: str, watched: Collection[int]) -> None:
        """Note the value of `name` in `owner`; the entry's owner is `key`. No leaves are noted of `watched` ids."""
        own = vars(owner)
        name = getattr(owner, "attribute_map", {}).get(name, name)  # aliases of settings in a transformers config
        table = next((table for table in _TABLES if name in own.get(table, ())), None)
        value = (own if table is None else own[table]).get(name, Missing)
        cls = getattr(type(owner), "_memopt_original_class", type(owner))
        if value is Missing:
            above = [each for each in cls.__mro__ if each not in (nn.Module, object)]
            origin = next((each for each in cls.__mro__ if name in vars(each)), None)
            if origin in (nn.Module, object):
                return  # PyTorch's own machinery
            last = above.index(origin) if origin is not None else len(above)
            self.values += [(each, None, name, vars(each).get(name, Missing), None) for each in above[: last + 1]]
        if not isinstance(value, Tensor):
            stays = isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value)
            known = stays or isinstance(value, (*_PLAIN, *_CODE)) or id(value) in watched
            self.values.append((key, table, name, value, None if known else _leaves(value)))
        elif not value.is_meta:
            self.tensors.append([key, name, value.detach().clone(), value.requires_grad, value, _stamp(value)])


def observed_reads(
    module: nn.Module,
    call: Callable[[Any], object] | None,
    *,
    fresh: Collection[str] = (),
    children: Mapping[str, nn.Module] | None = None,
    alike: Hashable = None,
) -> Reads:
    """The values that ``call(copy of module)`` reads in train and in eval mode, and the module's numbers and functions.

    Args:
        call: runs the forward. If it is None or raises, all attributes of the module and of its children count as read.
        fresh: names of attributes that the patched forward itself looks up at every call; they are left out.
        children: modules that replace the copy's children of these names; the names are left out too.
        alike: calls with an equal value run the forward alike, so that of modules of one form on meta, one is run.
    """
    reads, fresh = Reads(), {"forward", *fresh, *(children or ())}
    seen: list[tuple[Any, Any]] = []
    form = None if alike is None else (alike, _form(module))
    try:
        if call is None:
            raise TypeError("no input is known")
        if form not in _names:
            alone = _watched(module, seen)
            alone._modules.update(children or {})
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                for mode in (True, False):
                    call(alone.train(mode))
        read = [(live, name) for copied, live in seen for name in _watches[id(copied)][1]]
        if form is not None and form[1] is not None:
            read = [(module, name) for name in _names.setdefault(form, [name for _, name in read])]
        # An input of another length or rank may take another branch, which reads other plain attributes.
        read += [(module, name) for name, value in vars(module).items() if isinstance(value, (*_PLAIN, *_CODE))]
    except Exception:  # a forward may raise anything
        called = [child for name, child in module.named_children() if name not in fresh]
        inside = [module, *(each for child in called for each in child.modules())]
        read = [(each, name) for each in inside for name in (*vars(each), *each._modules)]
    finally:
        for copied, _ in seen:
            del _watches[id(copied)]
    watched = {id(live) for _, live in seen}
    for owner, name in {(id(owner), name): (owner, name) for owner, name in read}.values():
        if not _is_internal(name) and not (owner is module and name in fresh):
            reads.add(None if owner is module else owner, owner, name, watched)
    return reads


#: (`alike`, form of a module) -> the names that its forward reads.
_names: dict[Hashable, list[str]] = {}


def _form(module: nn.Module) -> Hashable:
    """All that the forward of `module` can read on it; None if that is more than plain values and meta tensors."""
    own = [(name, type(value), value) for name, value in vars(module).items() if name not in _INTERNAL]
    tensors = [(name, each) for table in _TABLES[:2] for name, each in vars(module)[table].items() if each is not None]
    if module._modules or not all(isinstance(value, _PLAIN) for _, _, value in own):
        return None
    if not all(each.is_meta for _, each in tensors):
        return None
    return (
        type(module),
        *own,
        *((name, type(each), each.shape, each.dtype, each.requires_grad) for name, each in tensors),
    )


def _is_internal(name: str) -> bool:
    return name in _INTERNAL or name.startswith("__")


def _is_same(now: Any, value: Any) -> bool:
    return now is value or (type(now) is type(value) and isinstance(now, _PLAIN) and now == value)


def _leaves(value: Any) -> list[Any]:
    """The first values inside `value`, and the types of their containers. They differ after a change in place."""
    leaves: list[Any] = []
    left = deque([value])
    while left and len(leaves) < _MOST_LEAVES:
        each = left.popleft()
        is_leaf = isinstance(each, (*_PLAIN, *_CODE))
        is_container = isinstance(each, (list, tuple, dict, set, frozenset, deque))
        leaves.append(type(each) if is_container else each)
        left.extend(() if is_leaf else _inside(each))
    return leaves


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [*value]
    if isinstance(value, Tensor):
        return [0 if value.is_inference() else value._version]
    if hasattr(value, "tobytes"):  # an array
        return [value.tobytes()]
    slots = chain.from_iterable(getattr(cls, "__slots__", ()) for cls in type(value).__mro__)
    own = [getattr(value, name, Missing) for name in slots if not name.startswith("__")]
    return [*getattr(value, "__dict__", {}).values(), *own]


def _has_value(module: nn.Module, seen: list[Any]) -> bool:
    """Whether a tensor still has its value; values are compared only if it was replaced or written to."""
    owner, name, value, is_trained, last, stamp = seen
    now = getattr(module if owner is None else owner, name, None)
    if not isinstance(now, Tensor) or now.requires_grad is not is_trained:
        return False
    new = _stamp(now)
    if new is not None and not (now is last and new == stamp):
        if value.shape != now.shape or not torch.equal(value.to(now), now):
            return False
        seen[4:] = now, new
    return True


def _stamp(tensor: Tensor) -> tuple[int, int] | None:
    """(version, address), which change if the memory is written to or exchanged; None for other classes and meta."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
    return (tensor._version, tensor.data_ptr()) if is_plain else None


#: id of a copy -> (all (copy, original) made with it; names read from it -> the copied setting returned, else None).
_watches: dict[int, tuple[list[tuple[Any, Any]], dict[str, Any]]] = {}


def _watched(value: Any, seen: list[tuple[Any, Any]]) -> Any:
    """A shallow copy of `value`, and of the modules inside it, that notes the names of attributes read from it."""
    watched = copy.copy(value)
    if watched is value:
        raise TypeError("it has no copies")
    cls: Any = getattr(type(value), "_memopt_original_class", type(value))
    object.__setattr__(watched, "__class__", _watching(cls))
    if isinstance(value, nn.Module):
        own = vars(watched)
        own |= {table: dict(own[table]) for table in _TABLES} | no_forward_hooks()
        own["_modules"] = {name: child and _watched(child, seen) for name, child in own["_modules"].items()}
    seen.append((watched, value))
    _watches[id(watched)] = seen, {}
    return watched


@functools.cache
def _watching(cls: Any) -> type:
    """A subclass of `cls` whose instances note the names of attributes read from them."""

    def __getattribute__(self: Any, name: str) -> Any:
        if id(self) in _watches and name in _TABLES:  # nn.Sequential and other containers read the whole table
            _watches[id(self)][1].update(dict.fromkeys(vars(self).get(name, ())))
        if _is_internal(name) or id(self) not in _watches:
            return cls.__getattribute__(self, name)
        seen, names = _watches[id(self)]
        if names.setdefault(name) is None:
            value = cls.__getattribute__(self, name)
            if isinstance(value, (*_CODE, Tensor)) or not hasattr(value, "__dict__"):
                return value
            names[name] = value
            with contextlib.suppress(Exception):  # an object of settings: attributes read from it count as well
                names[name] = _watched(value, seen)
        return names[name]

    return types.new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(__getattribute__=__getattribute__))
