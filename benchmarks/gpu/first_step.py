"""One real step of four models, patched in six ways, beside the stock model's step on the same weights.

    python -m benchmarks.first_step             print the table (a GPU is needed; about five minutes)
    python -m benchmarks.first_step --check     and exit 1 where a patched step is wrong, larger or waits more often
    python -m benchmarks.first_step --dry-run   tiny models on the device at hand, or the CPU; the numbers mean nothing

Random weights, no dropout, forward and backward. `off` is the median over parameters of the error of the gradient over
the stock model's own error, both against stock modules in fp64; the loss may be one rounding to bf16 further from fp64
than stock's. `kept` is what the forward leaves allocated, `peak` the most in the step. `waits` counts operations for
which the host waits for the device (torch.cuda.set_sync_debug_mode). Times are medians of five steps in a row, and are
not judged. `autocast` trains fp32 weights in bf16; in `checkpointing` both models use transformers' own, and in
`offload` the stock model does, beside the recipe `long-context`; all rows but `autocast` are in bf16.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.first_step_models import MODELS, WAYS, Model, Way, batch, build
from benchmarks.measure import (
    EXIT_CANNOT_RUN,
    NO_GPU,
    Memory,
    Result,
    breaks_the_device,
    device_of,
    document,
    finish,
    sentence,
    step_memory,
)

MODULE = "benchmarks.first_step"
#: The allocator rounds every tensor up to 512 bytes; a step of these models holds fewer than 4096 at a time.
ROUNDING_BYTES = 512 * 4096
_TIMED_STEPS = 5
_WAITS = "called a synchronizing CUDA operation"

Row = dict[str, Any]


@dataclass
class Measured:
    """One model's step."""

    loss: float
    gradients: dict[str, Tensor] = field(repr=False)
    memory: Memory
    waits: Counter[str]
    """Line of Python -> how often it waited for the device in a step."""
    ms: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit 1 where a patched step falls short")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every row, as it is measured")
    parser.add_argument("--model", action="append", choices=tuple(MODELS), help="only this model (may be repeated)")
    parser.add_argument("--way", action="append", choices=tuple(WAYS), help="only this way (may be repeated)")
    parser.add_argument("--dry-run", action="store_true", help="tiny models; the numbers mean nothing")
    arguments = parser.parse_args(argv)
    arguments.plot = None
    if not arguments.dry_run and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return EXIT_CANNOT_RUN
    torch.backends.cuda.matmul.allow_tf32 = False
    warnings.filterwarnings("ignore", category=FutureWarning)  # gradient_checkpointing_enable has a new name
    given = sys.argv[1:] if argv is None else argv
    result = Result(arguments.json, document(given, MODULE, dry_run=arguments.dry_run, import_seconds=_import()))
    for way, name in itertools.product(arguments.way or WAYS, arguments.model or MODELS):
        row = measure(name, way, dry_run=arguments.dry_run)
        print(f"{name}, {way}: {row.get('error') or '; '.join(row['falls_short']) or 'fine'}", file=sys.stderr)
        result.add(row)
        if row.get("device_is_broken"):
            print("Every later call would fail too: start again for the other rows.", file=sys.stderr)
            break
    rows = result.content["rows"]
    Console(width=None if sys.stdout.isatty() else 150).print(table(rows))
    for line in notes(rows):
        print(line)
    return finish(arguments, result.done(), lambda: shortfalls(rows))


def _import() -> float:
    """Seconds until memopt is imported: the first thing that a new machine can fail at."""
    begun = time.perf_counter()
    import memopt

    assert memopt.patch
    return time.perf_counter() - begun


# --- a row ---------------------------------------------------------------------------------------------------------


def measure(name: str, way: str, *, dry_run: bool) -> Row:
    """Stock, patched and true step of one model; a row says in `error` why there is none."""
    row: Row = {"model": name, "way": way}
    try:
        row |= _compared(MODELS[name], WAYS[way], device_of(dry_run), dry_run)
    except Exception as failure:  # one row that fails leaves the others
        row |= {"error": sentence(failure), "falls_short": [sentence(failure)]}
        if breaks_the_device(failure):
            row["device_is_broken"] = True
    gc.collect()
    return row


def _compared(model: Model, way: Way, device: str, dry_run: bool) -> Row:
    import memopt
    from memopt.verification.gradient import compare_gradients
    from memopt.walk.aten.precision import precise
    from memopt.walk.calls.batch import placed

    dtype = torch.float32 if way.autocast else torch.bfloat16
    inputs = placed(batch(model, dry_run), device, dtype)
    made = functools.partial(build, model, way, dtype, device, dry_run)
    wide, stock_model, patched_model = made().double(), made(), made()
    if len({_fingerprint(each) for each in (wide, stock_model, patched_model)}) > 1:
        raise RuntimeError("the models that are to be compared have other weights")
    with precise(torch.float64):
        true_loss, truth = _true(wide, placed(inputs, device, torch.float64))
    del wide
    stock = step(stock_model, inputs, way, device)
    del stock_model
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        begun = time.perf_counter()
        memopt.patch(patched_model, way.recipe)
        seconds = time.perf_counter() - begun
    patched = step(patched_model, inputs, way, device)
    checks = list(
        compare_gradients(
            [patched.gradients], [stock.gradients], truth, torch.bfloat16, "fp64", stock.loss, patched.loss
        )
    )
    row: Row = {
        "patch_seconds": seconds,
        "warnings": [str(each.message) for each in said],
        "loss": patched.loss,
        "stock_loss": stock.loss,
        "true_loss": true_loss,
        "off": checks[0].value,
        "checks": [asdict(check) for check in checks],
        "missing_gradients": sorted(stock.gradients.keys() - patched.gradients.keys()),
        "new_waits": dict(patched.waits - stock.waits),
    }  # fmt: skip
    for prefix, each in (("", patched), ("stock_", stock)):
        row |= {f"{prefix}kept_bytes": each.memory.kept, f"{prefix}peak_bytes": each.memory.peak}
        row |= {f"{prefix}waits": each.waits.total(), f"{prefix}ms": each.ms}
    row["falls_short"] = list(verdict(row))
    return row


def verdict(row: Row) -> Iterator[str]:
    """What is wrong with a patched step, a sentence each."""
    rounding = torch.finfo(torch.bfloat16).eps * abs(row["true_loss"])
    own = abs(row["stock_loss"] - row["true_loss"])
    if not abs(row["loss"] - row["true_loss"]) <= own + rounding:
        yield f"loss {row['loss']:.6f}, stock {row['stock_loss']:.6f}, in fp64 {row['true_loss']:.6f}"
    for check in row["checks"]:
        if check["status"] != "pass" and check["status"] != "warn":
            limit = "" if check["threshold"] is None else f", at most {check['threshold']:.2f}"
            value = "no number" if check["value"] is None else f"{check['value']:.2f}"
            yield f"gradients: {check['id']} of {check['subject']} is {value}{limit}"
    if row["missing_gradients"]:
        yield f"no gradient of {', '.join(row['missing_gradients'][:3])}"
    for what in ("kept", "peak"):
        ours, stocks = row[f"{what}_bytes"], row[f"stock_{what}_bytes"]
        if ours > stocks + ROUNDING_BYTES:
            yield f"{what}: {ours / 2**20:.0f} MiB, stock {stocks / 2**20:.0f}"
    if row["waits"] > row["stock_waits"]:
        where = "; ".join(f"{count} x {line}" for line, count in row["new_waits"].items())
        yield f"waits for the device {row['waits']} times a step, stock {row['stock_waits']}: {where}"


# --- a step --------------------------------------------------------------------------------------------------------


def step(model: nn.Module, inputs: dict[str, Any], way: Way, device: str) -> Measured:
    """A first step for loss and gradients, then one each for memory and for waits, then some for time."""

    def forward() -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=way.autocast):
            loss: Tensor = model(**inputs).loss
        return loss

    def run() -> None:
        forward().backward()
        model.zero_grad(set_to_none=True)

    loss = forward()
    loss.backward()
    gradients = _gradients(model)
    value = float(loss.detach())
    del loss
    model.zero_grad(set_to_none=True)
    memory = step_memory(forward, lambda loss: loss.backward(), device)  # type: ignore[attr-defined]
    model.zero_grad(set_to_none=True)
    return Measured(value, gradients, memory, waits_of(run, device), _milliseconds(run, device))


def waits_of(run: Callable[[], object], device: str) -> Counter[str]:
    """Lines of Python that wait for the device while `run` runs, with how often."""
    if device == "cpu":
        return Counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found = (each for each in said if _WAITS in str(each.message))
    return Counter(f"{'/'.join(Path(each.filename).parts[-3:])}:{each.lineno}" for each in found)


def _milliseconds(run: Callable[[], object], device: str) -> float:
    if device == "cpu":
        begun = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begun)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED_STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def _true(model: nn.Module, inputs: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    loss = model(**inputs).loss
    loss.backward()
    return float(loss.detach()), _gradients(model)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def _fingerprint(model: nn.Module) -> tuple[float, ...]:
    return tuple(float(parameter.detach().double().sum()) for parameter in model.parameters())


# --- for people ----------------------------------------------------------------------------------------------------


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """What `--check` finds wrong, a line each."""
    return [f"{row['model']}, {row['way']}: {line}" for row in rows for line in row["falls_short"]]


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """What a reader of the table must know."""
    for row in rows:
        lines = [*row["falls_short"], *(f"memopt.patch said: {line}" for line in row.get("warnings", []))]
        yield from (f"{row['model']}, {row['way']}: {line}" for line in lines)
    wrong = sum(bool(row["falls_short"]) for row in rows)
    yield f"{len(rows) - wrong} of {len(rows)} patched steps are right, no larger than stock's, and wait no more often."


def table(rows: Sequence[Row]) -> Table:
    """A line for each model and way; numbers of the patched model over those of the stock model."""
    result = Table(title="A step of a patched model, beside stock's", title_justify="left")
    for name in ("model", "way", "loss", "off", "kept MiB", "peak MiB", "waits", "ms"):
        result.add_column(name, justify="left" if name in ("model", "way") else "right", no_wrap=True)
    for row in rows:
        numbers = ["-"] * 6
        if "error" not in row:
            pairs = ((f"{what}_bytes", f"stock_{what}_bytes") for what in ("kept", "peak"))
            numbers = [
                f"{row['loss']:.4f} / {row['stock_loss']:.4f}",
                "-" if row["off"] is None else f"{row['off']:.2f}",
                *(f"{row[ours] / 2**20:.0f} / {row[stocks] / 2**20:.0f}" for ours, stocks in pairs),
                f"{row['waits']} / {row['stock_waits']}",
                f"{row['ms']:.1f} / {row['stock_ms']:.1f}",
            ]
        result.add_row(row["model"], row["way"], *numbers, style="bold red" if row["falls_short"] else None)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
