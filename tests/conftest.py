"""What every test shares: a quiet offline environment, a small thread pool, skipped GPU tests, two pretrained models.

Tiny models come from `tests/factories.py`.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

# Read when transformers and tokenizers are first imported, so they are set before any test module is.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Binaries of kernels are compiled once for the sources they came from (memopt.kernels.tools.binary_cache).
os.environ.setdefault("MEMOPT_AOT_CACHE", str(Path(__file__).parents[1] / "build" / "aot"))

import pytest
import torch

from examples.demo.fetch_models import FetchError, fetch

# Tiny tensors lose more in waking threads than they win; OMP_NUM_THREADS chooses another number.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, a pretrained Llama in bf16 (30 layers x 576), with its tokenizer."""
    return _pretrained("SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Folder of all-MiniLM-L6-v2, a pretrained BERT in fp32 (6 layers x 384), with its tokenizer."""
    return _pretrained("all-MiniLM-L6-v2")


def _pretrained(name: str) -> Path:
    try:
        return fetch(name)
    except FetchError as error:
        pytest.skip(str(error))


def pytest_collection_finish() -> None:
    """Take what imports have made out of the garbage collector's sight: a collection costs a tenth of it.

    Tests that count bytes collect before and after. What a test makes itself is looked through as ever.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm GPU; torch finds none"))
