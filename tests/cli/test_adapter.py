"""A folder with a PEFT adapter is no model: every command says so, and names the base model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

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
