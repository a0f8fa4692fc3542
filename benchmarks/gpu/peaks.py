"""Predicted peaks of whole training steps beside what the GPU's allocator reports for the same steps.

    python -m benchmarks.peaks              print the table (a GPU is needed; about half a minute a row)
    python -m benchmarks.peaks --check      and exit 1 where a prediction is off by more than its own margin
    python -m benchmarks.peaks --only llama rows whose name contains the text
    python -m benchmarks.peaks --dry-run    tiny models on the device at hand, or the CPU; the numbers mean nothing

`predicted` comes from the config alone, as `memopt report` prints it: live storages at the peak, and what the caching
allocator reserves for them. `allocated` and `reserved` are PyTorch's own (torch.cuda.max_memory_allocated, and
_reserved) over the second step of the same model with random weights and AdamW, in a process of its own. Smaller models
on a CPU are `python -m benchmarks.prediction`.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import EXIT_CANNOT_RUN, NO_GPU, Result, document, finish, sentence
from benchmarks.prediction import WAYS as WITHOUT_OFFLOAD
from memopt.prediction.peak import MARGIN

MODULE = "benchmarks.peaks"
Row = dict[str, Any]
#: Name -> checkpointing of the model's own, recipe. On the CPU, offloaded tensors would be on the device too.
WAYS = {**WITHOUT_OFFLOAD, "offload": ("none", "long-context")}

_LLAMA: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "num_hidden_layers": 16, "vocab_size": 128256, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
_T5: dict[str, Any] = {"d_model": 768, "d_ff": 3072, "num_heads": 12, "num_layers": 12, "dropout_rate": 0.0}
_TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 67,
}  # fmt: skip
#: Name -> config class, model class, settings, those of a dry run, rows and tokens of a batch.
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], tuple[int, int | None]]] = {
    "llama-1b": (
        "LlamaConfig", "LlamaForCausalLM", _LLAMA,
        {**_TINY, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}, (2, 2048),
    ),
    "bert-large": (
        "BertConfig", "BertForMaskedLM", {**_LARGE, **_NO_DROPOUT}, {**_TINY, **_NO_DROPOUT}, (8, 512),
    ),
    "vit-large": (
        "ViTConfig", "ViTForImageClassification", {**_LARGE, **_NO_DROPOUT},
        {**_TINY, **_NO_DROPOUT, "image_size": 32, "patch_size": 8}, (32, None),
    ),
    "t5-base": (
        "T5Config", "T5ForConditionalGeneration", {**_T5, "decoder_start_token_id": 0},
        {
            "d_model": 64, "d_ff": 172, "num_heads": 4, "d_kv": 16, "num_layers": 2, "dropout_rate": 0.0,
            "vocab_size": 67, "decoder_start_token_id": 0,
        }, (8, 256),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    model: str
    train: Any
    way: str
    """One of `WAYS`."""
    precision: Any = "bf16"

    def __str__(self) -> str:
        return ", ".join((self.model, self.train, self.way, self.precision))


#: The most important first.
CASES = (
    Case("llama-1b", "full", "exact"),
    Case("llama-1b", "full", "none"),
    Case("llama-1b", "lora", "exact"),
    Case("llama-1b", "full", "levels"),
    Case("llama-1b", "full", "checkpointing"),
    Case("llama-1b", "lora", "offload"),
    Case("bert-large", "full", "exact"),
    Case("bert-large", "full", "none"),
    Case("llama-1b", "full", "exact", "bf16-mixed"),
    Case("vit-large", "full", "exact"),
    Case("t5-base", "full", "exact"),
    Case("llama-1b", "lora", "none"),
    Case("llama-1b", "full", "int8"),
    Case("bert-large", "lora", "exact"),
    Case("vit-large", "full", "none"),
    Case("t5-base", "full", "none"),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help=f"exit 1 where a peak is off by more than {MARGIN:.0%}%")
    parser.add_argument("--only", metavar="TEXT", default="", help="only rows whose name contains TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every row, as it is measured")
    parser.add_argument("--minutes", type=float, default=7.5, help="start no further row after so many (7.5)")
    parser.add_argument("--dry-run", action="store_true", help="tiny models; the numbers mean nothing")
    arguments = parser.parse_args(argv)
    arguments.plot = None
    if not arguments.dry_run and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return EXIT_CANNOT_RUN
    chosen = [case for case in CASES if arguments.only.lower() in str(case)]
    if not chosen:
        parser.error(f"no row's name contains '{arguments.only}'")
    warnings.filterwarnings("ignore")
    given = sys.argv[1:] if argv is None else argv
    result = Result(arguments.json, document(given, MODULE, dry_run=arguments.dry_run, margin=MARGIN))
    deadline = time.monotonic() + 60 * arguments.minutes
    left_out = []
    for case in chosen:
        if time.monotonic() > deadline:
            left_out.append(str(case))
            continue
        row = measure(case, dry_run=arguments.dry_run)
        result.add(row)
        print(f"{case}: {row.get('error') or _shares(row)} ({row['seconds']:.0f} s)", file=sys.stderr, flush=True)
    rows = result.content["rows"]
    Console(width=None if sys.stdout.isatty() else 130).print(table(rows))
    if left_out:
        print(f"Left out, because --minutes {arguments.minutes:g} were over: {'; '.join(left_out)}.")
    return finish(arguments, result.done(left_out=left_out), lambda: list(shortfalls(rows)))


def measure(case: Case, *, dry_run: bool) -> Row:
    """Predict a step and run it; a row says in `error` why it could not."""
    begun = time.monotonic()
    row: Row = {"case": str(case)}
    try:
        found = _compare(case, dry_run)
    except Exception as failure:  # one row that fails leaves the others
        row["error"] = sentence(failure)
    else:
        measured = found.measured
        row |= {"moment": found.moment, "predicted": found.predicted, "predicted_reserved": found.predicted_reserved}
        row |= {"allocated": measured.allocated, "reserved": measured.reserved, "device": measured.device}
    return {**row, "seconds": round(time.monotonic() - begun, 1)}


def _compare(case: Case, dry_run: bool) -> Any:
    from memopt.plan.recipe import load_recipe
    from memopt.prediction.measure import compare
    from memopt.trace.training import Step, Training

    config, sites = _model(case.model, dry_run)
    checkpointing, recipe = WAYS[case.way]
    rows, tokens = MODELS[case.model][-1]
    if dry_run:
        rows, tokens = 2, 16 if tokens else None
    training = Training(rows, tokens, case.precision, case.train, checkpointing=checkpointing, adapter_fp32=True)
    return compare(Step(config, training, sites, None if recipe is None else load_recipe(recipe)))


@functools.cache
def _model(name: str, dry_run: bool) -> tuple[Any, Any]:
    import transformers

    from memopt.walk.models.build import build_meta
    from memopt.walk.observe import find_sites

    kind, head, real, dry, _ = MODELS[name]
    config: Any = getattr(transformers, kind)(**(dry if dry_run else real))
    config.architectures = [head]
    return config, find_sites(build_meta(config))


def _off(row: Row) -> dict[str, float]:
    """What was measured -> how far the prediction is from it."""
    pairs = {"allocated": "predicted", "reserved": "predicted_reserved"}
    return {ours: row[theirs] / row[ours] - 1 for ours, theirs in pairs.items() if row.get(ours)}


def _shares(row: Row) -> str:
    return ", ".join(f"{name} {off:+.2%}" for name, off in _off(row).items())


def shortfalls(rows: Sequence[Row]) -> Iterator[str]:
    """What `--check` finds wrong, a line each."""
    for row in rows:
        if "error" in row:
            yield f"{row['case']}: {row['error']}"
            continue
        for name, off in _off(row).items():
            if abs(off) > MARGIN:
                yield f"{row['case']}: predicted is {off:+.2%} from {name}; at most {MARGIN:.0%}"


def table(rows: Sequence[Row]) -> Table:
    """A line for each case."""
    result = Table(title="Peak of the second step, MiB", title_justify="left")
    names = ("model, trained, saved by, precision", "peak in", "predicted", "allocated", "off by", "reserved", "off by")
    for name in names:
        result.add_column(name, justify="left" if name in names[:2] else "right", no_wrap=True)
    for row in rows:
        off = _off(row) if "error" not in row else {}
        shares = {name: f"{off[name]:+.2%}" if name in off else "-" for name in ("allocated", "reserved")}
        numbers = (_mebibytes(row.get(name)) for name in ("predicted", "allocated", "reserved"))
        predicted, allocated, reserved = numbers
        cells = (predicted, allocated, shares["allocated"], reserved, shares["reserved"])
        result.add_row(row["case"], row.get("moment", row.get("error")), *cells)
    return result


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.0f}"


if __name__ == "__main__":
    raise SystemExit(main())
