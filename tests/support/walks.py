"""Walks of one model are done once: what the first test found is read by every other, in every worker and later run.

A folder of walks belongs to the sources that a walk runs and to the libraries it reads, so that a change of either
starts an empty one. A model is told by all that a walk can read: classes and the code of their forwards, attributes,
config, shapes, dtypes, ties and training flags. A model whose hooks, own methods or classes cannot be compared, such as
those that a test defines, is walked each time. Tests whose subject is the walk say so (`tests/conftest.py`).
"""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import pickle
import pkgutil
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import memopt
from memopt.walk.probes.brought import PROBES

#: Packages whose classes are the same in every test.
_FIXED = ("torch.", "transformers.", "peft.")
#: Attributes of a module that are looked at on their own, or hold nothing that a walk reads.
_CONTAINERS = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"}
#: Where a model came from, what memopt wrote into its config, a hash of other fields that differs between processes:
#: nothing that a walk reads.
_ORIGINS = {"name_or_path", "_name_or_path", "_commit_hash", "transformers_version", "memopt", "warnings_issued"} | {
    "_original_object_hash"
}


#: Rooms of src/memopt that stand above the walk, which imports none of them.
ABOVE = {
    "__main__",
    "api",
    "axolotl",
    "checkpoint",
    "cli",
    "emit",
    "integrations",
    "patches",
    "pipeline",
    "plan",
    "prediction",
    "reporting",
    "sampling",
    "trace",
} | {"verification"}
#: Libraries whose models and operations a walk observes.
_LIBRARIES = ("torch", "transformers", "peft", "numpy")
_KEPT_SECONDS = 14 * 24 * 3600


def folder_of_sources(root: Path, package: Path) -> Path:
    """The folder below `root` for walks done by the sources in `package`; folders that nobody used lately are removed.

    The sources of rooms above the walk do not count, but for the probes of patches: a walk does not run them.
    """
    digest = hashlib.sha256(" ".join([platform.python_version(), *map(_version, _LIBRARIES)]).encode())
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        if inside.parts[0].removesuffix(".py") not in ABOVE or inside.name == "probe.py":
            digest.update(f"{inside}\0".encode() + path.read_bytes() + b"\0")
    folder = root / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for other in root.iterdir():
        if time.time() - other.stat().st_mtime > _KEPT_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


class Unknown(Exception):
    """What a value is cannot be told, so its walk is not remembered."""


class Walks:
    """What walks found, in a folder that workers and runs share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.enabled = False
        self._read: dict[str, Any] = {}
        self.sources = Sources()

    def remembered(self, walk: Callable[..., Any]) -> Callable[..., Any]:
        """`walk`, which reads what it returned for an equal first argument and equal options before."""

        @functools.wraps(walk)
        def once(*args: Any, **kwargs: Any) -> Any:
            try:
                key = fingerprint(walk.__name__, *sorted(PROBES), *args, kwargs) if self.enabled else None
            except Unknown:
                key = None
            if key is None:
                return walk(*args, **kwargs)
            if key not in self._read:
                found = self._stored(key)
                if found is None:
                    found = walk(*args, **kwargs)
                    if not self.sources.are_as_written():
                        return found
                    self._store(key, found)
                self._read[key] = found
            return self._read[key]

        return once

    def _stored(self, key: str) -> Any:
        try:
            return pickle.loads((self.folder / key).read_bytes())
        except (OSError, EOFError, pickle.UnpicklingError):
            return None

    def _store(self, key: str, found: Any) -> None:
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            pickle.dump(found, file)
        Path(file.name).replace(self.folder / key)


class Sources:
    """The functions and classes of the modules that a walk may run: whether a test has replaced one of them."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, Any]] = {}
        # A module that a test imports first, with something replaced in it, would count as replaced ever after.
        for module in pkgutil.walk_packages(memopt.__path__, "memopt."):
            if _is_run(module.name):
                import_module(module.name)
        self.replaced()

    def are_as_written(self) -> bool:
        """Whether every module, and every class in one, holds what it held when it was first seen here."""
        return not self.replaced()

    def replaced(self) -> list[str]:
        """What modules, and classes in them, do not hold any more."""
        modules = [(name, module) for name, module in sys.modules.items() if _is_run(name)]
        return [f"{name}: {attribute}" for name, module in modules for attribute in self._not_as_seen(name, module)]

    def _not_as_seen(self, name: str, module: ModuleType) -> list[str]:
        owners = [module, *(value for value in vars(module).values() if getattr(value, "__module__", "") == name)]
        held = {
            f"{getattr(owner, '__qualname__', '')}.{attribute}": value
            for owner in owners
            if isinstance(owner, (type, ModuleType))
            for attribute, value in vars(owner).items()
            if callable(value) or isinstance(value, (classmethod, property, staticmethod))
        }
        before = self._seen.setdefault(name, held)
        return [attribute for attribute, value in before.items() if held.get(attribute) is not value]


def _is_run(module: str) -> bool:
    package, _, inside = module.partition(".")
    return package == "memopt" and (inside.partition(".")[0] not in ABOVE | {""} or inside.endswith(".probe"))


def install(walks: Walks) -> Callable[[], None]:
    """Let every module that has imported a walk, or will, use the remembered one; nothing where no test has a model.

    Returns:
        A function that takes it back.
    """
    if "transformers" not in sys.modules:
        return lambda: None
    observe = import_module("memopt.walk.observe")
    originals = {name: getattr(observe, name) for name in ("walk_model", "walk_config")}
    remembered = {name: walks.remembered(walk) for name, walk in originals.items()}
    _exchange(originals, remembered)
    walks.sources = Sources()  # as they are with the remembered walks in them
    return lambda: _exchange(remembered, originals)


def _exchange(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Put `new` in place of `old` in every module that has it under its name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith(("memopt.", "tests.")):
            for name, function in old.items():
                if vars(module).get(name) is function:
                    setattr(module, name, new[name])


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
        yield f"{type(value).__name__} of {len(value)}"  # code that is trusted is in a class of its own
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
