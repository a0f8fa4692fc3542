"""Whole training loops: batches of a DataLoader, accumulation, evaluation and generation between steps, two devices."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import memopt
from memopt.verification.gradient import compare_gradients
from tests.device.emulator.install import counting
from tests.device.scenarios import Way, batch, built, patched
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import gradients_of

RATE, ACCUMULATED = 1e-2, 2


def train(model: Any, data: list[dict[str, torch.Tensor]], device: str | None = "cuda") -> float:
    """Two steps of SGD of two micro-batches each, evaluation between them, then the gradients of a third."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
    loader = DataLoader(data, batch_size=None, pin_memory=device is not None)
    loss = torch.zeros(())
    for i, inputs in enumerate(loader):
        if device is not None:
            inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
        loss = model(**inputs).loss
        (loss / ACCUMULATED).backward()
        if (i + 1) % ACCUMULATED == 0 and i + 1 < len(data):
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                assert model(**inputs).loss.isfinite()
            model.train()
    return loss.item()


@pytest.mark.parametrize(
    "way",
    [Way("llama"), Way("bert", checkpointing="levels"), Way("t5", checkpointing="offload"), Way("gpt2", "lora")],
    ids=str,
)
@pytest.mark.rotates(3)
def test_a_loop_follows_stocks(way: Way) -> None:
    data = [batch(way, "cpu", seed) for seed in range(3 * ACCUMULATED)]
    wide = [{k: t.double() if t.is_floating_point() else t for k, t in each.items()} for each in data]
    stock, other, exact = built(way), built(way), built(way, "cpu").double()
    train(exact, wide, None)
    stock_loss = train(stock, data)
    patched(way, other)
    loss = train(other, data)
    checks = compare_gradients(
        [on_cpu(other)], [on_cpu(stock)], gradients_of(exact), way.computed_in, "fp64", stock_loss, loss
    )
    assert all(check.status == "pass" for check in checks), checks


def on_cpu(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in gradients_of(model).items()}


@pytest.mark.parametrize("name", ["llama", "t5", "gpt2"])
def test_generation_between_steps_is_stocks(name: str) -> None:
    way = Way(name)
    model, inputs = built(way), batch(way)
    ids = inputs["input_ids"][:, :4]

    def generated() -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            found = model.generate(ids, max_new_tokens=4, do_sample=False)
        model.train()
        return found

    expected = generated()
    patched(way, model)
    model(**inputs).loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(generated(), expected)


#: Where the layers and the head of a Llama lie.
MAPS = {
    "head beside the last block": {"embed": 0, "layers": (0, 1), "head": 1},
    "head beside the embedding": {"embed": 0, "layers": (0, 1), "head": 0},
    "head alone on its device": {"embed": 0, "layers": (0, 0), "head": 1},
    "head on the first device, all else on the second": {"embed": 1, "layers": (1, 1), "head": 0},
}


@pytest.mark.parametrize("recipe", ["exact-unfolded", "exact-levels"])
@pytest.mark.parametrize("places", MAPS.values(), ids=MAPS)
@pytest.mark.rotates(3)
def test_two_devices_give_the_gradients_of_stock_and_a_loss_in_parts(places: dict[str, Any], recipe: str) -> None:
    from accelerate import dispatch_model

    from memopt.plan.recipe import load_recipe

    device_map = {
        "model.embed_tokens": places["embed"], "model.rotary_emb": places["embed"],
        **{f"model.layers.{i}": device for i, device in enumerate(places["layers"])},
        "model.norm": places["layers"][-1], "lm_head": places["head"],
    }  # fmt: skip
    model = dispatch_model(tiny_model("llama"), device_map)
    inputs = {name: tensor.to(f"cuda:{places['embed']}") for name, tensor in tiny_inputs("llama").items()}
    exact = tiny_model("llama").double()
    exact(**tiny_inputs("llama")).loss.backward()

    def measured() -> tuple[float, dict[str, torch.Tensor], int]:
        for _ in range(2):
            model.zero_grad()
            with counting() as count:
                loss = model(**inputs).loss
                loss.backward()
        return loss.item(), on_cpu(model), count.waits.total()

    stock_loss, stock, stock_waits = measured()
    memopt.patch(model, load_recipe(recipe))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*whole.*")
        loss, found, waits = measured()
    checks = compare_gradients([found], [stock], gradients_of(exact), torch.float32, "fp64", stock_loss, loss)
    assert all(check.status == "pass" for check in checks), checks
    assert waits <= stock_waits
