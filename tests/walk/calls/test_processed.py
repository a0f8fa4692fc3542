"""Batches that a model's own processor makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, Wav2Vec2Config, Wav2Vec2FeatureExtractor

from memopt.walk.calls.processed import processed_batches
from memopt.walk.models.build import build_meta
from memopt.walk.observe import walk_folder
from tests.stations import STATIONS, StationsConfig


class StationsProcessor:
    """Reads a text that holds its placeholder, and an image."""

    image_token = "<map>"
    image_processor = object()
    tokenizer = object()

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, images: Any = None, text: Any = None, audio: Any = None, **kwargs: Any) -> dict[str, Any]:
        self.texts.append(text[0])
        if images is None or self.image_token not in text[0]:
            raise ValueError("no map")
        assert audio is None
        hours = torch.arange(12).expand(len(images), -1)
        readings = torch.as_tensor(images[0][0, :12, :1].astype("float32")).expand(len(images), 12, 5).clone()
        return {"weather_by_station": {"readings": readings, "station": hours % STATIONS}, "stamp": hours}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    processor = StationsProcessor()
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda *arguments, **options: processor)
    (tmp_path / "processor_config.json").write_text("{}")
    return tmp_path


def test_a_processor_drives_the_walk_where_no_guess_runs(folder: Path) -> None:
    sites, batch = walk_folder(StationsConfig(), folder)
    assert sites.ran
    assert all(norm.foldable for norm in sites.norms)
    assert batch is not None
    assert set(batch) == {"weather_by_station"}  # no argument that the forward does not take


def test_the_processors_own_placeholder_stands_in_the_text(folder: Path) -> None:
    processor = AutoProcessor.from_pretrained(folder)
    list(processed_batches(build_meta(StationsConfig()), folder))
    assert processor.texts[0].startswith("<map>")


def test_without_a_processor_or_with_a_broken_one_nothing_is_made(tmp_path: Path) -> None:
    model = build_meta(StationsConfig())
    assert list(processed_batches(model, tmp_path)) == []
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Nothing"}')
    assert list(processed_batches(model, tmp_path)) == []
    sites, batch = walk_folder(StationsConfig(), tmp_path)
    assert (sites.ran, batch) == (False, None)


def test_a_feature_extractor_makes_sounds(tmp_path: Path) -> None:
    Wav2Vec2FeatureExtractor().save_pretrained(tmp_path)
    config = Wav2Vec2Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config.save_pretrained(tmp_path)
    (batch,) = processed_batches(build_meta(config), tmp_path)
    assert batch["input_values"].shape == (2, 16_000)
