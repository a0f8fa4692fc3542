"""The benchmark of the loss runs through without a GPU, and its check finds what is too slow or too large."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import loss


def test_it_runs_through_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loss.main(["--dry-run", "--json", str(tmp_path / "x.json")]) == 0
    assert "numbers mean nothing" in capsys.readouterr().out
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    for frozen in (False, True):
        timed = {row["provider"] for row in rows if row["frozen"] == frozen and "median" in row}
        assert timed >= {"products", "stock"} | ({"torch"} if hasattr(F, "linear_cross_entropy") else set())
    if not torch.cuda.is_available():
        assert loss.main([]) == 2


def row(**changes: Any) -> dict[str, Any]:
    numbers = {"provider": loss.CHECKED, "frozen": False, "of_products": 1.05, "gradient_bytes": 2**30}
    return numbers | {"chunk_bytes": 2**26, "peak_bytes": 2**30 + 2**26} | changes


def test_the_check_finds_what_is_too_slow_too_large_or_broken() -> None:
    assert loss.shortfalls([row(), row(provider="stock", of_products=9.0)]) == []
    assert len(loss.shortfalls([row(of_products=1.06)])) == 1
    assert len(loss.shortfalls([row(peak_bytes=2**30 + 2**26 + 1)])) == 1
    assert loss.shortfalls([row(error="out of memory")]) == ["memopt, chunked, trained head: out of memory"]
