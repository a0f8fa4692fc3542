"""What benchmarks share: which device, how to time, the memory of a step, fresh processes, files of results.

Knows no kernel and no model.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import select
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

EXIT_OK, EXIT_SHORT, EXIT_CANNOT_RUN, EXIT_INTERRUPTED = 0, 1, 2, 130
NO_GPU = (
    "This benchmark needs a CUDA or ROCm GPU and torch finds none; "
    "--dry-run runs every step on tiny shapes on the CPU instead."
)
DRY_RUN = "dry run: numbers mean nothing"
_ROOT = Path(__file__).resolve().parent.parent
_ANSWER_SECONDS = 420.0


def device_of(dry_run: bool) -> str:
    """The GPU; a dry run takes the CPU where there is none."""
    return "cpu" if dry_run and not torch.cuda.is_available() else "cuda"


# --- time ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median and the quartiles of `count` calls."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        low, median, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
        return cls(median, low, high, len(samples))


class Stopwatch:
    """Times single calls on the device, with a cold cache and without waiting for the host.

    Before every call a buffer of several times the cache's size is read: it pushes the call's inputs out, leaves no
    dirty line that the call would have to write back, and keeps the device busy while the host issues the call. It is
    read as often as that takes, so a slow launch does not look like a slow kernel.
    """

    _WARM_UP, _PROBES, _LEAST, _MOST = 3, 5, 15, 200
    _BUFFER = 256 << 20

    def __init__(self, device: str) -> None:
        self._device = device
        if device == "cuda":
            properties = torch.cuda.get_device_properties(0)
            nbytes = max(self._BUFFER, 4 * getattr(properties, "L2_cache_size", 0))
            self._buffer = torch.ones(nbytes // 4, dtype=torch.int32, device=device)

    def samples(
        self, run: Callable[[], object], *, before: Callable[[], object] | None = None, budget_ms: float = 25.0
    ) -> list[float]:
        """Milliseconds of single calls of `run`; `before` runs ahead of each and is not timed."""
        prepare = before or (lambda: None)
        if self._device == "cpu":
            prepare()
            begun = time.perf_counter()
            run()
            return [1e3 * (time.perf_counter() - begun)]
        for _ in range(self._WARM_UP):
            prepare()
            run()
        flush_ms, _ = self._probe(lambda: self._buffer.amax(), lambda: None)
        run_ms, host_ms = self._probe(run, prepare)
        flushes = 1 + int(1.5 * host_ms / flush_ms)
        count = int(budget_ms / (run_ms + flushes * flush_ms))
        events = []
        for _ in range(min(self._MOST, max(self._LEAST, count))):
            prepare()
            for _ in range(flushes):
                self._buffer.amax()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def _probe(self, run: Callable[[], object], prepare: Callable[[], object]) -> tuple[float, float]:
        """Rough milliseconds of one call: until the device is done, and until the host is."""
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(self._PROBES):
            prepare()
            run()
        host = time.perf_counter() - begun
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begun) / self._PROBES, 1e3 * host / self._PROBES


# --- memory --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of one step beyond those before it, as PyTorch's allocator of the device counts them."""

    kept: int
    """After the forward."""
    peak: int
    """The most in the step; gradients of parameters count."""
    reserved: int | None
    """The most that the CUDA allocator holds, all in all; None on the CPU."""


def step_memory(forward: Callable[[], object], finish: Callable[[object], None], device: str) -> Memory:
    """The memory of `forward` and of `finish`, which is given its result and lets go of it.

    The CPU's allocator is read by PyTorch's profiler, which sees what compiled code allocates too.
    """
    gc.collect()
    if device == "cpu":
        held: list[object] = []
        kept, top = _profiled(lambda: held.append(forward()))
        _, rest = _profiled(lambda: finish(held.pop()))
        return Memory(kept, max(top, kept + rest), None)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = forward()
    kept = torch.cuda.memory_allocated() - before
    held = [output]
    del output
    finish(held.pop())
    torch.cuda.synchronize()
    return Memory(kept, torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved())


def _profiled(run: Callable[[], object]) -> tuple[int, int]:
    """Bytes that the CPU's allocator holds after `run` beyond those before it, and the most in between."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    recorded: Any = profiler.profiler
    events = [each for each in recorded.kineto_results.events() if each.name() == "[memory]"]
    live = most = 0
    for _, _, nbytes in sorted((each.start_ns(), place, each.nbytes()) for place, each in enumerate(events)):
        live += nbytes
        most = max(most, live)
    return live, most


# --- fresh processes -----------------------------------------------------------------------------------------------


class Worker:
    """A process of its own for one provider; one line of JSON each way.

    A provider may patch classes, poison the device's context or run out of memory: no other provider notices. The
    process is started at the first request, and again after it has ended.
    """

    def __init__(self, module: str, provider: str, *, dry_run: bool, variables: dict[str, str] | None = None) -> None:
        self.provider = provider
        self._command = [sys.executable, "-m", module, "--worker", provider, *(["--dry-run"] if dry_run else [])]
        self._variables = variables or {}
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by close)

    def send(self, request: dict[str, Any]) -> None:
        """Send a request, whose answer :meth:`receive` waits for."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                cwd=_ROOT,
                env={**os.environ, **self._variables},
            )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # receive tells how the process ended

    def receive(self) -> dict[str, Any]:
        """The answer; ``{"error": sentence}`` where there is none."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], _ANSWER_SECONDS)
        line = process.stdout.readline() if ready else ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        if not ready:
            process.kill()
            return {"error": f"no answer within {_ANSWER_SECONDS:.0f} s"}
        return {"error": f"its process ended with code {process.wait()}: {self._last_words()}"}

    def answer_to(self, request: dict[str, Any]) -> dict[str, Any]:
        self.send(request)
        return self.receive()

    def close(self) -> None:
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()
        self._log.close()

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def serve(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """The worker's side: answer every line of stdin with a line of stdout, until stdin ends.

    Only answers reach stdout: what libraries print goes to stderr.
    """
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        broken = False
        try:
            answer = handle(json.loads(line))
        except Exception as error:  # whatever a provider does is a result of the benchmark
            answer = {"error": sentence(error)}
            broken = breaks_the_device(error)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if broken:
            return EXIT_CANNOT_RUN  # after such an error every call fails: the next request gets a fresh process
    return EXIT_OK


def breaks_the_device(error: BaseException) -> bool:
    """Whether every later call of this process fails too."""
    return "CUDA error" in str(error) or "HIP error" in str(error)


def sentence(error: BaseException) -> str:
    """An exception in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    cause = error.__cause__ or error  # a compiler wraps what went wrong
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0][:200] if lines else ''}".rstrip(": ")


# --- results -------------------------------------------------------------------------------------------------------


def document(arguments: Sequence[str], module: str, *, dry_run: bool, **content: Any) -> dict[str, Any]:
    """A result with all that is needed to read it later: command, device, driver, versions."""
    command = shlex.join(["python", "-m", module, *arguments])
    device = _device(device_of(dry_run))
    return {"command": command, "dry_run": dry_run, "device": device, "versions": _versions(), **content}


class Result:
    """A result that is written with every row, so that a run which is cut short loses its current row alone.

    Args:
        path: its file; None for none.
        content: what `document` returns.
        rows: the key under which rows are.
    """

    def __init__(self, path: Path | None, content: dict[str, Any], rows: str = "rows") -> None:
        self.content: dict[str, Any] = {**content, "complete": False, rows: []}
        self._path, self._rows = path, rows
        self._write()

    def add(self, *rows: dict[str, Any]) -> None:
        """Write these rows too."""
        self.content[self._rows] += rows
        self._write()

    def done(self, **more: Any) -> dict[str, Any]:
        """The whole content, which says that it is complete."""
        self.content |= {**more, "complete": True}
        self._write()
        return self.content

    def _write(self) -> None:
        if self._path is not None:
            write_json(self._path, self.content)


def finish(arguments: argparse.Namespace, content: dict[str, Any], short: Callable[[], Sequence[str]]) -> int:
    """Write what `--json` and `--plot` ask for, say what falls `short`; returns the exit code."""
    if arguments.json:
        write_json(arguments.json, content)
    if arguments.plot:
        from benchmarks.plot import plot

        plot(content, arguments.plot)
    if arguments.dry_run:
        print(DRY_RUN)
        return EXIT_OK
    lines = short()
    for line in lines:
        print(f"falls short: {line}", file=sys.stderr)
    return EXIT_SHORT if arguments.check and lines else EXIT_OK


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as a whole: who is stopped in the middle leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _device(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"name": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "architecture": getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}"),
        **_driver(),
    }


def _driver() -> dict[str, str]:
    fields = ("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit")
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    result = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    values = result.stdout.strip().split(", ")
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def _versions() -> dict[str, str | None]:
    packages = ("torch", "triton", "transformers", "peft", "liger_kernel")
    return {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        **{package: version(package) for package in packages},
    }


def version(package: str) -> str | None:
    """Version of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
