"""Host time that one transformer block costs, with every Triton launch replaced by the allocation of its outputs.

    python -m benchmarks.host                  print the table
    python -m benchmarks.host --check          and exit 1 where a ratio is above its limit
    python -m benchmarks.host --kinds llama    only some models

Setting: tiny shapes on the CPU, one thread, no GPU. The patched models run the code that they run on a GPU, except the
kernels, so what is measured is Python, autograd and the dispatcher. A block's time is that of a model with 24 blocks
less that of one with 4, forward and backward, as thread CPU time. The variants of a model take turns in one process
and the minimum of their runs counts, so ratios hold on a shared machine; microseconds are those of the machine at hand.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
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
Kind = Literal["llama", "bert", "llama-lora"]


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


@dataclass(frozen=True)
class Row:
    """What one block costs in a variant, in microseconds of thread CPU time."""

    kind: str
    name: str
    forward: float
    backward: float
    ratio: float
    limit: float | None

    @property
    def passed(self) -> bool:
        return self.limit is None or self.ratio <= self.limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit 1 where a ratio is above its limit")
    parser.add_argument("--kinds", nargs="+", choices=("llama", "bert", "llama-lora"), help="models to measure")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="variants to measure, baselines included")
    parser.add_argument("--repeats", type=int, default=25, help="runs of each variant and depth")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers with versions to FILE")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows: list[Row] = []
    for kind in arguments.kinds or ("llama", "bert", "llama-lora"):
        chosen = _chosen(kind, arguments.variants)
        with launches_stubbed():
            rows += _rows(chosen, measure(chosen, arguments.repeats))
    Console(width=None if sys.stdout.isatty() else 100).print(table(rows))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(_document(rows), indent=2) + "\n")
    missed = [row for row in rows if not row.passed]
    for row in missed:
        print(f"above its limit: {row.kind}, {row.name}: {row.ratio:.2f}, limit {row.limit}", file=sys.stderr)
    return 1 if arguments.check and missed else 0


def _chosen(kind: str, names: Sequence[str] | None) -> tuple[Variant, ...]:
    every = tuple(variant for variant in VARIANTS if variant.kind == kind)
    if not names:
        return every
    wanted = set(names) | {variant.baseline for variant in every if variant.name in names}
    return tuple(variant for variant in every if variant.name in wanted)


Times = dict[tuple[str, int], tuple[float, float]]
"""(variant, layers) -> least seconds of forward and of backward"""


def measure(variants: Sequence[Variant], repeats: int, build: Callable[..., Any] | None = None) -> Times:
    """The least time of each variant at each depth; the variants take turns."""
    models = {(each.name, layers): (build or built)(each, layers) for each in variants for layers in LAYERS}
    autocast = {each.name: each.autocast for each in variants}
    best: Times = {}
    for _ in range(repeats + 1):
        for key, (model, batch) in models.items():
            found = _run(model, batch, autocast[key[0]])
            before = best.get(key, (float("inf"),) * 2)
            best[key] = (min(before[0], found[0]), min(before[1], found[1]))
    return best


def _run(model: nn.Module, batch: dict[str, Tensor], autocast: bool) -> tuple[float, float]:
    for parameter in model.parameters():
        parameter.grad = None
    clock = time.thread_time
    gc.disable()
    try:
        start = clock()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        middle = clock()
        loss.backward()
        end = clock()
    finally:
        gc.enable()
    return middle - start, end - middle


def _rows(variants: Sequence[Variant], times: Times) -> list[Row]:
    blocks = {each.name: per_block(times, each.name) for each in variants}
    return [
        Row(each.kind, each.name, *blocks[each.name], sum(blocks[each.name]) / sum(blocks[each.baseline]), each.limit)
        for each in variants
    ]


def per_block(times: Times, name: str) -> tuple[float, float]:
    """Microseconds of forward and backward of one more block."""
    few, many = (times[name, layers] for layers in LAYERS)
    more = LAYERS[1] - LAYERS[0]
    return (many[0] - few[0]) / more * 1e6, (many[1] - few[1]) / more * 1e6


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
            (activation, {"launch_forward": lambda z, kind: torch.empty_like(z), "launch_backward": _activation}),
            (loss, {"launch_statistics": lambda *_: None, "launch_gradient": lambda *_: None}),
        ):
            stack.enter_context(mock.patch.multiple(module, **stubs))
        yield


def _is_there() -> bool:
    return True  # a mock would cost more than what is measured


def _norm(x: Tensor, weight: Any, bias: Any, arguments: Any, residual: Any = None) -> Any:
    y = None if weight is None and bias is None else torch.empty_like(x, dtype=arguments.dtype)
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return y, torch.empty_like(x, dtype=arguments.kept_dtype), rstd


def _norm_backward(dy: Any, x_hat: Tensor, rstd: Tensor, weight: Any, arguments: Any, needs: Any) -> Any:
    of_parameters = (rstd.new_empty(x_hat.size(-1)) if need else None for need in needs[1:])
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
    for column in ("forward us", "backward us", "sum us", "ratio", "limit"):
        result.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        result.add_row(
            row.kind, row.name, f"{row.forward:.0f}", f"{row.backward:.0f}", f"{row.forward + row.backward:.0f}",
            f"{row.ratio:.2f}", "" if row.limit is None else f"<= {row.limit:.2f}",
            style=None if row.passed else "bold red",
        )  # fmt: skip
    return result


def _document(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "command": "python -m benchmarks.host --check",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "unit": "microseconds of thread CPU time, one more block; ratios to the baseline",
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main())
