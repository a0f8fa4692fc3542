"""How large a model may be that is built: a config of a few bytes can ask for a billion layers."""

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

#: Modules and parameters of a model. One with modules of its own for each of 256 experts in 58 layers has 90,000.
MAX_PARTS = 100_000
#: Elements of all parameters, and length of one dimension; the largest known model has 2e12 and 1e7.
MAX_ELEMENTS, _MAX_LENGTH = 10**15, 10**8
#: Fields that count layers, blocks, experts or pixels. Lists as long as that are made before any module is.
_COUNT = re.compile(r"(.*_)?(layers?|blocks?|depths?|experts|stages|repeats|(image|img|crop)_size)")
_MAX_COUNT = 20_000
#: CPU seconds that a build may take to end once it is stopped.
_STOPPED_AFTER = 1.0
#: CPU time and memory of one build, which takes a second and some megabytes where it takes most.
_MAX_SECONDS, _MAX_BYTES = 12.0, 768 << 20


class _Stopped(BaseException):
    """Raised in a thread that takes too much; no handler of `Exception` swallows it."""


def check_counts(settings: Mapping[str, Any]) -> None:
    """Check the numbers of layers, blocks, experts and pixels in a config.json, nested configs included.

    Raises:
        ModelError: one is larger than that of any model.
    """
    queue: list[Any] = [settings]
    while queue:
        value = queue.pop()
        if isinstance(value, list):
            queue += [item for item in value if isinstance(item, dict | list)]
        elif isinstance(value, dict):
            for name, item in value.items():
                if _COUNT.fullmatch(name) and any(type(n) in (int, float) and n > _MAX_COUNT for n in _numbers(item)):
                    raise ModelError(
                        f"Its {name!a} is above {_MAX_COUNT:,}, more than any model has.", "Correct config.json."
                    )
                queue.append(item)


def _numbers(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@contextlib.contextmanager
def bounded_build(parts: int = MAX_PARTS, elements: int = MAX_ELEMENTS) -> Iterator[None]:
    """Inside it, a model that is built in this thread has at most so many modules and parameters, and elements.

    Some constructors fill a vector in memory, whatever the device. It is as long as what was registered before.

    Raises:
        ModelError: it has more; raised from within the constructor of the model.
    """
    thread = threading.get_ident()
    left, room = parts, elements

    def count(owner: nn.Module, name: str, part: Any) -> None:
        nonlocal left, room
        if part is None or threading.get_ident() != thread:
            return
        left -= 1
        if left < 0:
            raise ModelError(
                f"Its model has over {parts:,} modules and parameters.", "Check the counts in config.json."
            )
        if not isinstance(part, nn.Module):
            room -= part.numel()
            if room < 0 or max(part.shape, default=0) > _MAX_LENGTH:
                shape = " x ".join(map(str, part.shape))
                raise ModelError(f"Its model has a parameter of {shape}.", "Check the sizes in config.json.")

    hooks = (
        registration.register_module_module_registration_hook(count),
        registration.register_module_parameter_registration_hook(count),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def watched_build() -> Iterator[None]:
    """Inside it, this thread takes at most some seconds of CPU time, and the process some more memory.

    A config can send a constructor into a loop over every pixel of an image. What is in Python code is stopped, from
    another thread; a single call into C is not.

    Raises:
        ModelError: it took more.
    """
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
                # Python ignores what is raised in a finalizer, so a thread that goes on is stopped again.
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
                pass  # the exception arrives where a loop turns round
    except _Stopped:
        pass
    if why:
        raise ModelError(
            f"Building its model takes more than {why[0]}, before any weight is read.",
            "Check the sizes in config.json.",
        )
