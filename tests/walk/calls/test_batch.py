"""Batches that users give: reading, checking and describing them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import BatchEncoding

from memopt.errors import InputsError
from memopt.walk.calls.batch import (
    check_names,
    describe,
    from_description,
    in_words,
    placed,
    read_batch,
    rows_of,
    tokens_of,
)
from tests.factories import tiny_model
from tests.stations import stations_batch

IDS = torch.arange(8).reshape(2, 4)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_saved_batch_is_read_as_it_was(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"batch{suffix}"
    save_file({"input_ids": IDS}, path) if suffix == ".safetensors" else torch.save({"input_ids": IDS}, path)
    assert torch.equal(read_batch(path)["input_ids"], IDS)


def test_lists_of_numbers_become_tensors_and_other_values_stay(tmp_path: Path) -> None:
    torch.save({"input_ids": IDS.tolist(), "use_cache": False, "masks": [IDS, IDS]}, tmp_path / "batch.pt")
    batch = read_batch(tmp_path / "batch.pt")
    assert torch.equal(batch["input_ids"], IDS)
    assert batch["use_cache"] is False
    assert isinstance(batch["masks"], list)


def save(content: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_bytes(b"not a file of torch"), "'"),
        (save(IDS), "holds a Tensor, not a dict"),
        (save({}), "empty dict"),
        (save({0: IDS}), "no argument's name"),
        (save({"input_ids": IDS[:0]}), "empty tensor (0 x 4)"),
        (save({"input_ids": [[1, 2], [3]]}), "different lengths"),
        (save(BatchEncoding({"input_ids": IDS})), "runs no code"),
    ],
)
def test_a_bad_file_is_one_sentence_with_the_way_out(tmp_path: Path, write: Callable[[Path], None], words: str) -> None:
    write(tmp_path / "batch.pt")
    with pytest.raises(InputsError) as raised:
        read_batch(tmp_path / "batch.pt")
    assert words in raised.value.message
    assert "\n" not in str(raised.value)
    assert "processor(" in str(raised.value.hint)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"input_ids": Code()}, tmp_path / "batch.pt")
    with pytest.raises(InputsError, match="runs no code"):
        read_batch(tmp_path / "batch.pt")
    assert not (tmp_path / "ran").exists()


def test_an_argument_that_no_forward_takes_is_refused_although_kwargs_would_swallow_it() -> None:
    llama = tiny_model("llama")
    with pytest.raises(InputsError, match=r"no argument 'input_id'\. Did you mean 'input_ids'"):
        check_names(llama, {"input_id": IDS})
    check_names(llama, {"input_ids": IDS, "output_attentions": True})


def test_floating_tensors_take_the_models_dtype_wherever_they_are() -> None:
    moved = placed(stations_batch(), "meta", torch.bfloat16)["weather_by_station"]
    assert (moved["readings"].dtype, moved["station"].dtype) == (torch.bfloat16, torch.int64)
    assert moved["readings"].is_meta


def test_a_description_remembers_shapes_and_sizes_but_no_data() -> None:
    batch = {**stations_batch(), "input_ids": IDS, "image_grid_thw": torch.tensor([[1, 4, 6]]), "flag": True}
    described = describe(batch)
    assert "values" not in str({name: form for name, form in described.items() if name != "image_grid_thw"})
    again = from_description(described)
    assert again["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert again["flag"] is True
    assert (again["input_ids"].shape, again["input_ids"].dtype, again["input_ids"].is_meta) == ((2, 4), IDS.dtype, True)
    assert again["weather_by_station"]["readings"].shape == (2, 12, 5)


def test_the_size_of_a_batch_is_that_of_its_ids() -> None:
    batch = {"pixel_values": torch.ones(32, 7), "input_ids": IDS}
    assert (rows_of(batch), tokens_of(batch)) == (2, 4)
    assert (rows_of(stations_batch(rows=3)), tokens_of(stations_batch())) == (3, None)
    assert in_words({"a": {"b": IDS}, "flag": True}) == "a (b 2 x 4), flag"


@pytest.mark.parametrize("content", [b"NaN", b"\x80", b"}", b"}e.", b"T\x01", b"", b"PK\x03\x04", b"\x80\x02J\x00."])
def test_what_an_unpickler_stumbles_over_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "batch.pt"
    path.write_bytes(content)
    with pytest.raises(InputsError, match=r"batch\.pt"):
        read_batch(path)
