"""The benchmark of the loss runs through without a GPU, and its check finds what is too slow or too large."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import loss, loss_account
from memopt.patches.loss import rows


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
    numbers = {
        "provider": "memopt, chunked",
        "frozen": False,
        "of_products": 1.1,
        "gradient_bytes": 2**30,
        "limit": 1.1,
    }
    return numbers | {"beside_bytes": 2**26, "peak_bytes": 2**30 + 2**26 + loss.ROUNDING} | changes


def test_the_check_finds_what_is_too_slow_too_large_or_broken() -> None:
    assert loss.shortfalls([row(), row(provider="stock", of_products=9.0)]) == []
    assert len(loss.shortfalls([row(of_products=1.11)])) == 1
    assert len(loss.shortfalls([row(peak_bytes=2**30 + 2**26 + loss.ROUNDING + 1)])) == 1
    assert loss.shortfalls([row(error="out of memory")]) == ["memopt, chunked, trained head: out of memory"]


LLAMA_8B, LLAMA_1B = loss_account.MODELS[:2]


def test_the_account_of_llamas_is_within_its_limits() -> None:
    found = [loss_account.account(LLAMA_8B, kind, room) for kind, room in (("trained", 1024), ("frozen", 0))]
    found.append(loss_account.account(LLAMA_1B, "trained"))
    assert loss_account.misses(found) == []
    assert [(each.way, round(each.products, 3)) for each in found] == [("at once", 3), ("at once", 2), ("by blocks", 4)]


def test_an_account_above_its_limits_is_said() -> None:
    slow = dataclasses.replace(loss_account.account(LLAMA_8B, "frozen"), seconds=1.0, launches=1000, beside=2**40)
    assert len(loss_account.misses([slow])) == 3


def test_the_account_counts_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller chunks are more launches of as many products."""
    small = loss_account.Shape("", 512, 64, 4096)
    whole = loss_account.account(small, "frozen")
    monkeypatch.setattr(rows, "SMALLEST_CHUNK", 2**21)
    parts = loss_account.account(small, "frozen")
    assert (whole.products, parts.products) == (2, 2)
    # A chunk of 256 rows is a product for its logits, a kernel and a product for the gradient of its rows.
    assert parts.launches == whole.launches + 3


@pytest.mark.parametrize("kind", loss_account.KINDS)
def test_every_way_to_train_a_head_has_an_account(kind: Any) -> None:
    found = loss_account.account(loss_account.Shape("", 512, 64, 4096), kind)
    # A weight as small is trained at once. Others are called for one row before, to know the dtype of their logits.
    products = {"trained": 3, "frozen": 2, "fp32, autocast": 3, "LoRA": 3 + 4 * (8 / 64 + 8 / 4096), "4 bits": 3}
    assert products[kind] <= found.products <= products[kind] * (1 + 1 / 512)
    assert found.seconds > found.products * loss_account.product_flops(found.shape) / loss_account.FLOPS


def test_what_operations_on_logits_hold_counts_in_the_room() -> None:
    gemma = next(each for each in loss_account.MODELS if each.cap)
    found = loss_account.account(gemma, "trained")
    of_x = gemma.tokens * gemma.hidden * 2
    assert found.beside <= rows.GPU_CHUNK + of_x  # the fp32 sum of the gradient of x takes once more than it
