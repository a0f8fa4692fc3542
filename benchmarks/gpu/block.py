"""Time and memory of a training step (forward + backward) of a few transformer blocks, against other ways to train.

    python -m benchmarks.block              print the tables (a GPU is needed)
    python -m benchmarks.block --check      and exit 1 where a patched model is slower than it may be, or keeps more
    python -m benchmarks.block --dry-run    every step on tiny models; the numbers mean nothing

Each provider (eager, memopt, memopt on a folded checkpoint, Liger, torch.compile, torch.compile with a memory budget)
has a process of its own. Their steps are timed in turn, round by round, so that all of them see the same clocks and
temperature, and ratios are taken within a round. `eager again` is a second process of the same model: its ratio to
eager shows what the run cannot tell apart. docs/benchmarks.md says more.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.block_models import (
    BUDGET,
    CASES,
    COMPILE,
    EAGER,
    EAGER_AGAIN,
    FOLDED,
    LIGER,
    MEMOPT,
    PROVIDERS,
    Case,
    Trainer,
)
from benchmarks.measure import (
    EXIT_CANNOT_RUN,
    NO_GPU,
    Result,
    Worker,
    device_of,
    document,
    finish,
    serve,
    version,
)

MODULE = "benchmarks.block"
CONFIDENCE = 0.95
#: Two processes of one model that differ by more say that the run cannot judge.
MOST_NOISE = 0.03
_ROUNDS, _ROUND_MS = 15, 250.0
_RESAMPLES = 4000

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.worker:
        return serve(Trainer(arguments.worker, dry_run=arguments.dry_run).handle)
    if not arguments.dry_run and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return EXIT_CANNOT_RUN
    console = Console(width=None if sys.stdout.isatty() else 130)
    deadline = time.monotonic() + 60 * arguments.minutes
    given = sys.argv[1:] if argv is None else argv
    content = document(given, MODULE, dry_run=arguments.dry_run, confidence=CONFIDENCE, rounds=_ROUNDS)
    written, left_out = Result(arguments.json, content, rows="cases"), []
    names = [name for name in PROVIDERS if not (arguments.no_compile and name in (COMPILE, BUDGET))]
    workers = {name: _worker(name, dry_run=arguments.dry_run) for name in names}
    try:
        for name in arguments.case or CASES:
            if time.monotonic() > deadline:
                left_out.append(name)
                continue
            result = run_case(CASES[name], workers, dry_run=arguments.dry_run)
            written.add(result)
            console.print(table(result))
            for line in notes(result):
                print(f"  {line}")
    finally:
        for worker in workers.values():
            worker.close()
    if left_out:
        print(f"Left out, because --minutes {arguments.minutes:g} were over: {'; '.join(left_out)}.")
    cases = written.content["cases"]
    return finish(
        arguments,
        written.done(cases_left_out=left_out),
        lambda: [f"{case['name']}: {line}" for case in cases for line in shortfalls(case)],
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit 1 where a patched model falls short")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers with device and versions")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw them (SVG)")
    parser.add_argument("--case", action="append", choices=tuple(CASES), help="only this case (may be repeated)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out: most of the time is its")
    parser.add_argument("--minutes", type=float, default=6.5, help="start no further case after so many minutes (6.5)")
    parser.add_argument("--dry-run", action="store_true", help="tiny models; the numbers mean nothing")
    parser.add_argument("--worker", choices=PROVIDERS, help=argparse.SUPPRESS)
    return parser


# --- one case ------------------------------------------------------------------------------------------------------


def run_case(case: Case, workers: dict[str, Worker], *, dry_run: bool) -> dict[str, Any]:
    """Prepare every provider, time them round by round, and sum up."""
    rows = _prepare(case, workers)
    ready = [name for name in workers if "kept_bytes" in rows[name]]
    samples, host = _interleave({name: workers[name] for name in ready}, 2 if dry_run else _ROUNDS)
    for worker in workers.values():
        worker.answer_to({"do": "drop"})
    failed = [name for name in ready if any(sample != sample for sample in samples[name])]
    for name in failed:
        rows[name]["error"] = "failed while it was timed"
        del samples[name]
    for name in samples:
        _sum_up(rows[name], samples[name], samples.get(EAGER), host[name])
    sizes = case.sizes(dry_run=dry_run)
    return {
        "name": case.name,
        "trained": case.trained,
        "hidden": sizes.hidden,
        "intermediate": sizes.intermediate,
        "layers": sizes.layers,
        "tokens": sizes.tokens,
        "dtype": "bfloat16",
        "target_units": case.target,
        "rows": list(rows.values()),
        "ratios_to_liger": _ratios_to_liger(samples),
    }


def _worker(name: str, *, dry_run: bool) -> Worker:
    variables = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if device_of(dry_run) == "cpu" and name == LIGER and version("triton"):
        variables["TRITON_INTERPRET"] = "1"  # it has no other way to run on a CPU
    return Worker(MODULE, name, dry_run=dry_run, variables=variables)


def _prepare(case: Case, workers: dict[str, Worker]) -> dict[str, Row]:
    """Prepare all at once, but for the budget: which one is equal to memopt's memory is known last."""
    for name, worker in workers.items():
        worker.send({"do": "scan" if name == BUDGET else "prepare", "case": case.name})
    answers = {name: worker.receive() for name, worker in workers.items()}
    if BUDGET in workers:
        answers[BUDGET] = _prepare_budget(case, workers[BUDGET], answers)
    rows = {}
    for name, answer in answers.items():
        reason = answer.pop("not_supported", None)
        rows[name] = {"provider": name, **answer, **({"error": reason} if reason else {})}
        print(f"{case.name}: {name} {rows[name].get('error', 'is ready')}", file=sys.stderr)
    return rows


def _prepare_budget(case: Case, worker: Worker, answers: dict[str, Row]) -> Row:
    scanned, most = answers[BUDGET], answers[MEMOPT].get("kept_bytes_fewer")
    if "kept_bytes" not in scanned:
        return scanned
    if most is None:
        return {"error": "memopt's memory is not known"}
    kept = {float(budget): nbytes for budget, nbytes in scanned["kept_bytes"].items()}
    fitting = [budget for budget, nbytes in kept.items() if nbytes <= most]
    if not fitting:
        return {"error": f"no budget down to {min(kept)} keeps as little as memopt", "scanned": scanned["kept_bytes"]}
    # The most bytes that are not above memopt's; among equals the highest budget.
    budget = max(fitting, key=lambda budget: (kept[budget], budget))
    return {
        **worker.answer_to({"do": "prepare", "case": case.name, "budget": budget}),
        "scanned": scanned["kept_bytes"],
    }


def _interleave(workers: dict[str, Worker], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Each provider's median step (ms) and host time (ms), round by round, in another order each round."""
    samples: dict[str, list[float]] = {name: [] for name in workers}
    host: dict[str, list[float]] = {name: [] for name in workers}
    steps = 3
    order = list(workers)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            answer = workers[name].answer_to({"do": "timed", "steps": steps})
            samples[name].append(statistics.median(answer["ms"]) if "ms" in answer else float("nan"))
            host[name].append(answer.get("host_ms", float("nan")))
        first = [values[0] for values in samples.values() if values[0] == values[0]]
        if first:
            steps = max(3, min(20, int(_ROUND_MS / statistics.median(first))))
    return samples, host


def _sum_up(row: Row, samples: list[float], eager: list[float] | None, host: list[float]) -> None:
    row["step_ms"], row["host_ms"] = statistics.median(samples), statistics.median(host)
    row["samples_ms"] = samples
    if eager is not None:
        row |= _named("ratio_to_eager", ratio(samples, eager))


def _ratios_to_liger(samples: dict[str, list[float]]) -> dict[str, Any]:
    if LIGER not in samples:
        return {}
    return {name: _named("ratio", ratio(samples[name], samples[LIGER])) for name in (MEMOPT, FOLDED) if name in samples}


def ratio(samples: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """Median of the ratios within a round, and its confidence interval by resampling the rounds."""
    ratios = [sample / base for sample, base in zip(samples, reference, strict=True)]
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    tail = int((1 - CONFIDENCE) / 2 * _RESAMPLES)
    return statistics.median(ratios), medians[tail], medians[-1 - tail]


def _named(name: str, values: tuple[float, float, float]) -> dict[str, Any]:
    return {name: values[0], f"{name}_interval": values[1:]}


# --- the verdict ---------------------------------------------------------------------------------------------------


def noise(case: dict[str, Any]) -> float | None:
    """The furthest from 1 that the ratio of two processes of the stock model may lie, at the stated confidence."""
    again = _row(case, EAGER_AGAIN)
    if "ratio_to_eager_interval" not in again:
        return None
    low, high = again["ratio_to_eager_interval"]
    return float(max(abs(low - 1), abs(high - 1)))


def shortfalls(case: dict[str, Any]) -> list[str]:
    """One sentence for each way in which a patched model falls short of its targets."""
    lines = []
    slack = noise(case)
    if slack is None or slack > MOST_NOISE:
        wide = "unknown" if slack is None else f"{100 * slack:.1f} %"
        lines.append(f"the run cannot judge: two processes of the stock model differ by {wide}")
    for name in (MEMOPT, FOLDED):
        row = _row(case, name)
        if "ratio_to_eager" not in row:
            lines.append(f"{name} was not measured: {row.get('error', 'eager failed')}")
            continue
        if row["units_per_block"] > case["target_units"]:
            lines.append(f"{name} keeps {row['units_per_block']:.2f} units a block, {case['target_units']} are allowed")
        against = {"eager": row["ratio_to_eager"], "Liger": case["ratios_to_liger"].get(name, {}).get("ratio")}
        for other, value in against.items():
            if slack is not None and value is not None and value > 1 + slack:
                lines.append(f"{name} takes {value:.3f} of {other}'s time; noise is {100 * slack:.1f} %")
    return lines


def notes(case: dict[str, Any]) -> list[str]:
    """What a reader of the table must know."""
    lines = [f"{row['provider']}: {row['error']}." for row in case["rows"] if "error" in row]
    slack = noise(case)
    if slack is not None:
        lines.append(f"Noise: eager again / eager lies within 1 +- {slack:.3f} ({100 * CONFIDENCE:.0f} % confidence).")
    for name, value in case["ratios_to_liger"].items():
        low, high = value["ratio_interval"]
        lines.append(f"{name} / Liger: {value['ratio']:.3f} ({low:.3f} to {high:.3f}).")
    ours, theirs = _row(case, MEMOPT), _row(case, BUDGET)
    if "ratio_to_eager" in ours and "ratio_to_eager" in theirs:
        ahead = "ahead of" if theirs["step_ms"] < ours["step_ms"] else "behind"
        lines.append(
            f"torch.compile with activation_memory_budget={theirs['budget']:g} keeps {theirs['units_per_block']:.2f} "
            f"units a block and is {ahead} memopt: {theirs['step_ms'] / ours['step_ms']:.3f} of its time."
        )
    return lines


def table(case: dict[str, Any]) -> Table:
    sizes = f"{case['layers']} blocks, hidden {case['hidden']}, {case['tokens']} tokens, {case['dtype']}"
    result = Table(title=f"{case['name']}: {sizes}; at most {case['target_units']} units", title_justify="left")
    result.add_column("provider", no_wrap=True)
    for column in ("step ms", "/ eager", "interval", "host ms", "units kept a block", "kept MB", "peak MB"):
        result.add_column(column, justify="right", no_wrap=True)
    for row in case["rows"]:
        interval = row.get("ratio_to_eager_interval")
        result.add_row(
            f"{row['provider']} {row['budget']:g}" if "budget" in row else row["provider"],
            _number(row.get("step_ms"), ".2f"),
            _number(row.get("ratio_to_eager"), ".3f"),
            "-" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
            _number(row.get("host_ms"), ".2f"),
            _number(row.get("units_per_block"), ".2f"),
            _number(row.get("kept_bytes"), ".1f", 1e6),
            _number(row.get("peak_bytes"), ".1f", 1e6),
        )
    return result


def _row(case: dict[str, Any], provider: str) -> Row:
    return next((row for row in case["rows"] if row["provider"] == provider), {})


def _number(value: float | None, spec: str, unit: float = 1.0) -> str:
    return "-" if value is None else format(value / unit, spec)


if __name__ == "__main__":
    raise SystemExit(main())
