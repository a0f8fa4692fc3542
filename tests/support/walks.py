"""Walks of one model are done once in a run: what the first test found is read by every other, in every worker.

Only outside tests/walk and tests/zoo, whose subject is the walk. A model is told by all that a walk can read: classes
and the code of their forwards, attributes, config, shapes, dtypes, ties and training flags. A model whose hooks, own
methods or classes cannot be compared, such as those that a test defines, is walked each time.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

#: Packages whose classes are the same in every test.
_FIXED = ("torch.", "transformers.", "peft.")
#: Attributes of a module that are looked at on their own, or hold nothing that a walk reads.
_CONTAINERS = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"}
#: Where a model came from, and what memopt wrote into its config: nothing that a walk reads.
_ORIGINS = {"name_or_path", "_name_or_path", "_commit_hash", "transformers_version", "memopt", "warnings_issued"}


class Unknown(Exception):
    """What a value is cannot be told, so its walk is not remembered."""


class Walks:
    """What walks found, in a folder that the workers of a run share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.enabled = False
        self._read: dict[str, Any] = {}

    def remembered(self, walk: Callable[..., Any]) -> Callable[..., Any]:
        """`walk`, which reads what it returned for an equal first argument and equal options before."""

        @functools.wraps(walk)
        def once(*args: Any, **kwargs: Any) -> Any:
            try:
                key = fingerprint(walk.__name__, *args, kwargs) if self.enabled else None
            except Unknown:
                key = None
            if key is None:
                return walk(*args, **kwargs)
            if key not in self._read:
                self._read[key] = self._shared(key, lambda: walk(*args, **kwargs))
            return self._read[key]

        return once

    def _shared(self, key: str, walk: Callable[[], Any]) -> Any:
        path = self.folder / key
        if path.exists():
            return pickle.loads(path.read_bytes())
        found = walk()
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            pickle.dump(found, file)
        Path(file.name).replace(path)
        return found


def install(walks: Walks) -> None:
    """Let every module that has imported a walk, or will, use the remembered one."""
    observe = sys.modules.get("memopt.walk.observe")
    for name in ("walk_model", "walk_config"):
        walk = getattr(observe, name, None)
        if walk is None:
            continue
        once = walks.remembered(walk)
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith(("memopt.", "tests.")) and vars(module).get(name) is walk:
                setattr(module, name, once)


def fingerprint(*values: Any) -> str:
    """A hash that is equal for values that a walk cannot tell apart.

    Raises:
        Unknown: a value has parts that cannot be compared.
    """
    digest = hashlib.sha256(f"{torch.get_default_dtype()} {torch.is_grad_enabled()}".encode())
    seen: dict[int, int] = {}
    for value in values:
        for part in _parts(value, seen):
            digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _parts(value: Any, seen: dict[int, int]) -> Iterator[str]:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device, enum.Enum)):
        yield f"{type(value).__name__}:{value}"
    elif id(value) in seen:
        yield f"seen:{seen[id(value)]}"  # a tie, or an object that contains itself
    elif isinstance(value, (tuple, list, set, frozenset)):
        yield f"{type(value).__name__} of {len(value)}"
        for item in sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value:
            yield from _parts(item, seen)
    elif isinstance(value, Mapping):
        yield f"mapping of {len(value)}"
        for key, item in value.items():
            yield repr(key)
            yield from _parts(item, seen)
    elif isinstance(value, functools.partial):
        yield from _parts((value.func, value.args, value.keywords), seen)
    else:
        seen[id(value)] = len(seen)
        yield from _object(value, seen)


def _object(value: Any, seen: dict[int, int]) -> Iterator[str]:
    is_named = isinstance(value, (type, FunctionType, BuiltinFunctionType))
    named = value if is_named else type(value)
    if not f"{named.__module__}.".startswith(_FIXED) or "<locals>" in named.__qualname__:
        raise Unknown(f"{named.__module__}.{named.__qualname__}")
    yield f"{named.__module__}.{named.__qualname__}"
    if is_named:
        return
    if isinstance(value, nn.Module):
        yield from _module(value, seen)
    elif isinstance(value, Tensor):
        yield f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()} {value.requires_grad}"
        if value.numel() <= 4096 and value.device.type == "cpu" and not isinstance(value, nn.Parameter):
            yield repr(value.tolist())
    else:
        if not hasattr(value, "__dict__"):
            raise Unknown(repr(type(value)))
        yield from _parts({name: part for name, part in vars(value).items() if name not in _ORIGINS}, seen)


def _module(module: nn.Module, seen: dict[int, int]) -> Iterator[str]:
    forward = type(module).forward
    yield repr(forward.__code__.co_code) if isinstance(forward, FunctionType) else forward.__qualname__
    for name, value in vars(module).items():
        if name.endswith("hooks") or "_hooks_" in name:
            if value:
                raise Unknown(f"{name} of {type(module).__name__}")
        elif name not in _CONTAINERS | _ORIGINS:
            yield name
            yield from _parts(value, seen)
    for name in ("_parameters", "_buffers", "_modules"):
        yield from _parts(vars(module)[name], seen)
