"""The answers of `torch.cuda` on the emulated device: an H100 in two, with nothing to wait for."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from typing import Any

import torch
import torch.storage

from tests.device.emulator.counting import Meter

GIB = 2**30
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3 (emulated)", multi_processor_count=132, L2_cache_size=50 * 2**20,
    total_memory=80 * GIB, major=9, minor=0, warp_size=32,
)  # fmt: skip
_MODES = {"default": 0, "warn": 1, "error": 2}


def install(library: ctypes.CDLL, meter: Meter) -> None:
    """Let `torch.cuda` and `torch.accelerator` answer for the emulated device, for the life of the process."""
    _devices(library)
    _memory(library)
    _generators(library)
    _streams()
    cuda = torch.cuda
    cuda.set_sync_debug_mode = lambda mode: setattr(meter, "sync_debug_mode", _MODES.get(mode, mode))  # type: ignore[arg-type, misc]
    cuda.get_sync_debug_mode = lambda: meter.sync_debug_mode
    torch.storage.UntypedStorage.clone = _clone_storage  # type: ignore[method-assign]
    torch.storage.UntypedStorage.to = _moved_storage  # type: ignore[method-assign]


def _devices(library: ctypes.CDLL) -> None:
    def index_of(device: Any) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return current() if index is None else index

    def current() -> int:
        return int(library.emulated_device())

    def set_current(index: int) -> None:
        library.emulated_set_device(index)

    def exchange(index: int) -> int:
        before = current()
        if index >= 0:
            set_current(index)
        return before

    class Current(ContextDecorator):
        """`torch.cuda.device`."""

        def __init__(self, device: Any) -> None:
            self.idx = index_of(device)

        def __enter__(self) -> None:
            self.before = exchange(self.idx)

        def __exit__(self, *error: object) -> None:
            set_current(self.before)

    class CurrentOf(Current):
        """`torch.cuda.device_of`."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.idx = tensor.get_device() if tensor.is_cuda else -1

    count = library.emulated_devices()
    _answer(
        torch.cuda,
        is_available=lambda: True, device_count=lambda: count, is_initialized=lambda: True, _initialized=True,
        _lazy_init=lambda: None, _lazy_call=lambda function, **options: function(),
        current_device=current, set_device=lambda d: set_current(index_of(d)),
        _exchange_device=exchange, _maybe_exchange_device=exchange, device=Current, device_of=CurrentOf,
        get_device_properties=lambda d=None: PROPERTIES, get_device_name=lambda d=None: PROPERTIES.name,
        get_device_capability=lambda d=None: (PROPERTIES.major, PROPERTIES.minor),
        is_bf16_supported=lambda *_, **__: True, synchronize=lambda d=None: None,
        is_current_stream_capturing=lambda: False,
    )  # fmt: skip
    _answer(
        torch._C,
        _cuda_getDevice=current, _cuda_setDevice=set_current,
        _cuda_exchangeDevice=exchange, _cuda_maybeExchangeDevice=exchange,
    )  # fmt: skip
    _answer(torch.accelerator, is_available=lambda: True, current_device_index=current)


def _memory(library: ctypes.CDLL) -> None:
    live, peak = library.emulated_live_bytes, library.emulated_peak_bytes
    for module in (torch.cuda, torch.cuda.memory):
        _answer(
            module,
            memory_allocated=lambda d=None: live(), max_memory_allocated=lambda d=None: peak(),
            memory_reserved=lambda d=None: peak(), max_memory_reserved=lambda d=None: peak(),
            reset_peak_memory_stats=lambda d=None: library.emulated_reset_peak(), empty_cache=lambda: None,
            mem_get_info=lambda d=None: (4 * GIB, 80 * GIB),
            memory_stats=lambda d=None: {"allocated_bytes.all.current": live(), "allocated_bytes.all.peak": peak()},
        )  # fmt: skip


def _generators(library: ctypes.CDLL) -> None:
    generators = tuple(torch.Generator(torch.device("cuda", i)) for i in range(library.emulated_devices()))

    def of(device: Any) -> torch.Generator:
        index = device if isinstance(device, int) else torch.device(device).index
        return generators[library.emulated_device() if index is None else index]

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(int(seed))

    for module in (torch.cuda, torch.cuda.random):
        _answer(
            module,
            default_generators=generators,
            get_rng_state=lambda device="cuda": of(device).get_state(),
            set_rng_state=lambda state, device="cuda": of(device).set_state(state),
            get_rng_state_all=lambda: [generator.get_state() for generator in generators],
            manual_seed=lambda seed: of("cuda").manual_seed(int(seed)), manual_seed_all=seed_all,
            initial_seed=lambda: of("cuda").initial_seed(),
        )  # fmt: skip


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 1.0  # milliseconds


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream, self.device = 0, torch.device("cuda", torch.cuda.current_device())

    def synchronize(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = synchronize

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def _streams() -> None:
    @contextmanager
    def inside(*_: Any, **__: Any) -> Iterator[None]:
        yield

    _answer(
        torch.cuda,
        Event=_Event, Stream=_Stream, stream=inside, current_stream=_Stream, default_stream=_Stream,
        set_stream=lambda stream: None,
    )  # fmt: skip


_clone_of_cpu = torch.storage.UntypedStorage.clone


def _clone_storage(self: torch.UntypedStorage) -> torch.UntypedStorage:
    if self.device.type != "cuda":
        return _clone_of_cpu(self)
    source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
    return source.clone().untyped_storage()


_to_of_cpu = torch.storage.UntypedStorage.to


def _moved_storage(
    self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False
) -> torch.UntypedStorage | torch.TypedStorage:
    target = torch.device(device)
    if target.type != "cuda" or self.device.type == "cuda":
        return _to_of_cpu(self, device=target, non_blocking=non_blocking)
    source = torch.empty(0, dtype=torch.uint8).set_(self)
    return source.to(target, non_blocking=non_blocking).untyped_storage()


def _answer(module: Any, **answers: Any) -> None:
    for name, answer in answers.items():
        setattr(module, name, answer)
