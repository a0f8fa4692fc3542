"""The walk of a real-sized config takes seconds and no memory to speak of."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WALK = """
import resource, time, torch, transformers
torch.set_num_threads(1)
from memopt.walk.observe import walk_config
config = transformers.LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
)
start = time.process_time()
sites = walk_config(config)
seconds = time.process_time() - start
print(sum(norm.foldable for norm in sites.norms), len(sites.blocks), seconds)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts KiB on Linux only")
def test_an_8b_llama_is_walked_in_seconds_within_a_gigabyte_and_a_half() -> None:
    run = subprocess.run([sys.executable, "-c", _WALK], capture_output=True, text=True, check=True)
    folds, blocks, seconds, gib = map(float, run.stdout.split())
    assert (folds, blocks) == (64, 32)
    assert seconds < 20  # of processor time: a busy machine does not count
    assert gib < 1.5
