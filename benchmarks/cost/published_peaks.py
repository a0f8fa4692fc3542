"""Predicted peaks beside those that others measured on GPUs and published, from the settings that they state.

    python -m benchmarks.published_peaks                    print the table (two minutes)
    python -m benchmarks.published_peaks --only "T4 TinyLlama"  rows that have all of these words
    python -m benchmarks.published_peaks --check            and exit 1 where a prediction is off by too much
    python -m benchmarks.published_peaks --json FILE        write the numbers with versions to FILE

benchmarks/published/ has the rows, with their sources. `allocated` is torch.cuda.max_memory_allocated, `reserved`
max_memory_reserved, `total` what the process holds of the device; MiB of 2^20 bytes. Nothing was fitted to the rows
that are held back: they were predicted once, after all others.

The check holds the mean error to 5 %, and that of a row to 12 % unless the row says why it is larger.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measure import EXIT_OK, EXIT_SHORT, document, write_json
from benchmarks.published import EAGER, NOTHING
from memopt.plan.recipe import Recipe, load_recipe
from memopt.prediction.peak import combine
from memopt.prediction.setup import Setup
from memopt.trace.tracer import Tracer
from memopt.trace.training import Step, Training
from memopt.walk.observe import walk_config

FILES = sorted((Path(__file__).parents[1] / "published").glob("*.json"))
MIB = 1 << 20
#: Of the mean of a measure's errors, and of one row's.
MEAN_LIMIT, LIMIT = 0.05, 0.12
_QLORA = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@dataclass(frozen=True)
class Peak:
    """One measure of a published run, and its prediction. MiB."""

    run: str
    measure: str
    published: float
    predicted: float
    held_back: bool
    why: str
    """It is further off than most; empty if it is not."""

    @property
    def error(self) -> float:
        """Of the published number."""
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Run:
    """A row of a file of published runs."""

    file: Path
    source: dict[str, Any]
    row: dict[str, Any]

    @property
    def name(self) -> str:
        row = self.row
        rank = f" rank {row['lora_rank']}" if row["train"] != "full" else ""
        words = [
            f"{row['model']} {row['train']}{rank}", f"{row['batch']} x {row['seq']}", row["precision"],
            row["attention"], row["optimizer"], "checkpointing" if row["checkpointing"] == "full" else "",
            row["software"],
        ]  # fmt: skip
        device = self.source["device"]["name"].removeprefix("Tesla ")
        return f"{device} {', '.join(word for word in words if word)}"

    def peaks(self) -> Iterator[Peak]:
        row, device = self.row, self.source["device"]
        qlora = row["train"] == "qlora"
        training = Training(
            row["batch"],
            row["seq"],
            precision="fp32" if qlora else row["precision"],  # as prepare_model_for_kbit_training leaves the rest
            train=row["train"],
            lora_rank=row.get("lora_rank", 8),
            lora_targets=tuple(self.source["targets"]),
            checkpointing=row["checkpointing"],
            adapter_fp32=row["train"] == "lora",
        )
        setup = Setup(
            row["optimizer"],
            by_trainer=False,  # the guide hands Trainer an optimizer of its own
            accumulation=row.get("accumulation", 1),
            context=round(device["context"] * MIB),
            memory=device["memory"] * MIB,
        )
        tracer = _tracer(self.file, row["model"], row["attention"], qlora)
        with (
            _heads_repeated()
            if self.source["repeats_heads"] and row["attention"] == "sdpa"
            else contextlib.nullcontext()
        ):
            found = combine(tracer.at(training), setup)
        predicted = {"allocated": found.peak.nbytes, "reserved": found.reserved, "total": found.total}
        for measure, nbytes in predicted.items():
            if measure in row:
                yield Peak(self.name, measure, row[measure], nbytes / MIB, row["held_back"], row.get("why", ""))


def runs() -> list[Run]:
    """Of all files."""
    sources = [(file, json.loads(file.read_text())) for file in FILES]
    return [Run(file, source, row) for file, source in sources for row in source["rows"]]


@cache
def _tracer(file: Path, model: str, attention: str, qlora: bool) -> Tracer:
    settings = dict(json.loads(file.read_text())["models"][model])
    config = transformers.AutoConfig.for_model(**settings)
    if qlora:
        config.quantization_config = {**_QLORA, "bnb_4bit_compute_dtype": "float16"}
    stock = load_recipe(Recipe(name="stock"), [*NOTHING, f"attention.implementation={attention}"])
    recipe = stock if attention == EAGER else None
    return Tracer(Step(config, Training(), walk_config(config), recipe))


@contextlib.contextmanager
def _heads_repeated() -> Iterator[None]:
    """Inside, attention gets a copy of keys and values for each head of queries."""
    stock = F.scaled_dot_product_attention

    def repeated(query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
            options.pop("enable_gqa", None)
        return stock(query, key, value, *others, **options)

    F.scaled_dot_product_attention = repeated
    try:
        yield
    finally:
        F.scaled_dot_product_attention = stock


def summary_rows(peaks: Sequence[Peak]) -> list[tuple[str, ...]]:
    """Mean and largest error of each measure, of the rows that were held back apart."""
    found = []
    for measure in dict.fromkeys(each.measure for each in peaks):
        for held_back in (False, True):
            errors = [each.error for each in peaks if (each.measure, each.held_back) == (measure, held_back)]
            if errors:
                mean, largest = statistics.mean(map(abs, errors)), max(errors, key=abs)
                rows = "held back" if held_back else "others"
                found.append((measure, rows, str(len(errors)), f"{100 * mean:.2f} %", f"{100 * largest:+.2f} %"))
    return found


def summary(peaks: Sequence[Peak]) -> Table:
    found = Table("measure", "rows", "runs", "mean error", "largest", box=None)
    for row in summary_rows(peaks):
        found.add_row(*row)
    return found


def short(peaks: Sequence[Peak]) -> list[str]:
    """What the check does not let pass."""
    found = [
        f"{each.run}: {each.measure} is off by {each.error:+.1%}"
        for each in peaks
        if abs(each.error) > LIMIT and not each.why
    ]
    for measure in dict.fromkeys(each.measure for each in peaks):
        mean = statistics.mean(abs(each.error) for each in peaks if each.measure == measure)
        if mean > MEAN_LIMIT:
            found.append(f"The mean error of {measure} is {mean:.1%}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", metavar="WORDS", default="", help="rows that have all of these words")
    parser.add_argument("--check", action="store_true", help="exit 1 where a prediction is off by too much")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers with versions to FILE")
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    chosen = [run for run in runs() if all(word in run.name for word in arguments.only.split())]
    if not chosen:
        parser.error(f"no row has all of '{arguments.only}' in its name, as in '{runs()[0].name}'")
    console = Console(width=None if sys.stdout.isatty() else 150)
    peaks: list[Peak] = []
    for run in chosen:
        for peak in run.peaks():
            peaks.append(peak)
            console.print(
                f"{peak.run:84} {peak.measure:9} {peak.published:8,.0f} {peak.predicted:8,.0f} {peak.error:+7.2%}"
            )
    console.print(summary(peaks))
    if arguments.json:
        rows = [asdict(each) | {"error": round(each.error, 5)} for each in peaks]
        write_json(arguments.json, document([], "benchmarks.published_peaks", dry_run=True, rows=rows))
    found = short(peaks) if arguments.check else []
    for line in found:
        print(line, file=sys.stderr)
    return EXIT_SHORT if found else EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
