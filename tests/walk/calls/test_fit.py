"""Batches made to fit the small twin, and walks that are driven by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from memopt.errors import InputsError
from memopt.walk.calls.batch import fitted, fitting
from memopt.walk.calls.twin import build_driven_twin
from memopt.walk.models.shrink.config import shrunken
from memopt.walk.observe import walk_config
from tests.factories import tiny_config
from tests.stations import StationsConfig, stations_batch
from tests.support.versions import needs

IMAGE = 31_000


@pytest.fixture(scope="module")
def configs() -> tuple[Any, Any]:
    config = LlamaConfig(vocab_size=32_000, hidden_size=512, num_hidden_layers=4, image_token_id=IMAGE)
    return config, next(shrunken(config, sizes=False))


def test_ids_become_those_of_the_small_vocabulary(configs: tuple[Any, Any]) -> None:
    config, small = configs
    ids = torch.tensor([[5, 600, IMAGE, 600], [small.image_token_id, -100, 31_999, 1]])
    batch = fitted({"input_ids": ids, "position_ids": ids, "image_sizes": ids}, config, small)
    new = batch["input_ids"]
    assert int(new.max()) < small.vocab_size
    assert (new == small.image_token_id).tolist() == (ids == IMAGE).tolist()  # and nothing else means an image
    assert new[0, 1] == new[0, 3]
    assert (new[0, 0], new[1, 1], new[1, 3]) == (5, -100, 1)
    assert batch["position_ids"] is ids
    assert batch["image_sizes"] is ids


def test_a_vocabulary_that_was_not_cut_leaves_ids_alone() -> None:
    config = tiny_config("llama")
    ids = torch.arange(60)[None]
    assert fitted({"input_ids": ids}, config, config)["input_ids"] is ids


def test_a_twin_is_tried_with_few_rows_first(configs: tuple[Any, Any]) -> None:
    config, small = configs
    batch = {"input_ids": torch.ones(5, 3, dtype=torch.long), "patches": torch.ones(40, 2)}
    first, whole = fitting(batch, config, small)
    assert (len(first["input_ids"]), len(first["patches"]), len(whole["input_ids"])) == (2, 40, 5)


def test_folds_of_a_model_that_nobody_can_guess_are_proved_with_its_batch() -> None:
    guessed = walk_config(StationsConfig())
    assert not guessed.ran
    assert not any(norm.foldable for norm in guessed.norms)
    sites = walk_config(StationsConfig(), inputs=stations_batch())
    assert sites.ran
    assert [norm.proof is not None and norm.proof < 1e-10 for norm in sites.norms] == [True, True]


def test_a_batch_beside_guessed_inputs_proves_the_same_folds() -> None:
    config = tiny_config("llama")
    ids = torch.arange(4, 24).reshape(2, 10)
    sites = walk_config(config, inputs={"input_ids": ids, "labels": ids})
    assert sites.traces == (("inputs", "ok"),)
    assert [norm.foldable for norm in sites.norms[:4]] == [True] * 4


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"labels": torch.zeros(2, dtype=torch.long)}, "weather_by_station"),
        ({"weather_by_station": {"readings": torch.ones(2, 3, 4), "station": torch.zeros(2, 3).long()}}, "4"),
        pytest.param(
            {"weather_by_station": {"readings": torch.ones(2, 3, 5), "station": torch.zeros(2, 3)}},
            "Long",
            marks=needs("torch", "2.13", "looks up embeddings by any dtype on meta"),
        ),
    ],
)
def test_a_batch_that_the_model_does_not_run_with_is_an_error(batch: dict[str, Any], words: str) -> None:
    with pytest.raises(InputsError, match=f"does not run with the inputs that were given.*{words}"):
        walk_config(StationsConfig(), inputs=batch)


def test_what_runs_on_no_twin_says_so() -> None:
    with pytest.raises(InputsError, match="No small twin runs"):
        build_driven_twin(StationsConfig(), {"weather_by_station": torch.ones(2, 3)})
