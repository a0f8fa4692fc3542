"""Time and achieved bandwidth of every Triton kernel, against a copy and against other implementations.

    python -m benchmarks.kernels              print the tables (a GPU is needed; at most about seven minutes)
    python -m benchmarks.kernels --quick      one shape only
    python -m benchmarks.kernels --check      and exit 1 where a kernel is short of 85 % of a copy's bandwidth
    python -m benchmarks.kernels --dry-run    every step on tiny shapes; the numbers mean nothing

`kernel` is a launcher called directly: one kernel. `memopt`, `eager` (what transformers runs today), `compile`
(torch.compile of that) and `liger` are the operators as a model calls them, with autograd. `copy` moves the kernel's
floor of bytes (benchmarks/gpu/kernel_cases.py), half of it read and half of it written, just before and just after the
kernel is timed. Every provider runs in a process of its own. docs/benchmarks.md says more.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.kernel_cases import BACKWARD, FORWARD, OPS, Op
from benchmarks.kernel_tables import CHECKED, COPY, KERNEL, PROVIDERS, REQUIRED_SHARE, comparison, shortfalls, sweep
from benchmarks.measure import (
    EXIT_CANNOT_RUN,
    NO_GPU,
    Result,
    Stopwatch,
    Timing,
    Worker,
    breaks_the_device,
    device_of,
    document,
    finish,
    sentence,
    serve,
    version,
)

MODULE = "benchmarks.kernels"
#: Relative error of a whole result above which its time is not worth knowing; the tests hold the exact bounds.
_WRONG = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
_ROWS_COMPARED = 64


@dataclass(frozen=True)
class Shape:
    """One operator at one size."""

    op: str
    tokens: int
    hidden: int
    dtype: str
    compiled: bool = False
    """Whether torch.compile is asked too; each costs seconds of compilation."""


def shapes(*, quick: bool, dry_run: bool) -> Iterator[Shape]:
    """What is timed, the most important first."""
    if dry_run:
        for name in OPS:
            yield Shape(name, 4, 32, "float32", compiled=name in ("RMSNorm", "SwiGLU"))
        return
    for name in OPS:
        yield Shape(name, *CHECKED, compiled=True)
    if quick:
        return
    for name in OPS:
        yield Shape(name, 16384, 4096, "float32", compiled=name in ("RMSNorm", "LayerNorm", "SwiGLU"))
    for op in OPS.values():
        widths = (768, 1024, 2048, 5120, 8192, 16384) if op.rowwise else (1024, 14336)
        for hidden in widths:
            yield Shape(op.name, 16384, hidden, "bfloat16")
        for tokens in (1024, 4096, 65536):
            yield Shape(op.name, tokens, 4096 if op.rowwise else 14336, "bfloat16")


# --- one provider, in its own process ------------------------------------------------------------------------------


def measure(shape: Shape, provider: str, *, dry_run: bool) -> list[dict[str, Any]]:
    """Rows of one provider: direction, milliseconds, whether the result was right."""
    device = device_of(dry_run)
    op, dtype = OPS[shape.op], getattr(torch, shape.dtype)
    inputs = op.inputs(shape.tokens, shape.hidden, dtype, device)
    dy = torch.randn(shape.tokens, shape.hidden, device=device).to(dtype)
    truth = op.truth(inputs, dy, min(_ROWS_COMPARED, shape.tokens), ours=provider == "memopt")
    rows: list[dict[str, Any]] = []
    watch = _stopwatch(device)

    def add(
        name: str,
        direction: str,
        make: Callable[[], Callable[[], tuple[Tensor | None, ...]]],
        before: Callable[[], object] | None = None,
    ) -> None:
        row: dict[str, Any] = {"provider": name, "direction": direction}
        try:
            run = make()
            error = _error(run(), truth[direction])
            if error <= _WRONG[dtype]:
                row |= {"relative_error": error, **asdict(Timing.of(watch.samples(run, before=before)))}
            else:
                row["error"] = f"wrong result: relative error {error:.1e}"
        except Exception as failure:  # one direction that fails leaves the others
            if breaks_the_device(failure):
                raise
            row["error"] = sentence(failure)
        rows.append(row)

    if provider == "memopt":
        for direction, launch in op.launchers(inputs, dy).items():
            nbytes = op.floor(direction, shape.tokens, shape.hidden, dtype.itemsize)
            copies = _copy_samples(nbytes, watch, device)
            add(KERNEL, direction, lambda launch=launch: launch)  # type: ignore[misc]
            copies += _copy_samples(nbytes, watch, device)
            rows.append({"provider": COPY, "direction": direction, **asdict(Timing.of(copies))})
    function = _function(op, provider, dry_run=dry_run)

    def backward() -> Callable[[], tuple[Tensor, ...]]:
        y = function(*inputs)
        return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)[: len(op.widths)]

    before = None
    if provider == "liger":
        # It writes gradients over what it saved and over what it is given, so each call gets fresh values.
        before = functools.partial(_restore, [tensor.detach().clone() for tensor in (*inputs, dy)], (*inputs, dy))
    add(provider, FORWARD, lambda: lambda: (function(*inputs),))
    add(provider, BACKWARD, backward, before)
    return rows


def _function(op: Op, provider: str, *, dry_run: bool) -> Callable[..., Tensor]:
    if provider == "memopt":
        return op.memopt
    if provider == "liger":
        assert op.liger is not None
        return op.liger
    if provider == "compile":
        import torch._functorch.config

        torch._dynamo.reset()
        torch._functorch.config.donated_buffer = False  # else a backward cannot be repeated
        compiled: Callable[..., Tensor] = torch.compile(
            op.stock, dynamic=False, fullgraph=True, backend="aot_eager" if dry_run else "inductor"
        )
        return compiled
    return op.stock


def _copy_samples(nbytes: int, watch: Stopwatch, device: str) -> list[float]:
    source = torch.randint(0, 255, (nbytes // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return watch.samples(lambda: target.copy_(source))


def _restore(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for value, tensor in zip(values, tensors, strict=True):
        tensor.data.copy_(value)  # .data: autograd must not see it


def _error(results: Sequence[Tensor | None], truth: Sequence[Tensor]) -> float:
    """The worst relative error, in the norm, over the rows that `truth` has; NaN counts as infinite."""
    worst = 0.0
    for result, exact in zip(results, truth, strict=True):
        assert result is not None
        error = float((result.detach()[: len(exact)].double() - exact).norm() / exact.norm())
        worst = max(worst, error if error == error else float("inf"))
    return worst


@functools.cache
def _stopwatch(device: str) -> Stopwatch:
    return Stopwatch(device)


def _work(provider: str, *, dry_run: bool) -> int:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"rows": measure(Shape(**request), provider, dry_run=dry_run)}
        finally:
            if device_of(dry_run) == "cuda":
                torch.cuda.empty_cache()

    return serve(handle)


# --- the run -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.worker:
        return _work(arguments.worker, dry_run=arguments.dry_run)
    if not arguments.dry_run and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return EXIT_CANNOT_RUN
    plan = list(shapes(quick=arguments.quick, dry_run=arguments.dry_run))
    given = sys.argv[1:] if argv is None else argv
    content = document(given, MODULE, dry_run=arguments.dry_run, required_share_of_copy=REQUIRED_SHARE)
    result = Result(arguments.json, content)
    left_out = _run(plan, result, dry_run=arguments.dry_run, minutes=arguments.minutes)
    rows = result.content["rows"]
    console = Console(width=None if sys.stdout.isatty() else 150)
    checked = (4, 32, "float32") if arguments.dry_run else CHECKED
    console.print(comparison(rows, checked))
    if not arguments.dry_run and not arguments.quick:
        console.print(sweep(rows))
    for row in rows:
        if "error" in row:
            print(f"{_name(row)}, {row['provider']}: {row['error']}")
    if left_out:
        print(f"{left_out} of {len(plan)} shapes were left out: --minutes {arguments.minutes:g} were over.")
    return finish(arguments, result.done(shapes_left_out=left_out), lambda: shortfalls(rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit 1 where a kernel is short of its bandwidth")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers with device and versions")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw them (SVG)")
    parser.add_argument("--quick", action="store_true", help="only the shape that --check looks at")
    parser.add_argument("--minutes", type=float, default=7.0, help="stop the sweep after so many minutes (7)")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes; the numbers mean nothing")
    parser.add_argument("--worker", choices=PROVIDERS, help=argparse.SUPPRESS)
    return parser


def _run(plan: Sequence[Shape], result: Result, *, dry_run: bool, minutes: float) -> int:
    """Adds all rows to `result`; returns how many shapes there was no time for."""
    interpreter = {"TRITON_INTERPRET": "1"} if device_of(dry_run) == "cpu" and version("triton") else {}
    workers = {name: Worker(MODULE, name, dry_run=dry_run, variables=interpreter) for name in PROVIDERS}
    deadline = time.monotonic() + 60 * minutes
    done = 0
    try:
        for shape in plan:
            if time.monotonic() > deadline:
                break
            done += 1
            print(f"{done}/{len(plan)} {shape.op} {shape.tokens} x {shape.hidden} {shape.dtype}", file=sys.stderr)
            for provider in _asked(shape):
                answer = workers[provider].answer_to(asdict(shape))
                result.add(*(_complete(row, shape) for row in answer.get("rows", [])))
                if "error" in answer:
                    result.add(_complete({"provider": provider, "error": answer["error"]}, shape))
    finally:
        for worker in workers.values():
            worker.close()
    return len(plan) - done


def _asked(shape: Shape) -> list[str]:
    asked = ["memopt", "eager"]
    if shape.compiled:
        asked.append("compile")
    if OPS[shape.op].liger is not None and version("liger_kernel"):
        asked.append("liger")
    return asked


def _complete(row: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """A worker's row with its shape, floor and bandwidth."""
    full = {"op": shape.op, "tokens": shape.tokens, "hidden": shape.hidden, "dtype": shape.dtype, **row}
    if "direction" in row:
        itemsize = getattr(torch, shape.dtype).itemsize
        full["floor_bytes"] = OPS[shape.op].floor(row["direction"], shape.tokens, shape.hidden, itemsize)
        if "median" in row:
            full["floor_bytes_per_second"] = full["floor_bytes"] / (row["median"] * 1e-3)
    return full


def _name(row: dict[str, Any]) -> str:
    direction = f" {row['direction']}" if "direction" in row else ""
    return f"{row['op']}{direction} {row['tokens']} x {row['hidden']} {row['dtype']}"


if __name__ == "__main__":
    raise SystemExit(main())
