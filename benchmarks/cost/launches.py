"""Kernel launches of one transformer block, forward and backward, stock and patched.

    python -m benchmarks.launches                  print the table
    python -m benchmarks.launches --check          and exit 1 where a patched block launches more than stock's
    python -m benchmarks.launches --models bert    only some models
    python -m benchmarks.launches --by-operator    and which operators a patched block launches more or less often

Setting: a CUDA device emulated on the CPU, on which operators run on the CPU's kernels, Triton kernels are not run, and
every launch is counted. An operator counts one launch, whatever CUDA would need for it; views and allocations count
none. Attention runs as plain operators, which stock and patched models share. A block's launches are those of a model
with `LAYERS[1]` blocks less those of one with `LAYERS[0]`, over the difference: one block, and for an encoder with a
decoder one of each. Weights are large enough for every rewrite that looks at their size.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

if __name__ == "__main__":
    import tests.device.emulator.install  # noqa: F401 - before torch

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import memopt

LAYERS = (2, 4)
"""Even: Gemma 2 has two kinds of blocks that take turns."""
FULL, LORA = "full", "LoRA"
BF16, AUTOCAST = "bf16", "autocast"
_VOCABULARY = 256
_WARM_UP = 2
"""Steps after which a patched model knows which of its blocks need a scope."""

Step = Callable[[], object]
Count = Callable[[Step], Counter[str]]


@dataclass(frozen=True)
class Case:
    """A model, what of it is trained, and in which precision."""

    model: str
    trained: str
    """Everything, or PEFT's LoRA around all linears with its own defaults: adapters in fp32, no dropout."""
    precision: str
    """Weights in bf16, or fp32 weights under autocast to bf16."""


@dataclass(frozen=True)
class Row:
    """Launches of one block in a case."""

    case: Case
    stock: Fraction
    patched: Fraction
    more: dict[str, Fraction]
    """Operator or Triton kernel -> launches of the patched block less those of the stock one, where they differ."""

    @property
    def passed(self) -> bool:
        return self.patched <= self.stock


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="exit 1 where a patched block launches more than stock's")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), help="models to count")
    parser.add_argument("--trained", nargs="+", choices=(FULL, LORA), help="ways to train")
    parser.add_argument("--precision", nargs="+", choices=(BF16, AUTOCAST), help="precisions")
    parser.add_argument("--by-operator", action="store_true", help="also print the operators that differ")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers with versions to FILE")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    cases = [
        Case(model, trained, precision)
        for model in arguments.models or MODELS
        for trained in arguments.trained or (FULL, LORA)
        for precision in arguments.precision or (BF16, AUTOCAST)
    ]
    rows = [measure(case) for case in cases]
    Console(width=None if sys.stdout.isatty() else 100).print(table(rows))
    if arguments.by_operator:
        for row in rows:
            print(f"{_name(row.case)}: " + ", ".join(f"{name} {_signed(more)}" for name, more in row.more.items()))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(_document(rows), indent=2) + "\n")
    missed = [row for row in rows if not row.passed]
    for row in missed:
        print(f"more than stock: {_name(row.case)}: {row.patched} launches, stock {row.stock}", file=sys.stderr)
    return 1 if arguments.check and missed else 0


def measure(case: Case, count: Count | None = None) -> Row:
    """The launches of one block; `count` runs a step and returns its launches by operator."""
    counts = {(patched, n): _counted(case, patched, n, count or counted) for patched in (False, True) for n in LAYERS}
    stock, patched = (_per_block(counts[side, LAYERS[0]], counts[side, LAYERS[1]]) for side in (False, True))
    names = sorted(stock.keys() | patched.keys())
    more = {name: patched.get(name, Fraction()) - stock.get(name, Fraction()) for name in names}
    return Row(case, _sum(stock), _sum(patched), {name: value for name, value in more.items() if value})


def _counted(case: Case, patched: bool, layers: int, count: Count) -> Counter[str]:
    model, batch = built(case, layers)
    if patched:
        with contextlib.redirect_stderr(io.StringIO()):
            memopt.patch(model)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=case.precision == AUTOCAST):
            loss = model(**batch).loss
        loss.backward()
        model.zero_grad(set_to_none=True)

    for _ in range(_WARM_UP):
        step()
    return count(step)


def counted(step: Step) -> Counter[str]:
    """The launches of `step` by operator and Triton kernel, on the emulated device."""
    from tests.device.emulator.install import counting

    with counting() as count:
        step()
    return count.launches


def _per_block(few: Counter[str], many: Counter[str]) -> dict[str, Fraction]:
    more = LAYERS[1] - LAYERS[0]
    return {name: Fraction(many[name] - few[name], more) for name in few.keys() | many.keys()}


def _sum(launches: dict[str, Fraction]) -> Fraction:
    return sum(launches.values(), Fraction())


# --- models ----------------------------------------------------------------------------------------------------------

_WIDTH: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4}
_DECODER: dict[str, Any] = {
    **_WIDTH,
    "intermediate_size": 512,
    "num_key_value_heads": 2,
    "vocab_size": _VOCABULARY,
    "use_cache": False,
}
_ENCODER: dict[str, Any] = {
    **_WIDTH,
    "intermediate_size": 512,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


Build = Callable[[int], tuple[nn.Module, dict[str, Tensor]]]
"""Number of blocks -> the stock model on the CPU, and a batch."""


def _text(config: str, model: str, *, depth: Sequence[str] = ("num_hidden_layers",), **settings: Any) -> Build:
    """How to build a model that reads tokens, by its classes, the names of its depths and its other settings."""

    def build(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
        made = getattr(transformers, config)(**settings, **dict.fromkeys(depth, layers))
        ids = torch.randint(3, _VOCABULARY, (2, 32))
        return getattr(transformers, model)(made), {"input_ids": ids, "labels": ids}

    return build


def _vit(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_hidden_layers=layers, **_ENCODER)
    pixels = torch.randn(2, 3, 32, 32)
    return transformers.ViTForImageClassification(config), {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def _whisper(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.WhisperConfig(
        d_model=256, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=512, decoder_ffn_dim=512, max_source_positions=32, max_target_positions=32, num_mel_bins=16,
        dropout=0.0, vocab_size=_VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None, use_cache=False,
    )  # fmt: skip
    features = {"input_features": torch.randn(2, 16, 64), "labels": torch.randint(3, _VOCABULARY, (2, 32))}
    return transformers.WhisperForConditionalGeneration(config), features


MODELS: dict[str, Build] = {
    "llama": _text("LlamaConfig", "LlamaForCausalLM", **_DECODER),
    "bert": _text("BertConfig", "BertForMaskedLM", **_ENCODER, vocab_size=_VOCABULARY),
    "roberta": _text("RobertaConfig", "RobertaForMaskedLM", **_ENCODER, vocab_size=_VOCABULARY),
    "t5": _text(
        "T5Config", "T5ForConditionalGeneration", depth=("num_layers", "num_decoder_layers"), d_model=256, d_kv=64,
        d_ff=512, num_heads=4, dropout_rate=0.0, vocab_size=_VOCABULARY, decoder_start_token_id=0, use_cache=False,
    ),
    "vit": _vit,
    "gpt2": _text(
        "GPT2Config", "GPT2LMHeadModel", depth=("n_layer",), n_embd=256, n_head=4, n_positions=64, embd_pdrop=0.0,
        resid_pdrop=0.0, attn_pdrop=0.0, vocab_size=_VOCABULARY, use_cache=False,
    ),
    "whisper": _whisper,
    # Every token goes to both experts: which ones it would choose of more depends on values.
    "mixtral": _text(
        "MixtralConfig", "MixtralForCausalLM", num_local_experts=2, num_experts_per_tok=2,
        experts_implementation="eager", **_DECODER,
    ),
    "gemma2": _text("Gemma2Config", "Gemma2ForCausalLM", head_dim=64, sliding_window=16, **_DECODER),
}  # fmt: skip


def built(case: Case, layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The stock model of a case on the device, in train mode, and a batch."""
    torch.manual_seed(0)
    model, batch = MODELS[case.model](layers)
    dtype = torch.float32 if case.precision == AUTOCAST else torch.bfloat16
    model = model.to("cuda", dtype)
    if case.trained == LORA:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules="all-linear"))  # type: ignore[arg-type]
    of_dtype = {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()}
    return model.train(), {name: tensor.to("cuda") for name, tensor in of_dtype.items()}


# --- output ----------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> Table:
    """The rows as a table for people."""
    result = Table(title="Launches of one block, forward and backward", title_justify="left")
    for column in ("model", "trained", "precision"):
        result.add_column(column, no_wrap=True)
    for column in ("stock", "patched", "of them Triton's"):
        result.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        own = _sum({name: launches for name, launches in row.more.items() if not name.startswith("aten::")})
        numbers = (str(row.stock), str(row.patched), str(own))
        style = None if row.passed else "bold red"
        result.add_row(row.case.model, row.case.trained, row.case.precision, *numbers, style=style)
    return result


def _name(case: Case) -> str:
    return f"{case.model}, {case.trained}, {case.precision}"


def _signed(number: Fraction) -> str:
    return f"{'+' if number > 0 else ''}{number}"


def _document(rows: Sequence[Row]) -> dict[str, Any]:
    def plain(row: Row) -> dict[str, Any]:
        more = {name: float(value) for name, value in row.more.items()}
        return {
            **asdict(row.case),
            "stock": float(row.stock),
            "patched": float(row.patched),
            "more": more,
        }

    return {
        "command": "python -m benchmarks.launches --check",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "unit": "launches of one block, forward and backward, on the emulated device",
        "rows": [plain(row) for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main())
