"""Predicted peak of a whole training step, optimizer included, beside that of real tensors.

    python -m benchmarks.prediction                            print the table (about 20 s a pair)
    python -m benchmarks.prediction --only "llama, lora"       pairs whose name contains the text
    python -m benchmarks.prediction --check                    and exit 1 where a prediction is off by too much
    python -m benchmarks.prediction --zoo [--types bert t5]    saved bytes and peaks of small models instead

Setting: CPU, fp32 weights (or as the name says), AdamW, 4 x 128 tokens, the structure and the depth of real models at a
width of 64. `predicted` comes from the config alone. `live` is the most bytes of live storages over the second step of
the same model with random weights, `allocated` the most that PyTorch's CPU allocator reports to its profiler,
temporaries inside of operators included: it knows neither storages nor memopt. KiB are 2^10 bytes.

The check holds predictions to 0.5 % of live storages, which is what they predict. What operators allocate inside
themselves is in no trace, and on another device they are other kernels; it has to be within the margin that a
prediction states. QLoRA needs bitsandbytes, and is left out without it.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedConfig

import memopt
from benchmarks.measure import EXIT_CANNOT_RUN, EXIT_OK, EXIT_SHORT, document, write_json
from memopt.prediction.measure import RealStep
from memopt.prediction.peak import MARGIN, predict
from memopt.prediction.setup import Setup
from memopt.trace.estimate import quiet
from memopt.trace.training import Step, Training
from memopt.walk.models.build import build_meta
from memopt.walk.observe import find_sites
from tests.zoo.build import model_types
from tests.zoo.predicted import compare

#: Of live storages.
LIMIT = 0.005
BATCH, SEQ = 4, 128
#: Name -> checkpointing and recipe.
WAYS: dict[str, tuple[Any, str | None]] = {
    "none": ("none", None),
    "checkpointing": ("full", None),
    "exact": ("none", "exact-unfolded"),
    "levels": ("none", "exact-levels"),
    "int8": ("none", "int8"),
}
_WIDE: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 176}
_CAUSAL: dict[str, Any] = {**_WIDE, "vocab_size": 499, "num_key_value_heads": 2, "pad_token_id": 0, "head_dim": 16}
_ENCODER: dict[str, Any] = {**_WIDE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_WHISPER: dict[str, Any] = {
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 176, "decoder_ffn_dim": 176,
    "num_mel_bins": 24, "max_source_positions": 128, "max_target_positions": 128, "dropout": 0.0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3, "suppress_tokens": [],
    "begin_suppress_tokens": [],
}  # fmt: skip
#: Name -> config class, model class, depth of the real model, settings.
MODELS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", 16, {**_CAUSAL, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", 28, _CAUSAL),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", 26, {**_CAUSAL, "query_pre_attn_scalar": 16, "sliding_window": 64}),
    "moe": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", 24,
        {**_CAUSAL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", 12, {**_ENCODER, "vocab_size": 499}),
    "vit": ("ViTConfig", "ViTForImageClassification", 12, {**_ENCODER, "image_size": 64, "patch_size": 8}),
    "t5": (
        "T5Config", "T5ForConditionalGeneration", 6,
        {"d_model": 64, "d_ff": 176, "num_heads": 4, "d_kv": 16, "vocab_size": 499, "dropout_rate": 0.0},
    ),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", 4, {"d_model": 64, "vocab_size": 499, **_WHISPER}),
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A model and how it is trained."""

    model: str
    train: Any
    way: str
    precision: Any = "fp32"
    setup: Setup = field(default_factory=Setup)
    depth: int | None = None
    """Layers; by default those of the real model."""

    def __str__(self) -> str:
        words = [self.model, self.train, self.way, self.precision]
        return ", ".join(words + ([str(self.setup)] if self.setup != Setup() else []))


PAIRS = [
    *(Pair(model, train, way) for model in MODELS for train in ("full", "lora") for way in WAYS if way != "int8"),
    *(Pair(model, "qlora", way) for model in MODELS for way in ("none", "levels")),
    *(Pair("llama", "qlora", way, "bf16-mixed") for way in ("checkpointing", "exact", "int8")),
    # PyTorch traces grouped products in bf16 alone; their stand-in for fp32 holds its output for longer.
    *(Pair(model, "full", "int8", "bf16" if model == "moe" else "fp32") for model in MODELS),
    Pair("llama", "full", "exact", "bf16"),
    Pair("bert", "full", "exact", "bf16-mixed"),
    Pair("llama", "lora", "exact", "bf16-mixed"),
    *(Pair("llama", train, way, "bf16-autocast") for train in ("full", "lora", "qlora") for way in ("none", "exact")),
    Pair("llama", "full", "exact", setup=Setup("sgd")),
    Pair("vit", "full", "exact", setup=Setup("adafactor")),
    Pair("vit", "full", "exact", setup=Setup("adamw-foreach")),
    Pair("vit", "full", "none", setup=Setup(accumulation=2)),
]


@dataclass(frozen=True)
class Row:
    """Bytes of one pair."""

    pair: str
    predicted: int
    live: int
    allocated: int
    moment: str
    seconds: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to live storages."""
        return self.predicted / self.live - 1

    @property
    def beside_allocator(self) -> float:
        """How far the prediction is from what the allocator reports."""
        return self.predicted / self.allocated - 1

    @property
    def passed(self) -> bool:
        """Whether both are within their limits."""
        return abs(self.error) <= LIMIT and abs(self.beside_allocator) <= MARGIN


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help=f"exit 1 where a prediction is off by more than {100 * LIMIT} %%"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="only pairs whose name contains TEXT")
    parser.add_argument("--zoo", action="store_true", help="compare steps of every model type instead")
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="of --zoo: these model types alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers with versions to FILE")
    arguments = parser.parse_args(argv)
    known = model_types() if arguments.zoo else []
    if arguments.zoo and (arguments.only or arguments.json):
        parser.error("--zoo prints model types: leave out --only and --json")
    if arguments.types and not arguments.zoo:
        parser.error("--types is about --zoo")
    if unknown := sorted({*(arguments.types or ())} - {*known}):
        parser.error(f"transformers has no model type {', '.join(unknown)}")
    warnings.filterwarnings("ignore")
    if arguments.zoo:
        return zoo(arguments.types or known, check=arguments.check)
    rows = []
    chosen = [pair for pair in PAIRS if arguments.only.lower() in str(pair).lower()]
    here = [pair for pair in chosen if pair.train != "qlora" or importlib.util.find_spec("bitsandbytes")]
    if here != chosen:
        print(f"Left out: {len(chosen) - len(here)} pairs that need bitsandbytes (make setup-train).", file=sys.stderr)
    if not here:
        print(f"There is no pair left whose name contains '{arguments.only}'.", file=sys.stderr)
        return EXIT_CANNOT_RUN
    for pair in here:
        rows.append(measure(pair))
        row = rows[-1]
        said = f"{row.error:+.3%}, allocator {row.beside_allocator:+.3%} ({row.seconds:.0f} s)"
        print(f"{row.pair}: {said}", file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 120).print(table(rows))
    if arguments.json:
        given = list(sys.argv[1:] if argv is None else argv)
        content = document(given, "benchmarks.prediction", dry_run=True, rows=[asdict(row) for row in rows])
        write_json(arguments.json, {**content, "dry_run": False})
    missed = [row for row in rows if not row.passed]
    for row in missed:
        print(
            f"falls short: {row.pair} is off by {row.error:+.2%}, the allocator by {row.beside_allocator:+.2%}",
            file=sys.stderr,
        )
    return EXIT_SHORT if arguments.check and missed else EXIT_OK


def zoo(types: Sequence[str], *, check: bool) -> int:
    """Saved bytes and peaks of these types, predicted and real: those that differ or cannot be compared, and sums."""
    counts: Counter[str] = Counter()
    for row in (row for each in types for row in compare(each)):
        found = "equal" if row.equal else "left out" if row.left_out else "different"
        counts[found] += 1
        if not row.equal:
            said = row.left_out or "; ".join(row.differences[:4])
            name = f"{row.model_type}, {'patched' if row.patched else 'stock'}"
            peaks = f"peak {row.predicted_peak} predicted, {row.peak} real"
            print(f"{name}: {found}, {row.predicted} predicted, {row.saved} saved, {peaks}: {said}", flush=True)
    print(", ".join(f"{count} {found}" for found, count in counts.items()))
    return EXIT_SHORT if check and counts["different"] else EXIT_OK


def measure(pair: Pair) -> Row:
    """Predicts a step and runs it."""
    begun = time.perf_counter()
    config = config_of(pair)
    sites = find_sites(build_meta(config))
    checkpointing, name = WAYS[pair.way]
    training = Training(
        BATCH, SEQ, pair.precision, pair.train, checkpointing=checkpointing, cuda_kernels=False, adapter_fp32=True
    )
    recipe = None if name is None else memopt.load_recipe(name)
    found = predict(Step(config, training, sites, recipe), pair.setup)
    step = RealStep(Step(config_of(pair), training, sites, recipe), pair.setup)
    with quiet():
        step.run()
        live = step.live_peak()
        allocated = step.resident() + _profiled(step.run)
    seconds = round(time.perf_counter() - begun, 1)
    return Row(str(pair), found.peak.nbytes, live, allocated, found.peak.moment, seconds)


def config_of(pair: Pair) -> PreTrainedConfig:
    kind, model, depth, settings = MODELS[pair.model]
    layers = pair.depth or depth
    names = {"t5": ("num_layers", "num_decoder_layers"), "whisper": ("encoder_layers", "decoder_layers")}
    sizes = dict.fromkeys(names.get(pair.model, ("num_hidden_layers",)), layers)
    config: PreTrainedConfig = getattr(transformers, kind)(**settings, **sizes)
    config.architectures = [model]
    return config


def _profiled(run: Callable[[], None]) -> int:
    """The most bytes that the CPU allocator holds at a time beyond what it held before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results: Any = profiler.profiler
    events = results.kineto_results.events()
    changes = sorted(
        (event.start_ns(), index, event.nbytes()) for index, event in enumerate(events) if _is_memory(event)
    )
    live = most = 0
    for _, _, nbytes in changes:
        live += nbytes
        most = max(most, live)
    return most


def _is_memory(event: Any) -> bool:
    return bool(event.name() == "[memory]")


def table(rows: Sequence[Row]) -> Table:
    """A line for each pair."""
    result = Table(title="Peak of the second step, KiB", title_justify="left")
    for heading in (
        "model, trained, saved by, precision",
        "peak in",
        "predicted",
        "live",
        "off by",
        "allocated",
        "off by",
    ):
        result.add_column(heading, justify="left" if heading[0] == "m" or heading == "peak in" else "right")
    for row in rows:
        predicted, live, allocated = (f"{each / 1024:,.0f}" for each in (row.predicted, row.live, row.allocated))
        errors = f"{row.error:+.3%}", f"{row.beside_allocator:+.3%}"
        style = None if row.passed else "bold red"
        result.add_row(row.pair, row.moment, predicted, live, errors[0], allocated, errors[1], style=style)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
