"""A folder with a PEFT adapter is no model: every command says so and names the base model; `--adapter` converts it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Run

Memopt = Callable[..., Run]


def adapter(folder: Path, base: object = "org/base-7b") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "peft_type": "LORA"}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize("command", ["patch", "verify", "report"])
def test_the_base_model_of_an_adapter_is_named(memopt: Memopt, tmp_path: Path, command: str) -> None:
    run = memopt(command, adapter(tmp_path / "lora"))
    assert (run.code, run.out) == (2, "")
    errors = [line for line in run.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "adapter of 'org/base-7b'" in errors[0]


@pytest.mark.parametrize("base", [None, "", 3])
def test_an_adapter_without_a_base_is_still_no_model(memopt: Memopt, tmp_path: Path, base: object) -> None:
    run = memopt("patch", adapter(tmp_path / "lora", base))
    assert run.code == 2
    assert "holds a PEFT adapter" in run.err


def test_an_adapter_beside_a_model_is_refused_too(memopt: Memopt, saved_llama: Path, tmp_path: Path) -> None:
    """transformers would load the adapter's base model instead of the folder's own weights."""
    both = adapter(Path(shutil.copytree(saved_llama, tmp_path / "both")))
    assert "adapter of 'org/base-7b'" in memopt("patch", both).err


@pytest.fixture
def trained(llama: Path) -> Path:
    """An adapter of the tiny Llama."""
    folder = adapter(llama.parent / "lora", str(llama))
    keys = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{one}.weight" for one in "AB")
    shapes = ((4, 64), (64, 4))
    tensors = {key: torch.randn(shape) for key, shape in zip(keys, shapes, strict=True)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_is_converted_for_the_patched_folder_and_back(memopt: Memopt, llama: Path, trained: Path) -> None:
    assert memopt("patch", llama).code == 0
    run = memopt("patch", "tiny-llama-memopt", "--adapter", trained)
    assert (run.code, run.err) == (0, "")
    assert "Wrote lora-folded: an adapter for the folded model, 1 of 2 tensors changed" in run.out
    assert "PeftModel.from_pretrained(memopt.load(" in run.out
    run = memopt("unpatch", "tiny-llama-memopt", "--adapter", "lora-folded", "--out", "back", "--json")
    document = json.loads(run.out)
    assert (run.code, document["output"], document["fits"]["form"]) == (0, "back", "stock")
    assert document["base"] == str(llama)
    name = "adapter_model.safetensors"
    before, after = load_file(trained / name), load_file(Path("back", name))
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=2**-22, atol=0.0)
    again = memopt("patch", "tiny-llama-memopt", "--adapter", "lora-folded")
    assert again.code == 2
    assert (
        "fits the folded form of tiny-llama already. Use it unchanged, or convert it back with `memopt unpatch"
        in again.err
    )
    again = memopt("unpatch", "tiny-llama-memopt", "--adapter", "lora-folded", "--out", "back")
    assert again.code == 2
    assert "is not empty. Choose another --out, or remove it first." in again.err  # there is no --force
    adapter(trained, None).joinpath(name).write_bytes(Path("back", name).read_bytes())
    run = memopt("patch", "tiny-llama-memopt", "--adapter", trained, "--out", "third")
    assert "The adapter names no base model: names and shapes fit, its weights were not compared." in run.err


def test_before_the_model_is_patched_the_command_for_that_is_named(memopt: Memopt, llama: Path, trained: Path) -> None:
    run = memopt("patch", llama, "--adapter", trained)
    assert run.code == 0
    assert f"memopt patch {llama} --out {llama.parent / 'tiny-llama-memopt'}" in run.out


def test_an_adapter_that_does_not_fit_ends_the_command(memopt: Memopt, llama: Path, trained: Path) -> None:
    assert memopt("patch", llama).code == 0
    run = memopt("unpatch", "tiny-llama-memopt", "--adapter", trained)
    assert (run.code, run.out) == (2, "")
    assert "it was trained on the stock model" in run.err
    assert not Path("lora-stock").exists()


def test_options_that_mean_nothing_for_an_adapter(memopt: Memopt, llama: Path, trained: Path) -> None:
    assert memopt("patch", llama, "--adapter", trained, "--force").code == 2


def test_a_converted_adapter_is_still_no_model(memopt: Memopt, llama: Path, trained: Path) -> None:
    assert memopt("patch", llama, "--adapter", trained).code == 0
    run = memopt("verify", "lora-folded")
    assert run.code == 2
    assert "holds a PEFT adapter" in run.err
