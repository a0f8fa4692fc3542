"""Host time that one transformer block costs, with every Triton launch replaced by the allocation of its outputs.

    python -m benchmarks.host                  print the table
    python -m benchmarks.host --check          and exit 1 where a ratio is above its limit
    python -m benchmarks.host --kinds llama    only some models

Setting: tiny shapes on the CPU, one thread, no GPU. The patched models run the code that they run on a GPU, except the
kernels, so what is measured is Python, autograd and the dispatcher. A block's time is that of a model with 24 blocks
less that of one with 4, forward and backward, as thread CPU time.

Ratios are of pairs: in each round every variant runs once beside its baseline, the order turns around from round to
round, and a ratio is taken within the round. What is judged is the median of all pairs. Where objects lie in memory
decides up to a tenth of a run's time and stays as it is while a process lives, so the pairs are those of several
processes; the spread is the range of their medians. CPU, hash seed, allocator and threads are pinned, and no garbage
is collected during a run. Microseconds are those of the machine at hand.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import memopt
from memopt.kernels.base import device

LAYERS = (4, 24)
_PINNED = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    # glibc: memory that was freed is used again, and never returned to the system.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
}
Kind = Literal["llama", "bert", "llama-lora"]
KINDS: tuple[Kind, ...] = ("llama", "bert", "llama-lora")


@dataclass(frozen=True)
class Variant:
    """One way to run a model, and the most that it may cost."""

    kind: Kind
    name: str
    patched: Literal["no", "yes", "folded", "before LoRA"] = "no"
    autocast: bool = False
    checkpointing: bool = False
    baseline: str = "stock"
    limit: float | None = None
    """Times the baseline; None where nothing is promised."""


def _variants(kind: Kind, limit: float, checkpointed_limit: float) -> tuple[Variant, ...]:
    adapted = kind == "llama-lora"
    return (
        Variant(kind, "stock"),
        Variant(kind, "memopt", "yes", limit=limit),
        *([Variant(kind, "memopt before LoRA", "before LoRA", limit=limit)] if adapted else []),
        *([] if adapted else [Variant(kind, "memopt folded", "folded", limit=limit)]),
        Variant(kind, "stock, autocast", autocast=True),
        Variant(kind, "memopt, autocast", "yes", autocast=True, baseline="stock, autocast", limit=limit),
        Variant(kind, "checkpointing", checkpointing=True),
        Variant(
            kind, "memopt + checkpointing", "yes", checkpointing=True, baseline="checkpointing",
            limit=checkpointed_limit,
        ),
    )  # fmt: skip


VARIANTS = (
    *_variants("llama", 1.10, 1.10),
    *_variants("bert", 1.25, 1.15),
    *_variants("llama-lora", 1.15, 1.15),
)


Block = tuple[float, float]
"""Seconds of forward and of backward of one more block."""
Round = dict[str, Block]
"""Variant -> what a block cost in one round."""


@dataclass(frozen=True)
class Row:
    """What one block costs in a variant: medians over the rounds of all processes."""

    kind: str
    name: str
    forward: float
    backward: float
    """Microseconds of thread CPU time."""
    ratio: float
    """To the baseline, the median of pairs."""
    quartiles: tuple[float, float]
    """Of the pairs' ratios."""
    spread: tuple[float, float]
    """The least and the largest median that a process has."""
    limit: float | None

    @property
    def passed(self) -> bool:
        return self.limit is None or self.ratio <= self.limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit 1 where a ratio is above its limit")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="models to measure")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="variants to measure, baselines included")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of a process; each runs all variants once")
    parser.add_argument("--processes", type=int, default=5, help="processes for each model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers with versions to FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.worker:
        (kind,) = arguments.kinds
        print(json.dumps(_worked(_chosen(kind, arguments.variants), arguments.rounds)))
        return 0
    rows: list[Row] = []
    for kind in arguments.kinds or KINDS:
        options = ["--kinds", kind, "--rounds", str(arguments.rounds)]
        options += ["--variants", *arguments.variants] if arguments.variants else []
        rows += rows_of(_chosen(kind, arguments.variants), [_process(options) for _ in range(arguments.processes)])
    Console(width=None if sys.stdout.isatty() else 120).print(table(rows))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(_document(rows), indent=2) + "\n")
    missed = [row for row in rows if not row.passed]
    for row in missed:
        print(f"above its limit: {row.kind}, {row.name}: {row.ratio:.2f}, limit {row.limit}", file=sys.stderr)
    return 1 if arguments.check and missed else 0


def _process(options: Sequence[str]) -> list[Round]:
    """The rounds of a fresh process."""
    command = [sys.executable, "-m", "benchmarks.host", "--worker", *options]
    done = subprocess.run(command, env={**os.environ, **_PINNED}, stdout=subprocess.PIPE, text=True, check=True)
    rounds: list[dict[str, list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return [{name: (forward, backward) for name, (forward, backward) in each.items()} for each in rounds]


def _worked(variants: Sequence[Variant], rounds: int) -> list[Round]:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with launches_stubbed():
        return measure(variants, rounds)


def _chosen(kind: str, names: Sequence[str] | None) -> tuple[Variant, ...]:
    every = tuple(variant for variant in VARIANTS if variant.kind == kind)
    if not names:
        return every
    wanted = set(names) | {variant.baseline for variant in every if variant.name in names}
    return tuple(variant for variant in every if variant.name in wanted)


def measure(variants: Sequence[Variant], rounds: int, build: Callable[..., Any] | None = None) -> list[Round]:
    """What a block of each variant costs, round by round, after two runs of every model to warm up."""
    models = [(each, tuple((build or built)(each, layers) for layers in LAYERS)) for each in variants]
    for variant, depths in models * 2:
        for model, batch in depths:
            _run(model, batch, variant.autocast)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        return [_round(models if number % 2 else models[::-1]) for number in range(rounds)]
    finally:
        gc.enable()
        gc.unfreeze()


def _round(models: Sequence[tuple[Variant, Sequence[tuple[nn.Module, dict[str, Tensor]]]]]) -> Round:
    more = LAYERS[1] - LAYERS[0]
    found: Round = {}
    for variant, depths in models:
        few, many = (_run(model, batch, variant.autocast) for model, batch in depths)
        found[variant.name] = (many[0] - few[0]) / more, (many[1] - few[1]) / more
    gc.collect()
    return found


def _run(model: nn.Module, batch: dict[str, Tensor], autocast: bool) -> tuple[float, float]:
    for parameter in model.parameters():
        parameter.grad = None
    clock = time.thread_time
    start = clock()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**batch).loss
    middle = clock()
    loss.backward()
    return middle - start, clock() - middle


def rows_of(variants: Sequence[Variant], processes: Sequence[Sequence[Round]]) -> list[Row]:
    """The verdict on each variant, from the rounds of each process."""
    rows = []
    for each in variants:
        ratios = [[sum(found[each.name]) / sum(found[each.baseline]) for found in rounds] for rounds in processes]
        pairs = [ratio for of_process in ratios for ratio in of_process]
        low, _, high = statistics.quantiles(pairs, n=4, method="inclusive") if len(pairs) > 1 else pairs * 3
        medians = [statistics.median(of_process) for of_process in ratios]
        forward, backward = (
            statistics.median(found[each.name][way] for rounds in processes for found in rounds) * 1e6 for way in (0, 1)
        )
        ratio = statistics.median(pairs)
        spread = min(medians), max(medians)
        rows.append(Row(each.kind, each.name, forward, backward, ratio, (low, high), spread, each.limit))
    return rows


def built(variant: Variant, layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of a variant, in train mode, and a batch."""
    torch.manual_seed(0)
    model, batch = _stock(variant.kind, layers)
    if variant.patched == "folded":
        model = _folded(model)
    if variant.patched == "before LoRA":
        memopt.patch(model)
    if variant.kind == "llama-lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0))
    if variant.patched == "yes":
        memopt.patch(model)
    if variant.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if variant.kind == "llama-lora":
            model.enable_input_require_grads()
    return model.train(), batch


def _stock(kind: Kind, layers: int) -> tuple[Any, dict[str, Tensor]]:
    shapes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64, "num_hidden_layers": layers}
    ids = torch.randint(0, 64, (1, 8))
    if kind == "bert":
        config = transformers.BertConfig(
            intermediate_size=256, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **shapes
        )
        return transformers.BertForSequenceClassification(config), {"input_ids": ids, "labels": torch.tensor([0])}
    config = transformers.LlamaConfig(intermediate_size=172, num_key_value_heads=2, use_cache=False, **shapes)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def _folded(model: Any) -> Any:
    """`model`, written, folded by the command line and loaded again."""
    with tempfile.TemporaryDirectory() as folder:
        stock, out = Path(folder, "stock"), Path(folder, "folded")
        model.save_pretrained(stock)
        command = [sys.executable, "-m", "memopt", "patch", str(stock), "--out", str(out)]
        subprocess.run(command, check=True, capture_output=True)
        loaded = memopt.load(out, model_class=type(model))
    loaded.config.use_cache = False
    return loaded


@contextlib.contextmanager
def launches_stubbed() -> Iterator[None]:
    """Inside, operators on the CPU take the way of their Triton kernels, whose launches allocate and compute nothing.

    An operator that has no stub here runs its reference.
    """
    from memopt.kernels.activation import function_triton as activation
    from memopt.kernels.gated_mlp import function_triton as gated
    from memopt.kernels.loss import function_triton as loss
    from memopt.kernels.norm import forward_triton as norm

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(device, "_is_there", attrgetter("is_cpu")))
        stack.enter_context(mock.patch.object(device, "_triton_is_there", _is_there))
        for module, stubs in (
            (norm, {"launch_forward": _norm, "launch_backward": _norm_backward, "launch_affine": _affine}),
            (gated, {"launch_forward": lambda gate, up, kind: torch.empty_like(gate), "launch_backward": _gated}),
            (
                activation,
                {
                    "launch_forward": lambda z, kind, dtype: torch.empty_like(z, dtype=dtype),
                    "launch_backward": _activation,
                },
            ),
            (loss, {"launch_statistics": lambda *_: None, "launch_gradient": lambda *_: None}),
        ):
            stack.enter_context(mock.patch.multiple(module, **stubs))
        yield


def _is_there() -> bool:
    return True  # a mock would cost more than what is measured


def _norm(x: Tensor, weight: Any, bias: Any, arguments: Any, residual: Any = None, copies: Any = None) -> Any:
    y = None if weight is None and bias is None else torch.empty_like(x, dtype=arguments.dtype)
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return y, torch.empty_like(x, dtype=arguments.kept_dtype), rstd


def _norm_backward(
    dy: Any, x_hat: Tensor, rstd: Tensor, weight: Any, arguments: Any, needs: Any, dtype: Any = torch.float32
) -> Any:
    of_parameters = (rstd.new_empty(x_hat.size(-1), dtype=dtype) if need else None for need in needs[1:])
    return torch.empty_like(x_hat, dtype=arguments.x_dtype) if needs[0] else None, *of_parameters


def _affine(x_hat: Tensor, weight: Any, bias: Any, arguments: Any) -> Tensor:
    return torch.empty_like(x_hat, dtype=arguments.dtype)


def _gated(dh: Any, gate: Tensor, up: Tensor, kind: str, recompute: bool, out: Any = None, reuses: bool = False) -> Any:
    dgate, dup = out or (torch.empty_like(gate), torch.empty_like(up))
    return dgate, dup, (dh if reuses else torch.empty_like(gate)) if recompute else None


def _activation(dh: Any, z: Tensor, kind: str, recompute: bool = False, reuses: bool = False, out: Any = None) -> Any:
    return torch.empty_like(z) if out is None else out, (dh if reuses else torch.empty_like(z)) if recompute else None


def table(rows: Sequence[Row]) -> Table:
    """The rows as a table for people."""
    result = Table(title="Host time of one block, launches stubbed", title_justify="left")
    result.add_column("model", no_wrap=True)
    result.add_column("variant", no_wrap=True)
    for column in ("forward us", "backward us", "ratio", "quartiles", "processes", "limit"):
        result.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        result.add_row(
            row.kind, row.name, f"{row.forward:.0f}", f"{row.backward:.0f}", f"{row.ratio:.2f}",
            *(f"{low:.2f} to {high:.2f}" for low, high in (row.quartiles, row.spread)),
            "" if row.limit is None else f"<= {row.limit:.2f}",
            style=None if row.passed else "bold red",
        )  # fmt: skip
    return result


def _document(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "command": "python -m benchmarks.host --check",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "unit": "microseconds of thread CPU time, one more block; ratios to the baseline, medians of pairs",
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main())
