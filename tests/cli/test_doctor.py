"""`memopt doctor`: what is here, and what is off and why."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from memopt.cli import doctor
from memopt.torch_compat import lookup
from tests.cli.conftest import Run

Memopt = Callable[..., Run]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)


def test_without_a_gpu_it_says_that_kernels_are_off(memopt: Memopt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = memopt("doctor")
    assert (run.code, run.err) == (0, "")
    assert "Device: no CUDA or ROCm device." in run.out
    assert "Off: Triton kernels, since there is no GPU" in run.out
    found = json.loads(memopt("doctor", "--json").out)
    assert found["packages"]["torch"] == importlib.metadata.version("torch")
    assert [each.partition(",")[0] for each in found["off"]] == ["Triton kernels"]


@pytest.mark.usefixtures("gpu")
def test_with_all_there_nothing_is_off(memopt: Memopt) -> None:
    run = memopt("doctor")
    assert "Device: NVIDIA H100, 80.0 GiB, compute capability 9.0, and 1 more." in run.out
    assert "Nothing is off." in run.out


@pytest.mark.usefixtures("gpu")
def test_each_thing_that_is_off_has_its_reason(memopt: Memopt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_missing", {"torch.x": lookup.Missing("torch.x", "views are not copied")})
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    run = memopt("doctor", "--json")
    lost, kernels, adapters = json.loads(run.out)["off"]
    assert lost == f"views are not copied, since PyTorch {torch.__version__} lacks torch.x"
    assert kernels.startswith("Triton kernels, since triton is not installed")
    assert adapters.endswith("pip install peft")
    monkeypatch.setenv("MEMOPT_TRITON", "0")
    assert json.loads(memopt("doctor", "--json").out)["off"][1].startswith("Triton kernels, by MEMOPT_TRITON=0")
