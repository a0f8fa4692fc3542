"""Checkpoints of patched models under each engine: exact to resume from, and plain where they are saved as models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.engines import Case, Kind, closing, engine, trained
from tests.distributed.pair import Pair

KINDS = ["ddp", "fsdp2", "zero2", "zero3"]
STEPS = 4


def resumed(rank: int, case: Case, folder: str) -> None:
    with closing(engine(case, case.patched())) as running:
        trained(case, running, rank, STEPS)
        running.save(Path(folder))
        saved = running.weights()
        whole = trained(case, running, rank, STEPS, first=STEPS)
    with closing(engine(case, case.patched())) as running:
        running.load(Path(folder))
        again = trained(case, running, rank, STEPS, first=STEPS)
    assert again.losses == whole.losses
    assert again.distance(whole) == 0
    with closing(engine(case, case.model())) as stock:  # whose checkpoint has the same names
        stock.load(Path(folder))
        assert _are_equal(stock.weights(), saved)


def _are_equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(others[name], tensor) for name, tensor in some.items())


@pytest.mark.parametrize("lora_dropout", [None, 0.1], ids=["full", "LoRA with dropout"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.rotates(3)
def test_resuming_is_exact(pair: Pair, kind: Kind, lora_dropout: float | None, tmp_path: Path) -> None:
    pair.call(resumed, Case(kind, lora_dropout=lora_dropout, adam=True, rate=1e-3), str(tmp_path))


def saved_twice(rank: int, case: Case, folder: str) -> dict[str, Tensor]:
    """Train a stock model and a patched one for a step and save both; the patched one's weights."""
    for name, model in (("stock", case.model()), ("patched", case.patched())):
        with closing(engine(case, model)) as running:
            trained(case, running, rank, 1)
            running.save_pretrained(Path(folder) / name)
            weights = running.weights()
    torch.distributed.barrier()
    return weights


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_a_plain_checkpoint(pair: Pair, kind: Kind, tmp_path: Path) -> None:
    import transformers

    weights, _ = pair.call(saved_twice, Case(kind, settings=(("tie_word_embeddings", True),)), str(tmp_path))
    stock, ours = tmp_path / "stock", tmp_path / "patched"
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in stock.iterdir())
    assert json.loads((ours / "config.json").read_text()) == json.loads((stock / "config.json").read_text())
    model, loading = transformers.LlamaForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert not any(loading.values())
    assert _are_equal(dict(model.named_parameters()), weights)
