"""CPU seconds of whole `memopt` commands that answer whether a step fits, imports included.

    python -m benchmarks.report_speed                print the table
    python -m benchmarks.report_speed --check        and exit 1 where a command takes more than its limit
    python -m benchmarks.report_speed --only TEXT    only commands with TEXT in them

Each command runs in a fresh process, on a config of the published shapes in a folder of its own. There are no weights.

User and system seconds are counted, of the process and of what it forked, so that other work on the machine
counts little. Limits leave room for a slower machine than the one that they were measured on, times about 1.5.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import (
    Gemma2Config,
    GptOssConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    T5Config,
    ViTConfig,
    WhisperConfig,
)


def _llama(hidden: int, inner: int, layers: int, heads: int) -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip


#: Name -> its config of the published shapes, and the class that has its head.
MODELS: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "Qwen3.5-9B": (
        lambda: Qwen3_5TextConfig(
            hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=16,
            num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
            vocab_size=248320, tie_word_embeddings=False,
        ),
        "Qwen3_5ForCausalLM",
    ),
    "Llama-3-8B": (lambda: _llama(4096, 14336, 32, 32), "LlamaForCausalLM"),
    "Llama-3-70B": (lambda: _llama(8192, 28672, 80, 64), "LlamaForCausalLM"),
    "Qwen3-30B-A3B": (
        lambda: Qwen3MoeConfig(
            vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
            num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
            num_experts_per_tok=8, max_position_embeddings=40960,
        ),
        "Qwen3MoeForCausalLM",
    ),
    "Gemma-2-9B": (
        lambda: Gemma2Config(
            vocab_size=256000, hidden_size=3584, intermediate_size=14336, num_hidden_layers=42,
            num_attention_heads=16, num_key_value_heads=8, head_dim=256,
        ),
        "Gemma2ForCausalLM",
    ),
    "Qwen3-Next-80B-A3B": (lambda: Qwen3NextConfig(max_position_embeddings=40960), "Qwen3NextForCausalLM"),
    "Granite-4-h-micro": (
        lambda: GraniteMoeHybridConfig(
            vocab_size=100352, hidden_size=2048, intermediate_size=2048, num_hidden_layers=40,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=40960, num_local_experts=0,
            shared_intermediate_size=8192, mamba_n_heads=64, mamba_d_state=128, position_embedding_type="nope",
            layer_types=["attention" if at % 10 == 5 else "mamba" for at in range(40)],
        ),
        "GraniteMoeHybridForCausalLM",
    ),
    "gpt-oss-20b": (
        lambda: GptOssConfig(num_hidden_layers=24, num_local_experts=32, max_position_embeddings=40960),
        "GptOssForCausalLM",
    ),
    "Qwen2.5-VL-7B": (
        lambda: Qwen2_5_VLConfig(
            text_config={
                "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                "num_key_value_heads": 4, "vocab_size": 152064,
            },
            vision_config={
                "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
            },
        ),
        "Qwen2_5_VLForConditionalGeneration",
    ),
    "T5-3B": (
        lambda: T5Config(vocab_size=32128, d_model=1024, d_kv=128, d_ff=16384, num_layers=24, num_heads=32),
        "T5ForConditionalGeneration",
    ),
    "ViT-L": (
        lambda: ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096),
        "ViTForImageClassification",
    ),
    "Whisper-large-v3": (
        lambda: WhisperConfig(
            vocab_size=51866, d_model=1280, encoder_layers=32, decoder_layers=32, encoder_attention_heads=20,
            decoder_attention_heads=20, encoder_ffn_dim=5120, decoder_ffn_dim=5120, num_mel_bins=128,
        ),
        "WhisperForConditionalGeneration",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command line, and the most CPU seconds that it may take."""

    words: str
    """With the name of a model in braces."""
    limit: float


CARD = "--gpu a100-80gb"
LORA = "--train lora --batch 1 --seq 4096"
COMMANDS = (
    Command(f"report {{Qwen3.5-9B}} {LORA}", 24),
    Command(f"report {{Qwen3.5-9B}} {LORA} {CARD}", 165),
    Command(f"report {{Llama-3-8B}} {CARD}", 13),
    Command("report {Llama-3-8B} --train lora --batch 4 --seq 4096 --budget 40GiB", 36),
    Command(f"report {{Llama-3-70B}} {CARD} --sharding fsdp --devices 8", 17),
    Command("report {Qwen3-Next-80B-A3B} --gpu h100 --train lora --seq 2048 --sharding fsdp --devices 8", 150),
    Command("report {Granite-4-h-micro} --gpu rtx4090 --train lora --seq 4096", 180),
    Command("report {gpt-oss-20b} --gpu h100 --train qlora --seq 8192", 43),
    Command(f"report {{Qwen2.5-VL-7B}} --gpu h100 {LORA} --images 1", 110),
    Command(f"report {{Qwen3-30B-A3B}} {CARD}", 22),
    Command(f"report {{Gemma-2-9B}} {CARD}", 26),
    Command(f"report {{T5-3B}} {CARD}", 39),
    Command(f"report {{ViT-L}} {CARD} --precision bf16-mixed", 14),
    Command(f"report {{Whisper-large-v3}} {CARD} --precision bf16-mixed --batch 8", 37),
    Command("report ./missing", 0.5),
    Command("report {ViT-L} --nope", 0.5),
    Command("report {ViT-L} --recipe nope", 0.5),
    Command("report {ViT-L} --html {ViT-L}/config.json", 0.5),
    Command("patch ./missing", 0.5),
)


def seconds_of(words: list[str], folder: Path) -> float:
    """CPU seconds of the command line `words`, whatever its exit code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    where = {"cwd": folder, "env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([sys.executable, "-m", "memopt", *words], check=False, **where)  # type: ignore[call-overload]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measured(commands: tuple[Command, ...]) -> Iterator[tuple[Command, float]]:
    """Every command with its CPU seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, (config_of, architecture) in MODELS.items():
            if any(f"{{{model}}}" in command.words for command in commands):
                config = config_of()
                config.architectures, config.dtype = [architecture], "bfloat16"
                config.save_pretrained(folder / model)
        for command in commands:
            words = command.words.replace("{", "./").replace("}", "").split()
            yield command, seconds_of(words, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 where a command takes more than its limit")
    parser.add_argument("--only", metavar="TEXT", default="", help="only commands with TEXT in them")
    given = parser.parse_args()
    chosen = tuple(command for command in COMMANDS if given.only in command.words)
    table, slow = Table("memopt", "CPU seconds", "limit"), 0
    for command, seconds in measured(chosen):
        print(f"{seconds:7.1f} s  memopt {command.words}", file=sys.stderr)
        table.add_row(command.words.replace("{", "").replace("}", ""), f"{seconds:.2f}", f"{command.limit:g}")
        slow += seconds > command.limit
    Console(width=120).print(table)
    return 1 if given.check and slow else 0


if __name__ == "__main__":
    sys.exit(main())
