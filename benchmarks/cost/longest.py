"""The longest sequence of one row that fits on a card, by `memopt report`'s account: full tuning, LoRA and QLoRA.

    python -m benchmarks.longest                   print the table
    python -m benchmarks.longest --only "8B QLoRA"  one row
    python -m benchmarks.longest --check           and exit 1 where a sequence is shorter than wanted
    python -m benchmarks.longest --json FILE       write the numbers with versions to FILE

Nothing is allocated: a step of a few blocks is traced on fake tensors, and extended to all. Lengths are multiples of
8,192 tokens. 'Host' is the memory of the CPU that offloaded inputs and outputs of attention take. Adapters are in fp32.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.measure import EXIT_OK, EXIT_SHORT, document, write_json
from memopt.plan.recipe import load_recipe
from memopt.prediction.cards import find_card, setup_on
from memopt.prediction.peak import Prediction, combine
from memopt.prediction.setup import Setup
from memopt.trace.tracer import Tracer
from memopt.trace.training import Step, Train, Training
from memopt.walk.models.attention import Implementation
from memopt.walk.observe import walk_config

STEP = 8192
GIB = 1 << 30
_LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_QWEN3_32B = {
    "vocab_size": 151936,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": True,
}
#: Experts are no linears, so bitsandbytes leaves them in bf16: weights take 38 GiB. Peers that write them as linears in
#: 4 bits have 26 GiB more, and publish over 500,000 tokens on 80 GiB.
_GPT_OSS_20B = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
}


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, the card, and the tokens that should fit."""

    name: str
    model: str
    sizes: dict[str, object]
    train: Train
    card: str
    wanted: int
    settings: tuple[str, ...] = ()
    """Of the recipe, beside `long-context`'s own."""
    attention: Implementation | None = None

    def config(self) -> transformers.PretrainedConfig:
        config: transformers.PretrainedConfig = getattr(transformers, f"{self.model}Config")(
            **self.sizes, max_position_embeddings=1 << 22, dtype="bfloat16"
        )
        config.architectures = [f"{self.model}ForCausalLM"]
        return config


CASES = (
    Case("Llama-3.1-8B QLoRA", "Llama", _LLAMA_8B, "qlora", "H100", 600_000),
    Case("Qwen3-32B QLoRA", "Qwen3", _QWEN3_32B, "qlora", "H100", 250_000),
    Case("gpt-oss-20b QLoRA", "GptOss", _GPT_OSS_20B, "qlora", "H100", 380_000, (), "flex_attention"),
    Case("Llama-3.1-8B LoRA", "Llama", _LLAMA_8B, "lora", "RTX 4090", 64_000, ("checkpointing.keep=none",)),
    Case("SmolLM2-1.7B full tuning", "Llama", _SMOLLM2, "full", "RTX 4090", 128_000),
)


@dataclass(frozen=True)
class Row:
    """The longest sequence of a case, with its bytes."""

    name: str
    card: str
    settings: str
    tokens: int
    wanted: int
    needs: int
    """Of the card: the peak with its margin."""
    host: int


def longest(case: Case, most: int = 1 << 21) -> Row:
    """Bytes grow nearly in a line: each guess is where one through two predictions reaches the memory of the card."""
    config, card = case.config(), find_card(case.card)
    sites = walk_config(config)
    setup = setup_on(card, Setup(memory=card.memory))
    tracer = Tracer(Step(config, Training(), sites, load_recipe("long-context", case.settings)))

    def at(steps: int) -> Prediction:
        training = Training(
            1, steps * STEP, train=case.train, adapter_fp32=case.train == "lora", attention=case.attention
        )
        return combine(tracer.at(training), setup)

    low, high, best = 0, most // STEP, None
    guess, needs = case.wanted // STEP, {}
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        found = at(guess)
        needs[guess] = found.needs
        if found.needs > card.memory:
            high = guess
        else:
            low, best = guess, found
        guess = _crossing(needs, card.memory) if len(needs) > 1 else guess + (1 if low == guess else -1)
    return Row(
        case.name,
        card.name,
        " ".join(case.settings),
        low * STEP,
        case.wanted,
        best.needs if best else 0,
        best.offloaded if best else 0,
    )


def _crossing(needs: Mapping[int, int], memory: int) -> int:
    """The last length that fits, by the two predictions that are nearest to `memory`."""
    (a, at_a), (b, at_b) = sorted(needs.items(), key=lambda each: abs(each[1] - memory))[:2]
    if at_a == at_b:
        return max(a, b)
    return a + math.floor((memory - at_a) * (b - a) / (at_b - at_a))


def table(rows: Sequence[Row]) -> Table:
    found = Table("training", "card", "recipe long-context", "longest", "wanted", "needs, GiB", "host, GiB", box=None)
    for row in rows:
        numbers = f"{row.tokens:,}", f"{row.wanted:,}", f"{row.needs / GIB:.1f}", f"{row.host / GIB:.0f}"
        found.add_row(row.name, row.card, row.settings or "as it is", *numbers)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", metavar="TEXT", default="", help="rows whose name has this in it")
    parser.add_argument("--check", action="store_true", help="exit 1 where a sequence is shorter than wanted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers with versions to FILE")
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    cases = [case for case in CASES if arguments.only in case.name]
    if not cases:
        parser.error(f"no row has '{arguments.only}' in its name; there are: {', '.join(case.name for case in CASES)}")
    rows = [longest(case) for case in cases]
    Console(width=None if sys.stdout.isatty() else 130).print(table(rows))
    if arguments.json:
        write_json(arguments.json, document([], "benchmarks.longest", dry_run=True, rows=[asdict(row) for row in rows]))
    return EXIT_SHORT if arguments.check and any(row.tokens < row.wanted for row in rows) else EXIT_OK


if __name__ == "__main__":
    raise SystemExit(main())
