"""`torch.set_default_device("cuda")`: memopt's functions run as without it, and steps wait no more for the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import memopt
from memopt.patches.sampled_linear.gradient_memory import GradientMemory
from tests.device.emulator.install import counting
from tests.factories import tiny_inputs, tiny_model


@pytest.fixture
def cuda_by_default() -> Iterator[None]:
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


def batch(name: str) -> dict[str, Tensor]:
    with torch.device("cpu"):
        return {key: tensor.to("cuda") for key, tensor in tiny_inputs(name).items()}


def waits_of_a_step(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    for _ in range(3):  # the first steps fill caches
        with counting() as count:
            model(**inputs).loss.backward()
    return int(count.waits.total())


@pytest.mark.parametrize("recipe", ["exact-unfolded", "long-context", "int8", "sampled", "approx-8bit"])
@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.usefixtures("cuda_by_default")
def test_a_model_is_patched_and_waits_no_more_than_stock(name: str, recipe: str) -> None:
    with torch.device("cpu"):
        model = tiny_model(name).to("cuda").train()
    stock = waits_of_a_step(copy.deepcopy(model), batch(name))
    memopt.patch(model, recipe)
    assert torch.get_default_device().type == "cuda"
    assert waits_of_a_step(model, batch(name)) <= stock


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched folder."""
    place = tmp_path_factory.mktemp("default_device")
    tiny_model("llama").save_pretrained(place / "stock")
    memopt.patch_checkpoint(place / "stock", out=place / "patched")
    return place / "patched"


def test_a_loaded_model_is_where_stock_would_be(folder: Path, cuda_by_default: None) -> None:
    stock = AutoModelForCausalLM.from_pretrained(folder)
    model = memopt.load(folder)
    assert {p.device for p in model.parameters()} == {p.device for p in stock.parameters()}


def test_a_folder_is_verified_and_reported_as_without_it(folder: Path, cuda_by_default: None) -> None:
    assert memopt.verify(folder, level=("weights", "forward", "gradient")).status == "pass"
    report, fit = str(memopt.report(folder)), str(memopt.fit(folder))
    torch.set_default_device(None)
    assert str(memopt.report(folder)) == report
    assert str(memopt.fit(folder)) == fit


@pytest.mark.usefixtures("cuda_by_default")
def test_a_folder_is_written(folder: Path, tmp_path: Path) -> None:
    memopt.patch_checkpoint(folder.parent / "stock", out=tmp_path / "again")
    assert (tmp_path / "again" / "memopt.json").is_file()


@pytest.mark.usefixtures("cuda_by_default")
def test_the_gradient_memory_is_on_the_host() -> None:
    memory = GradientMemory(samples=2, max_tokens=3, linears=1)
    with counting() as count:
        step = memory.begin(torch.tensor([1], device="cpu"))
        assert step is not None
        places = step.places(1, 3, None, torch.device("cuda"))
        step.record(0, places, torch.ones(3))
    assert not count.waits
    memory.flush()
    again = memory.begin(torch.tensor([1], device="cpu"))
    assert again is not None
    recalled = again.recall(0, places)
    assert recalled is not None
    assert recalled.tolist() == [1.0, 1.0, 1.0]
