"""Bytes that one transformer block keeps for backward under `torch.compile`, stock and patched.

    python -m benchmarks.compiled                              print the table
    python -m benchmarks.compiled --check                      and exit 1 where a patched model keeps too much
    python -m benchmarks.compiled --backend inductor           compile kernels too (a C++ compiler, many minutes)

Setting: as `benchmarks.saved_bytes`, hidden size 256, 128 tokens. The default backend partitions the graph as inductor
does and runs it without kernels. A block's bytes are those of a model with three blocks less those of one with two;
every storage that autograd saves counts once, parameters do not count. Each model, or block, is one graph.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import memopt

HIDDEN, VOCAB, TOKENS = 256, 64, (2, 64)
DTYPE = torch.bfloat16
BACKEND = "aot_eager_decomp_partition"


@dataclass(frozen=True)
class Case:
    """One row: a model, whether adapters are trained (and in which dtype), and the most that a block may keep."""

    name: str
    build: Callable[[int], nn.Module]
    adapters: torch.dtype | None
    target: float
    by_blocks: bool = False
    """Its blocks are compiled, each on its own, and the rest of the model is not."""


@dataclass(frozen=True)
class Row:
    case: Case
    stock: float
    eager: float
    """Of the patched model, not compiled."""
    compiled: float
    """Of the patched model, compiled."""

    @property
    def passed(self) -> bool:
        return self.compiled <= min(self.eager, self.case.target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit 1 where a patched model keeps too much")
    parser.add_argument("--backend", default=BACKEND, help=f"of torch.compile (default: {BACKEND})")
    arguments = parser.parse_args()
    rows = [measure(case, arguments.backend) for case in CASES]
    Console(width=None if sys.stdout.isatty() else 100).print(table(rows))
    short = [row for row in rows if not row.passed]
    for row in short:
        print(f"falls short: {row.case.name}: {row.compiled:.3f} units, target {row.case.target}", file=sys.stderr)
    return 1 if arguments.check and short else 0


def measure(case: Case, backend: str = BACKEND) -> Row:
    return Row(
        case,
        _units(case, patched=False, backend=backend),
        _units(case, patched=True, backend=None),
        _units(case, patched=True, backend=backend),
    )


def _units(case: Case, *, patched: bool, backend: str | None) -> float:
    two, three = (_whole_model(case, layers, patched=patched, backend=backend) for layers in (2, 3))
    return (three - two) / (TOKENS[0] * TOKENS[1] * HIDDEN * DTYPE.itemsize)


def _whole_model(case: Case, layers: int, *, patched: bool, backend: str | None) -> int:
    model = case.build(layers).to(DTYPE).train()
    if case.adapters is not None:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=8, target_modules="all-linear")
        model = get_peft_model(model, config, autocast_adapter_dtype=case.adapters == torch.float32)
    if patched:
        memopt.patch(model)
    run: Any = model
    torch.compiler.reset()
    if backend is not None and case.by_blocks:
        for block in run.model.layers:
            block.compile(backend=backend, fullgraph=True)
    elif backend is not None:
        run = torch.compile(model, backend=backend, fullgraph=True)
    ids = torch.randint(0, VOCAB, TOKENS)
    return saved_bytes(lambda: run(input_ids=ids)[0], model)


def saved_bytes(run: Callable[[], Tensor], model: nn.Module) -> int:
    """Bytes of the storages that the forward `run` saves for backward, without those of the model.

    It runs once before that, so that nothing is compiled while hooks are active.
    """
    run()
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            seen[address] = tensor.detach()
        return tensor

    pack.memopt_observer = True  # type: ignore[attr-defined]
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


def table(rows: list[Row]) -> Table:
    """The rows as a table for people."""
    title = "Kept for backward, units a block (1 unit = tokens x hidden x 2 bytes)"
    result = Table(title=title, title_justify="left")
    result.add_column("model", no_wrap=True)
    for column in ("stock, compiled", "patched, eager", "patched, compiled", "target"):
        result.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        numbers = (f"{units:.2f}" for units in (row.stock, row.eager, row.compiled))
        result.add_row(row.case.name, *numbers, f"<= {row.case.target:g}", style=None if row.passed else "bold red")
    return result


def _llama(layers: int) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=688,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_hidden_layers=layers,
        vocab_size=VOCAB,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _bert(layers: int) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_attention_heads=8,
        num_hidden_layers=layers,
        vocab_size=VOCAB,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertModel(config, add_pooling_layer=False)


#: Nor may any keep more than eager memopt.
CASES = [
    Case("Llama (r = 2.6875)", _llama, None, 11.5),
    Case("Llama, blocks compiled", _llama, None, 11.5, by_blocks=True),
    Case("Llama, LoRA on all linears", _llama, torch.bfloat16, 11.8),
    Case("Llama, LoRA, fp32 adapters", _llama, torch.float32, 12.0),
    Case("BERT", _bert, None, 10.2),
    Case("BERT, LoRA on all linears", _bert, torch.bfloat16, 10.4),
]


if __name__ == "__main__":
    raise SystemExit(main())
