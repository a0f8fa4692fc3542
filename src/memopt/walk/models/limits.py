"""Limits on the size of a model that is built: a config of a few bytes can describe a billion layers."""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
from torch import nn
from torch.nn.modules import module as registration

from memopt.errors import ModelError

#: Most modules and parameters. A model that has modules for each of 256 experts in each of 58 layers has 90,000.
MAX_PARTS = 100_000
#: Most elements of all parameters, and greatest length of one dimension; the largest known model has 2e12 and 1e7.
MAX_ELEMENTS, _MAX_LENGTH = 10**15, 10**8
#: Fields that count layers, blocks, experts or pixels. Lists of such a length may be made before any module is.
_COUNT = re.compile(r"(.*_)?(layers?|blocks?|depths?|experts|stages|repeats|(image|img|crop)_size)")
_MAX_COUNT = 20_000
_LAYERS = frozenset({"num_hidden_layers", "n_layer", "n_layers"})
#: CPU seconds after which a build that was stopped and goes on is stopped again.
_STOPPED_AFTER = 1.0
#: Most CPU seconds and bytes of one build; the most that real models take is a second and some megabytes.
_MAX_SECONDS, _MAX_BYTES = 12.0, 768 << 20


class _Stopped(BaseException):
    """Raised in a thread that takes too much time or memory; no handler of `Exception` swallows it."""


def check_counts(settings: Mapping[str, Any]) -> None:
    """Raise a ModelError if a config.json, nested configs included, has more or fewer layers, blocks, experts or pixels
    than any model."""
    queue: list[Any] = [settings]
    while queue:
        value = queue.pop()
        if isinstance(value, list):
            queue += [item for item in value if isinstance(item, dict | list)]
        elif isinstance(value, dict):
            for name, item in value.items():
                numbers = item if isinstance(item, list) else [item]
                if _COUNT.fullmatch(name) and any(type(n) in (int, float) and n > _MAX_COUNT for n in numbers):
                    raise ModelError(
                        f"Its {name!a} is above {_MAX_COUNT:,}, more than any model has.", "Correct config.json."
                    )
                if name in _LAYERS and type(item) is int and item < 1:
                    raise ModelError(f"Its {name!a} is {item}, and a model has a layer.", "Correct config.json.")
                queue.append(item)


@contextlib.contextmanager
def bounded_build(parts: int = MAX_PARTS, elements: int = MAX_ELEMENTS) -> Iterator[None]:
    """Inside it, a model built in this thread has at most `parts` modules and parameters and `elements` elements; its
    constructor raises a ModelError at more. Some constructors fill a vector in memory, whatever the device; it is as
    long as a part registered before it."""
    thread = threading.get_ident()
    left, room = parts, elements

    def count(owner: nn.Module, name: str, part: Any) -> None:
        nonlocal left, room
        if part is None or threading.get_ident() != thread:
            return
        left -= 1
        if left < 0:
            raise ModelError(
                f"The model has over {parts:,} modules and parameters.", "Check the counts in config.json."
            )
        if not isinstance(part, nn.Module):
            room -= part.numel()
            if room < 0 or max(part.shape, default=0) > _MAX_LENGTH:
                shape = " x ".join(map(str, part.shape))
                raise ModelError(f"The model has a parameter of {shape}.", "Check the sizes in config.json.")

    with (
        registration.register_module_module_registration_hook(count),
        registration.register_module_parameter_registration_hook(count),
    ):
        yield


@contextlib.contextmanager
def watched_build() -> Iterator[None]:
    """Inside it, this thread takes at most some seconds of CPU time, and the process some more memory; else a
    ModelError. A config can send a constructor into a loop over every pixel of an image. A second thread stops Python
    code; it cannot stop a single call into C."""
    thread = threading.get_ident()
    clock, process = time.pthread_getcpuclockid(thread), psutil.Process()
    end, most = time.clock_gettime(clock) + _MAX_SECONDS, process.memory_info().rss + _MAX_BYTES
    over = threading.Event()
    why: list[str] = []

    def watch() -> None:
        again = end
        while not over.wait(0.1):
            now = time.clock_gettime(clock)
            if not why and now > end:
                why.append(f"{_MAX_SECONDS:.0f} seconds")
            elif not why and process.memory_info().rss > most:
                why.append(f"{_MAX_BYTES >> 20} MiB")
                again = now
            if why and now >= again:
                # Python ignores an exception in a finalizer, so a thread that goes on is stopped again.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Stopped))
                again = now + _STOPPED_AFTER

    watcher = threading.Thread(target=watch, name="memopt-watch", daemon=True)
    watcher.start()
    try:
        try:
            yield
        except _Stopped:
            pass
        finally:
            over.set()
            watcher.join()
            for _ in range(10_000 if why else 0):
                pass  # the exception is raised where a loop jumps back
    except _Stopped:
        pass
    if why:
        raise ModelError(
            f"Building its model takes more than {why[0]}, before any weight is read.",
            "Check the sizes in config.json.",
        )
