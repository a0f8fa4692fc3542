"""Compiled kernels on disk, so that only a kernel whose binary can have changed is compiled again.

Triton's own cache also counts the line on which a kernel starts. Here an edit above a kernel keeps its binary, and a
folder holds nothing but what :mod:`tools.kernels.aot` reads, compressed. `tests/aot/conftest.py` installs it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITCallable

from tools.kernels import aot
from tools.kernels.aot import Compiled

#: Environment variable that names the folder; without it every process compiles for itself.
FOLDER = "MEMOPT_AOT_CACHE"
#: Part of every key: counted up when what an entry holds changes.
FORMAT = 1
#: Globals of these types can be read by a kernel.
_CONSTANTS = (int, float, str, tl.dtype, tl.constexpr)


compile_now = aot.compile_kernel


def compile_cached(source: Any, target: GPUTarget, options: dict[str, Any]) -> Compiled:
    """What `aot.compile_kernel` returns, from the folder where it is there."""
    return cached(binary_key(source, target, options), lambda: compile_now(source, target, options))


def cached(key: str, compile_kernel: Callable[[], Compiled]) -> Compiled:
    """The entry `key` of the folder, or what `compile_kernel` returns, which then becomes that entry.

    An entry that is damaged is compiled and written again. Processes may share the folder: an entry appears at once.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return compile_kernel()
    path = Path(folder) / key[:2] / key
    found = _read(path)
    if found is None:
        found = compile_kernel()
        _write(path, found)
    return found


def _read(path: Path) -> Compiled | None:
    try:
        return Compiled(**json.loads(zlib.decompress(path.read_bytes())))
    except (OSError, ValueError, TypeError, zlib.error):
        return None


def _write(path: Path, compiled: Compiled) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(zlib.compress(json.dumps(vars(compiled)).encode(), level=1))
    os.replace(file.name, path)


def binary_key(source: Any, target: GPUTarget, options: Mapping[str, Any]) -> str:
    """A hash of everything that a binary depends on.

    That is: the source of the kernel and of every function and constant it reaches, its arguments' types, constants and
    alignments (`source`, Triton's ``ASTSource``), the compiler's `options`, `target`, and the version of Triton and of
    the assembler that it calls.
    """
    constants = [(place, _value_key(value)) for place, value in sorted(source.constants.items())]
    parts = (
        FORMAT,
        triton.__version__,
        make_backend(target).hash(),
        target,
        sorted(options.items()),
        sorted(source.signature.items()),
        sorted(source.attrs.items()),
        constants,
        source_key(source.fn),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def source_key(kernel: JITCallable) -> str:
    """A hash of the source of `kernel`, of every function it calls, and of every constant that these read.

    Triton's own functions are left out, since its version is part of :func:`binary_key`.
    """
    digest = hashlib.sha256()
    for name, text in sorted(_reached(kernel)):
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()


def _reached(kernel: JITCallable) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    seen: set[int] = set()
    waiting = [kernel]
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        found.add((function.fn.__qualname__, function.src))
        for name, value in _globals_of(function):
            if isinstance(value, _CONSTANTS):
                found.add((f"{function.fn.__qualname__}: {name}", repr(value)))
            elif isinstance(value, JITCallable) and not value.fn.__module__.startswith("triton."):
                waiting.append(value)
    return found


def _globals_of(function: JITCallable) -> Iterator[tuple[str, Any]]:
    """Name and value of every function and constant outside `function` that it can read, in modules too."""
    code = function.fn.__code__
    names = _names_of(code)
    cells = zip(code.co_freevars, function.fn.__closure__ or (), strict=True)
    free = [(name, cell.cell_contents) for name, cell in cells]
    for name, value in [
        *_members(function.fn.__globals__, names),
        *((name, cell.cell_contents) for name, cell in free),
    ]:
        if not isinstance(value, ModuleType):
            yield name, value
        elif not value.__name__.startswith("triton"):
            for member, inner in _members(vars(value), names):
                if not isinstance(inner, ModuleType):
                    yield f"{name}.{member}", inner


def _names_of(code: CodeType) -> set[str]:
    inner = (_names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*inner)


def _members(namespace: Mapping[str, Any], names: set[str]) -> list[tuple[str, Any]]:
    return [(name, namespace[name]) for name in sorted(names & namespace.keys())]


def _value_key(value: Any) -> str:
    if isinstance(value, JITCallable):
        return source_key(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_value_key, value))})"
    return f"{type(value).__name__}:{value}"
