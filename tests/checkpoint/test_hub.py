"""What the hub refuses, in one sentence with the way out."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from memopt.checkpoint.sources.hub import locate
from memopt.environment import hub
from memopt.errors import ModelError

BELONGS = [
    "model-00001-of-00002.safetensors", "adapter.fra.bin", "adapter.fra.safetensors", "2_Dense/model.safetensors",
    "2_Dense/pytorch_model.bin", "spk_dict.pt", "speaker_embeddings/en_speaker_0_semantic_prompt.npz",
]  # fmt: skip
COPIES = [
    "pytorch_model-00001-of-00002.bin", "onnx/model.onnx_data", "original/consolidated.00.pth", "original/x.pth",
    "consolidated.safetensors", "checkpoint-10/model.safetensors", "checkpoint-10/optimizer.pt", "optimizer.pt",
    "rng_state_0.pth", "training_args.bin", "step5/model-00001-of-00002.safetensors", "adapter_model.safetensors",
    "tf_model.h5", "flax_model.msgpack", "model.gguf", "openvino/openvino_model.bin",
]  # fmt: skip


def failure(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)  # their constructors want a response
    error.args = ("first line\nsecond line",)
    return error


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (errors.GatedRepoError, "gated"),
        (errors.RepositoryNotFoundError, "neither an existing folder nor a model on the hub"),
        (errors.RevisionNotFoundError, "no revision 'v9'"),
        (errors.LocalEntryNotFoundError, "the hub cache has no files of it"),
        (errors.OfflineModeIsEnabled, "the hub cache has no files of it"),
        (errors.HfHubHTTPError, "could not deliver"),
        (ConnectionError, "could not deliver the files of 'some/model' at revision 'v9': first line"),
    ],
)
def test_a_refusal_of_the_hub_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], words: str
) -> None:
    def refuse(*arguments: object, **options: object) -> str:
        raise failure(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=words) as caught:
        locate("some/model", revision="v9")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_the_variable_that_forbids_the_network_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1")
    assert variable in hub._why_offline()[0]


def test_pickles_are_fetched_only_if_allowed_and_only_without_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def download(model: str, *, revision: str | None, ignore_patterns: list[str], **_: object) -> str:
        calls.append(ignore_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    locate("some/model")
    assert all("pytorch_model*.bin" in ignored for ignored in calls)
    locate("some/model", allow_pickle=True)
    assert "pytorch_model*.bin" not in calls[-1]
    (tmp_path / "model.safetensors").touch()
    calls.clear()
    locate("some/model", allow_pickle=True)
    assert len(calls) == 1


def test_without_weights_no_weights_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def download(model: str, *, revision: str | None, ignore_patterns: list[str], **_: object) -> str:
        calls.append(ignore_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    locate("some/model", weights=False, allow_pickle=True)
    assert ["*.safetensors" in ignored and "*.bin" in ignored for ignored in calls] == [True]


def test_weights_that_belong_to_the_model_are_fetched_and_copies_of_it_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def download(model: str, *, ignore_patterns: list[str], **_: object) -> str:
        fetched.extend(huggingface_hub.utils.filter_repo_objects(BELONGS + COPIES, ignore_patterns=ignore_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    locate("some/model")
    assert fetched == BELONGS
