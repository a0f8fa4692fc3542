"""How long the walk takes, and how much memory, for models in their real shapes; no weights, no GPU.

    python -m benchmarks.walk            print the table
    python -m benchmarks.walk --check    and exit 1 where a number is over its limit
    python -m benchmarks.walk --inputs [TYPE ...]
                                         how many model types each rule for inputs serves (all: over half an hour)

Seconds are CPU seconds of `walk_config`, which runs on one thread, after the imports: on a quiet machine the time that
one waits. They are the least of three fresh processes, since neighbours on a machine only ever add to them. Memory is
the most of the three, imports included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedConfig

from memopt.walk.observe import walk_config

_VOCABULARY = {"vocab_size": 128256, "bos_token_id": 128000, "eos_token_id": [128001, 128009]}


@dataclass(frozen=True)
class Shape:
    """A published model's shape and what its walk may cost."""

    config_class: str
    settings: dict[str, object]
    seconds: float
    gibibytes: float


SHAPES = {
    "Llama-3-8B": Shape("LlamaConfig", {"num_key_value_heads": 8, "intermediate_size": 14336, **_VOCABULARY}, 3.0, 1.0),
    "Llama-3-70B": Shape(
        "LlamaConfig",
        {
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            **_VOCABULARY,
        },
        7.0,
        1.0,
    ),
    "DeepSeek-V3 (671B)": Shape("DeepseekV3Config", {}, 12.0, 1.0),
}

_PROCESSES = 3


@dataclass(frozen=True)
class Cost:
    seconds: float
    gibibytes: float
    norms: int
    folded: int


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 where a number is over its limit")
    parser.add_argument("--inputs", nargs="*", metavar="TYPE", help="how many model types each rule for inputs serves")
    parser.add_argument("--worker", choices=SHAPES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inputs is not None:
        from benchmarks.walk_inputs import served  # what it imports would count as memory of the walk

        print("\n".join(served(arguments.inputs)))
        return 0
    if arguments.worker:
        print(json.dumps(asdict(measure(SHAPES[arguments.worker]))))
        return 0
    table = Table(title="What a walk costs", title_justify="left")
    for column in ("shape", "CPU seconds", "limit", "peak GiB", "limit", "norms", "folded"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    over = []
    for name, shape in SHAPES.items():
        cost = _least([_in_a_process(name) for _ in range(_PROCESSES)])
        numbers = (f"{cost.seconds:.1f}", f"{shape.seconds:g}", f"{cost.gibibytes:.2f}", f"{shape.gibibytes:g}")
        table.add_row(name, *numbers, str(cost.norms), str(cost.folded))
        if cost.seconds > shape.seconds or cost.gibibytes > shape.gibibytes:
            over.append(f"{name}: {numbers[0]} s of {numbers[1]}, {numbers[2]} GiB of {numbers[3]}")
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    for line in over:
        print(f"over its limit: {line}", file=sys.stderr)
    return 1 if arguments.check and over else 0


def measure(shape: Shape) -> Cost:
    """Walk the shape in this process."""
    config: PreTrainedConfig = getattr(transformers, shape.config_class)(**shape.settings)
    # transformers imports a model's code when the class is first asked for.
    getattr(transformers, shape.config_class.replace("Config", "ForCausalLM"))
    started = time.process_time()
    sites = walk_config(config)
    seconds = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
    return Cost(seconds, peak, len(sites.norms), sum(norm.foldable for norm in sites.norms))


def _least(costs: Sequence[Cost]) -> Cost:
    least = min(costs, key=lambda cost: cost.seconds)
    return replace(least, gibibytes=max(cost.gibibytes for cost in costs))


def _in_a_process(name: str) -> Cost:
    command = [sys.executable, "-m", "benchmarks.walk", "--worker", name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    raise SystemExit(main())
