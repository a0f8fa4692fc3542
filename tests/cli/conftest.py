"""A tiny Llama on disk, and the command line run inside this process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from memopt.cli.main import main
from memopt.walk import observe
from memopt.walk.models.config import load_config
from memopt.walk.observe import walk_config
from memopt.walk.sites import Sites
from tests.factories import tiny_model


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str


@pytest.fixture
def memopt(capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """Run `memopt` with these arguments."""

    def run(*arguments: object) -> Run:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Run(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("llama")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    folder = tmp_path_factory.mktemp("llama") / "tiny-llama"
    model.save_pretrained(folder)
    (folder / "README.md").write_text("# Tiny\n")
    return folder


@pytest.fixture(scope="session")
def llama_sites(saved_llama: Path) -> Sites:
    return walk_config(load_config(saved_llama))


@pytest.fixture
def unwalked_llama(saved_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the tiny Llama in an empty current folder."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(saved_llama, tmp_path / "tiny-llama"))


@pytest.fixture
def llama(unwalked_llama: Path, llama_sites: Sites, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, with the walk's seconds spent once for all tests."""
    monkeypatch.setattr(observe, "walk_config", lambda config, **options: llama_sites)
    return unwalked_llama
