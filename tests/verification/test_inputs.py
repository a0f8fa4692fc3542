"""What a verification runs models with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.errors import InputsError
from memopt.verification import inputs
from memopt.verification.inputs import NoInputs, probe_inputs
from tests.stations import StationsConfig, StationsModel, stations_batch


@pytest.fixture
def stations() -> StationsModel:
    torch.manual_seed(0)
    return StationsModel(StationsConfig()).to(torch.bfloat16).eval()


def test_a_batch_with_labels_needs_no_others(stations: StationsModel, tmp_path: Path) -> None:
    probes = probe_inputs(stations, tmp_path, stations_batch())
    assert probes.targets == ({},)
    assert (probes.rows, probes.tokens_per_row, probes.guessed) == (2, None, False)


def test_a_batch_without_labels_gets_some(stations: StationsModel, tmp_path: Path) -> None:
    batch = {name: value for name, value in stations_batch().items() if name != "labels"}
    probes = probe_inputs(stations, tmp_path, batch)
    assert probes.targets[0]["labels"].shape == (2,)


def test_a_processor_comes_after_the_guess(
    stations: StationsModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoInputs, match="--inputs"):
        probe_inputs(stations, tmp_path)

    def processed(*arguments: Any, **options: Any) -> list[dict[str, Any]]:
        return [{"weather_by_station": None}, stations_batch()]

    monkeypatch.setattr(inputs, "processed_batches", processed)
    assert probe_inputs(stations, tmp_path).source == "made by the model's processor"


def test_a_batch_that_does_not_fit_is_the_users_error(stations: StationsModel, tmp_path: Path) -> None:
    with pytest.raises(InputsError, match="does not run with the inputs that were given") as raised:
        probe_inputs(stations, tmp_path, {"weather_by_station": torch.ones(2, 3)})
    assert not isinstance(raised.value, NoInputs)
