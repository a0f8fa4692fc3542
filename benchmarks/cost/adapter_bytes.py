"""Bytes that one block keeps for backward as people fine-tune: adapters, autocast, dropout, 4-bit weights.

    python -m benchmarks.saved_bytes --adapters [--check]

Hidden size 512, 512 tokens, random weights, counted as in `benchmarks.saved_bytes`. Autocast's copies of weights do not
grow with the tokens, so stock's have a column of their own; the patched number has all it keeps in it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from rich.table import Table
from torch import nn

import memopt
from memopt.trace.account import account, live_bytes

HIDDEN, TOKENS, VOCAB = 512, 512, 1000
_UNIT = TOKENS * HIDDEN * 2
SEEDS = ("dropouts.method=seed",)


@dataclass(frozen=True)
class Case:
    """One row: how a model is trained, what stock keeps, and the most that patched may keep, weight copies included."""

    name: str
    build: Callable[[int], nn.Module]
    stock: float
    limit: float
    lora: float | None = None
    """Dropout of adapters on all linears, by PEFT's defaults (fp32); None: every weight is trained."""
    weights: torch.dtype = torch.bfloat16
    autocast: bool = False
    changes: tuple[str, ...] = ()
    needs: str = ""
    """A package without which the row is left out."""


@dataclass(frozen=True)
class Row:
    name: str
    stock: float
    copies: float
    """16-bit copies of weights, which stock keeps beside `stock`."""
    expected_stock: float
    patched: float
    live: float
    limit: float

    @property
    def passed(self) -> bool:
        honest = abs(self.stock - self.expected_stock) < 0.05 and abs(self.live - self.patched) < 0.01
        return honest and self.patched <= self.limit


def rows() -> list[Row]:
    """Every row whose package is installed."""
    return [measure(case) for case in CASES if not case.needs or importlib.util.find_spec(case.needs)]


def measure(case: Case) -> Row:
    stock, copies, _ = _block_units(case, patched=False)
    patched, _, live = _block_units(case, patched=True)
    return Row(case.name, stock - copies, copies, case.stock, patched, live, case.limit)


def table(measured: list[Row]) -> Table:
    """The rows as a table for people."""
    result = Table(title="Kept for backward, units a block (1 unit = tokens x hidden x 2 bytes)", title_justify="left")
    result.add_column("trained", no_wrap=True)
    for column in ("stock", "+ weight copies", "memopt", "limit", "live check"):
        result.add_column(column, justify="right", no_wrap=True)
    for row in measured:
        stock, copies, patched, live = (f"{each:.2f}" for each in (row.stock, row.copies, row.patched, row.live))
        result.add_row(
            row.name, stock, copies, patched, f"<= {row.limit:g}", live, style=None if row.passed else "bold red"
        )
    return result


def _block_units(case: Case, *, patched: bool) -> tuple[float, float, float]:
    """What is saved in all, the weight copies in it, and what lives, of the third block."""
    two, three = (_whole_model(case, layers, patched=patched) for layers in (2, 3))
    saved, copies, live = ((more - less) / _UNIT for less, more in zip(two, three, strict=True))
    return saved, copies, live


def _whole_model(case: Case, layers: int, *, patched: bool) -> tuple[int, int, int]:
    torch.manual_seed(0)
    model = case.build(layers)
    if not case.needs:
        model = model.to(case.weights)
    model.train()
    if case.lora is not None:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=8, lora_alpha=16, lora_dropout=case.lora, target_modules="all-linear")
        model = get_peft_model(model, config)
    if patched:
        memopt.patch(model, memopt.load_recipe("exact-unfolded", case.changes))
    ids = torch.randint(3, VOCAB, (2, TOKENS // 2))

    def run() -> Any:
        with torch.autocast("cpu", torch.bfloat16) if case.autocast else contextlib.nullcontext():
            return model(input_ids=ids, labels=ids).loss

    counted = account(model, run)
    return counted.saved, counted.per_cause().get("weight copy", 0), live_bytes(run)


def _llama(layers: int, **settings: Any) -> nn.Module:
    """Llama-3-8B's shape: r = 3.5, a quarter of the heads for keys and values."""
    shape = {"intermediate_size": 1792, "num_attention_heads": 4, "num_key_value_heads": 1, **settings}
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, num_hidden_layers=layers, vocab_size=VOCAB, use_cache=False, **shape
    )
    return transformers.LlamaForCausalLM(config)


def _llama_multi_head(layers: int) -> nn.Module:
    return _llama(layers, intermediate_size=1376, num_key_value_heads=4)


def _mixtral(layers: int) -> nn.Module:
    """Its MLP is that of `_llama`, eight times, and every token goes through two."""
    config = transformers.MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=1792,
        num_attention_heads=4,
        num_key_value_heads=1,
        num_hidden_layers=layers,
        vocab_size=VOCAB,
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config)


def _qwen3_moe(layers: int) -> nn.Module:
    """A fourth as wide as Qwen3-30B-A3B, with 16 of its 128 experts: every token goes through eight."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=192,
        num_experts=16,
        num_experts_per_tok=8,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=128,
        num_hidden_layers=layers,
        vocab_size=VOCAB,
        use_cache=False,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _llama_nf4(layers: int) -> nn.Module:
    quantised = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    with tempfile.TemporaryDirectory() as folder:
        _llama(layers).to(torch.bfloat16).save_pretrained(folder)
        return transformers.LlamaForCausalLM.from_pretrained(
            folder, quantization_config=quantised, dtype=torch.bfloat16, device_map="cpu"
        )


def _gpt2(layers: int) -> nn.Module:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=HIDDEN, n_layer=layers, n_head=8, use_cache=False, **off)
    return transformers.GPT2LMHeadModel(config)


def _bert(layers: int) -> nn.Module:
    """With its dropouts as they come: 0.1 of hidden states, embeddings and attention."""
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_attention_heads=8,
        num_hidden_layers=layers,
    )
    return transformers.BertForMaskedLM(config)


_MASTERS = torch.float32
CASES = [
    Case("Llama 3, LoRA, autocast", _llama, 26.63, 12.0, lora=0.0, autocast=True),
    Case("Llama 3, LoRA, autocast, fp32 weights", _llama, 26.63, 12.0, lora=0.0, weights=_MASTERS, autocast=True),
    Case("Llama 3, LoRA, autocast, dropout 0.05, seeds", _llama, 45.63, 12.1, lora=0.05, autocast=True, changes=SEEDS),
    Case("Llama, full, autocast, fp32 weights", _llama_multi_head, 27.77, 11.6, weights=_MASTERS, autocast=True),
    Case("Llama 3, QLoRA (nf4), autocast", _llama_nf4, 26.63, 12.0, lora=0.0, autocast=True, needs="bitsandbytes"),
    # Attention's 3.80, twice the 7.15 of the dense MLP without its input and a tenth, and 2.56 of the experts'
    # adapters, cast to bf16.
    Case("Mixtral, LoRA on attention and experts, autocast", _mixtral, 127.71, 22.1, lora=0.0, autocast=True),
    # Attention's and the norms' 8.75, gate and up of eight experts, 6, and for each token's expert 7 numbers of 64
    # bits: 0.45, which would be 0.11 of a block as wide as the real one.
    Case("Qwen3-30B-A3B's ratios, full", _qwen3_moe, 47.65, 15.2),
    Case("GPT-2 (Conv1D), full, autocast, fp32 weights", _gpt2, 30.05, 10.2, weights=_MASTERS, autocast=True),
    Case("BERT, full, stock dropouts, seeds", _bert, 45.01, 10.6, changes=SEEDS),
]
