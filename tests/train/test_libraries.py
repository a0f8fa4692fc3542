"""Models of other libraries: memopt guesses their inputs, patches them, and changes no output and no gradient."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import memopt
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import stock_and_patched
from tests.zoo.libraries import MODELS, LibraryModel, sentence_transformer
from tests.zoo.library_rows import built, examine_library

#: Saved bytes of the patched model, as a share of stock's. Those of docs/coverage.md, rounded up.
MOST = {
    "vit_tiny_patch16_224": 0.65,
    "eva02_tiny_patch14_224": 0.55,
    "convnext_atto": 0.75,
    "resnet18": 0.88,
    "UNet2DConditionModel": 0.66,
    "DiTTransformer2DModel": 0.72,
    "FluxTransformer2DModel": 0.71,
    "SD3Transformer2DModel": 0.69,
    "WanTransformer3DModel": 0.68,
    "QwenImageTransformer2DModel": 0.67,
    "AutoencoderKL": 0.76,
    "SentenceTransformer": 0.7,
}
CHOSEN = [model for model in MODELS if model.name in MOST]


def _installed(model: LibraryModel) -> None:
    if not model.installed:
        pytest.skip(f"{model.library} is not installed")


@pytest.mark.parametrize("model", CHOSEN, ids=lambda model: model.name)
@pytest.mark.rotates(3)
def test_a_model_is_patched_without_inputs_and_stays_right(model: LibraryModel) -> None:
    _installed(model)
    row = examine_library(model)
    assert (row.status, row.reason) == ("ok", "")
    assert row.saved_bytes is not None
    stock, patched = row.saved_bytes
    assert patched <= MOST[model.name] * stock


@pytest.mark.parametrize("name", ["resnet18", "FluxTransformer2DModel"])
def test_nothing_is_reported_as_unseen(name: str) -> None:
    model = next(each for each in MODELS if each.name == name)
    _installed(model)
    stock, _ = built(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="memopt")
        memopt.patch(stock)
    assert memopt.plan_for(memopt.unpatch(stock)).sites.ran


@pytest.mark.parametrize("loss", ["MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss", "CoSENTLoss"])
def test_sentence_transformers_trainer_has_the_stock_losses_and_no_warning(loss: str, tmp_path: Path) -> None:
    library: Any = pytest.importorskip("sentence_transformers", reason="sentence_transformers is not installed")
    losses: Any = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    from datasets import Dataset

    texts = [f"w{place} w{place + 1}" for place in range(24)]
    columns: dict[str, Any] = {"first": texts[:12], "second": texts[12:]}
    if loss == "CoSENTLoss":
        columns["score"] = [place / 12 for place in range(12)]

    def trained(*callbacks: Any) -> list[float]:
        torch.manual_seed(0)
        model: Any = sentence_transformer()
        arguments = library.SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, logging_steps=1, report_to="none",
            save_strategy="no", disable_tqdm=True, seed=0, use_cpu=True,
        )  # fmt: skip
        trainer = library.SentenceTransformerTrainer(
            model=model, args=arguments, train_dataset=Dataset.from_dict(columns),
            loss=getattr(losses, loss)(model), callbacks=[*callbacks],
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="memopt")
            trainer.train()
        assert "recomputed" in str(memopt.summary(model)) or not callbacks
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    stock = trained()
    assert len(stock) == 3
    assert trained(memopt.TrainerCallback()) == pytest.approx(stock, rel=1e-5)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_trains_a_model_that_computes_its_loss(precision: str) -> None:
    fabric_of: Any = pytest.importorskip("lightning.fabric", reason="lightning is not installed").Fabric
    losses = []
    for model in stock_and_patched(lambda: tiny_model("llama")):
        fabric = fabric_of(accelerator="cpu", devices=1, precision=precision)
        running, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found = []
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="memopt")
            for _ in range(3):
                loss = running(**tiny_inputs("llama")).loss
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                found.append(float(loss.detach()))
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if precision == "32-true" else 2e-2)
