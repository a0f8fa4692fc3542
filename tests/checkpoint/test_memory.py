"""Memory is bounded by the block, not by the model."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import torch

from tests.checkpoint.builders import write_checkpoint_files

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
WEIGHT = (4096, 10240)  # 80 MiB in bf16

MEASURE = """
    import re, sys
    from pathlib import Path
    import torch
    from memopt.checkpoint.sources.source import open_source
    from memopt.checkpoint.writer import write_checkpoint
    from memopt.walk.sites import Consumer
    from tests.checkpoint.builders import plan_of, rms_norm

    def peak():  # not ru_maxrss, which a process inherits from the one that started it
        return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

    torch.ones(1000, dtype=torch.float64).bfloat16()
    consumers = tuple(Consumer(f"{n}.weight", n, axis=0, bias=f"{n}.bias") for n in "ab")
    norm = rms_norm(0, hidden=4096, kind="layer", weight="n.weight", bias="n.bias", consumers=consumers)
    before = peak()
    write_checkpoint(open_source(sys.argv[1]), plan_of([norm]), Path(sys.argv[2]))
    print(peak() - before)
"""


def test_folding_160_mib_needs_less_than_100_mib(tmp_path: Path) -> None:
    tensors = {"n.weight": torch.full((4096,), 0.5).bfloat16(), "n.bias": torch.ones(4096).bfloat16()}
    for name in "ab":
        tensors[f"{name}.weight"] = torch.ones(WEIGHT, dtype=torch.bfloat16)
        tensors[f"{name}.bias"] = torch.zeros(WEIGHT[1], dtype=torch.bfloat16)
    model = write_checkpoint_files(tmp_path / "model", tensors)
    size = (model / "model.safetensors").stat().st_size
    assert size > 160 * MIB
    command = [sys.executable, "-c", textwrap.dedent(MEASURE), str(model), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100 * MIB
