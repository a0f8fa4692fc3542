"""The preset of `benchmarks.finetune` whose weights are in 4 bits."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.settings import PAPERS
from benchmarks.training import train
from benchmarks.ways import STOCK


def test_the_small_llama_in_4_bits_trains_and_memopt_keeps_fewer_bytes() -> None:
    setting = replace(PAPERS["llama-qlora"], batch=2, seq=16).setting("cpu", 3)
    stock, patched = (train(setting, way, 0) for way in (STOCK, "exact-unfolded"))
    assert stock.rounding is None  # there are no weights of more than 4 bits
    assert patched.gradient_error < 1e-5
    assert patched.kept < stock.kept
