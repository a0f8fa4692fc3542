"""Compiles the emulated device once for the torch that is installed, and loads it.

The library lies in build/device under a name made of the hash of its source, the version of torch and the compiler.
This module must not import torch: the library has to be loaded before torch is.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("emulator.cpp")
FOLDER = Path(os.environ.get("MEMOPT_DEVICE_CACHE", Path(__file__).parents[3] / "build" / "device"))


class CannotBuild(Exception):
    """The reason why there is no emulated device here, as a sentence."""


def load() -> ctypes.CDLL:
    """The library, compiled if it is not there yet (about 20 seconds).

    Raises:
        CannotBuild: torch is imported already, is not a CPU build, the compiler is missing or fails, or what it made is
            damaged.
    """
    if "torch" in sys.modules:
        raise CannotBuild("torch is imported already; the emulated device has to be loaded before it")
    path = build()
    try:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise CannotBuild(f"{path} cannot be loaded ({error}); remove it, and it is compiled again") from error
    for name in ("live", "peak"):
        getattr(library, f"emulated_{name}_bytes").restype = ctypes.c_size_t
    return library


def build() -> Path:
    """Where the library lies."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise CannotBuild("torch is not installed")
    torch = Path(found.origin).parent
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise CannotBuild("the torch that is installed has CUDA of its own; the emulated device needs a CPU build")
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        raise CannotBuild("no C++ compiler: install g++, or name one in CXX")
    key = (SOURCE.read_bytes(), importlib.metadata.version("torch").encode(), _version(compiler))
    out = FOLDER / f"{hashlib.sha256(b'|'.join(key)).hexdigest()[:16]}.so"
    if not out.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        unfinished = out.with_name(f"{out.stem}.{os.getpid()}.so")
        command = [
            compiler, "-std=c++20", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(unfinished),
            f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include",
            f"-L{torch}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}/lib",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise CannotBuild("\n".join([f"{compiler} could not compile {SOURCE.name}:", *errors[:20]]))
        unfinished.replace(out)
    return out


def _version(compiler: str) -> bytes:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotBuild(f"the C++ compiler {compiler} does not run: {error}") from error
