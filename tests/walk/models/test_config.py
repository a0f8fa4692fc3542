"""What is read of a config: a folder or the hub, remote code, sizes that no model has, the class it is built as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import transformers
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from memopt.errors import ModelError
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import load_config, model_class
from tests.walk.configs import make_config

REMOTE_CONFIG = """
from transformers import PreTrainedConfig
class ToyConfig(PreTrainedConfig):
    model_type = "toy_remote"
"""
REMOTE_MODEL = """
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from .configuration_toy import ToyConfig
class ToyModel(PreTrainedModel):
    config_class = ToyConfig
    def __init__(self, config):
        super().__init__(config)
        self.layer = nn.Linear(4, 4)
        self.post_init()
    def forward(self, inputs_embeds):
        return self.layer(inputs_embeds)
"""
REMOTE = {
    "model_type": "toy_remote",
    "architectures": ["ToyModel"],
    "auto_map": {"AutoConfig": "configuration_toy.ToyConfig", "AutoModel": "modeling_toy.ToyModel"},
}


def _folder(path: Path, settings: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(settings if isinstance(settings, str) else json.dumps(settings))
    return path


@pytest.fixture
def remote_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = _folder(tmp_path / "toy", REMOTE)
    (folder / "configuration_toy.py").write_text(REMOTE_CONFIG)
    (folder / "modeling_toy.py").write_text(REMOTE_MODEL)
    return folder


class _Response:
    """The little of an HTTP response that hub errors look at."""

    headers: dict[str, str] = {}  # noqa: RUF012
    status_code = 403
    request = None


def _hub_answers(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)


class TestLoadConfig:
    def test_reads_a_saved_folder(self, tmp_path: Path) -> None:
        make_config("llama", hidden_size=96).save_pretrained(tmp_path)
        config = load_config(tmp_path)
        assert (config.model_type, config.hidden_size) == ("llama", 96)

    def test_accepts_the_folder_as_text(self, tmp_path: Path) -> None:
        make_config("bert").save_pretrained(tmp_path)
        assert load_config(str(tmp_path)).model_type == "bert"

    def test_names_a_folder_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"The folder '.*nowhere' does not exist"):
            load_config(str(tmp_path / "nowhere"))

    def test_refuses_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_text("")
        with pytest.raises(ModelError, match="is a file, not a model folder"):
            load_config(tmp_path / "model.safetensors")

    def test_says_that_a_folder_without_config_is_not_a_model(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"is not a model: it has no config\.json"):
            load_config(tmp_path)

    def test_recognises_an_adapter_folder(self, tmp_path: Path) -> None:
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(ModelError, match="holds a PEFT adapter, not a model"):
            load_config(tmp_path)

    def test_says_where_the_json_breaks(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"not valid JSON: .* at line 2"):
            load_config(_folder(tmp_path, '{"model_type": "llama",\n oops}'))

    @pytest.mark.parametrize("text", ["[1, 2]", '"llama"', "3"])
    def test_refuses_json_that_is_no_object(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(ModelError, match="not a JSON object"):
            load_config(_folder(tmp_path, text))

    def test_names_an_unknown_model_type_and_the_installed_transformers(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"'nosuch'.*unknown to transformers") as caught:
            load_config(_folder(tmp_path, {"model_type": "nosuch"}))
        assert transformers.__version__ in str(caught.value)

    def test_says_that_the_model_type_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="has no 'model_type'"):
            load_config(_folder(tmp_path, {"hidden_size": 8}))

    def test_explains_a_field_of_the_wrong_type(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"does not fit model type 'llama'.*hidden_size"):
            load_config(_folder(tmp_path, {"model_type": "llama", "hidden_size": "wide"}))

    def test_names_the_flag_before_it_runs_remote_code(self, remote_folder: Path) -> None:
        with pytest.raises(ModelError, match="--trust-remote-code"):
            load_config(remote_folder)

    def test_runs_remote_code_with_the_flag(self, remote_folder: Path) -> None:
        config = load_config(remote_folder, trust_remote_code=True)
        assert type(config).__name__ == "ToyConfig"
        assert build_meta(config).layer.weight.is_meta

    def test_says_when_remote_code_does_not_load(self, remote_folder: Path) -> None:
        (remote_folder / "configuration_toy.py").write_text("class Other: pass")
        with pytest.raises(ModelError, match=r"The code that '.*toy' carries cannot be loaded"):
            load_config(remote_folder, trust_remote_code=True)

    def test_refuses_what_is_neither_a_path_nor_a_hub_id(self) -> None:
        with pytest.raises(ModelError, match="'a/b/c' is neither an existing folder nor a hub id"):
            load_config("a/b/c")

    def test_names_the_variable_that_keeps_it_offline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ModelError, match=r"'org/absent'.*HF_HUB_OFFLINE is set") as caught:
            load_config("org/absent")
        assert "config.json" in caught.value.message

    @pytest.mark.parametrize(
        ("error", "sentence"),
        [
            (GatedRepoError("gated", response=_Response()), "'org/it' on the hub is gated"),  # type: ignore[arg-type]
            (RevisionNotFoundError("no", response=_Response()), "has no revision 'v9'"),  # type: ignore[arg-type]
            (RepositoryNotFoundError("no", response=_Response()), "nor a model on the hub"),  # type: ignore[arg-type]
            (LocalEntryNotFoundError("no"), "the hub at .* does not answer"),
            (EntryNotFoundError("no"), r"not a transformers model: it has no config\.json"),
            (ConnectionResetError("reset by peer"), "could not deliver.*reset by peer"),
        ],
    )
    def test_turns_what_the_hub_says_into_a_sentence(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
    ) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("memopt.environment.hub.hub_answers", lambda *_: True)
        _hub_answers(monkeypatch, error)
        with pytest.raises(ModelError, match=sentence):
            load_config("org/it", revision="v9")

    @pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer", "depths", "num_experts", "image_size"])
    @pytest.mark.parametrize("nested", [False, True])
    def test_a_count_that_no_model_has_is_refused_by_name(self, tmp_path: Path, name: str, nested: bool) -> None:
        part: dict[str, Any] = {name: [2, 10**6] if name == "depths" else 10**6}
        folder = _folder(tmp_path, {"model_type": "llama", **({"parts": [part]} if nested else part)})
        with pytest.raises(ModelError, match=f"'{name}' is above 20,000"):
            load_config(folder)

    @pytest.mark.parametrize("settings", [{"num_hidden_layers": 0}, {"text_config": {"n_layer": -1}}], ids=str)
    def test_a_model_without_layers_is_refused_by_name(self, tmp_path: Path, settings: dict[str, Any]) -> None:
        with pytest.raises(ModelError, match=r"describes no model. Its '(num_hidden_layers|n_layer)' is (0|-1), and"):
            load_config(_folder(tmp_path, {"model_type": "llama", **settings}))


class TestModelClass:
    def test_is_the_named_architecture(self) -> None:
        config = make_config("bert", architectures=["BertForTokenClassification"])
        assert model_class(config) is transformers.BertForTokenClassification

    def test_ignores_an_architecture_that_transformers_lacks(self) -> None:
        assert model_class(make_config("llama", architectures=["MyLlama"])) is transformers.LlamaForCausalLM

    def test_ignores_an_architecture_of_another_config(self) -> None:
        assert model_class(make_config("llama", architectures=["BertModel"])) is transformers.LlamaForCausalLM

    @pytest.mark.parametrize(
        ("family", "expected"),
        [
            ("llama", "LlamaForCausalLM"),
            ("bert", "BertForMaskedLM"),
            ("bart", "BartForConditionalGeneration"),
            ("whisper", "WhisperForConditionalGeneration"),
            ("vit", "ViTForImageClassification"),
            ("clip", "CLIPModel"),
            ("clip_vision", "CLIPVisionModel"),
            ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
        ],
    )
    def test_is_the_natural_head_when_none_is_named(self, family: str, expected: str) -> None:
        assert model_class(make_config(family)).__name__ == expected

    def test_finds_parts_that_no_auto_class_lists(self) -> None:
        config = transformers.Qwen2VLConfig().vision_config
        assert model_class(config).config_class is type(config)

    @pytest.mark.skipif("internlm3" not in transformers.CONFIG_MAPPING, reason="transformers has no InternLM3")
    @pytest.mark.parametrize("named", [None, ["LlamaForCausalLM"], ["InternLM3ForCausalLM"]])
    def test_is_that_of_another_type_where_the_auto_class_gives_that(self, named: list[str] | None) -> None:
        config = transformers.CONFIG_MAPPING["internlm3"](architectures=named)
        assert model_class(config) is transformers.LlamaForCausalLM

    @pytest.mark.parametrize("named", ["LlamaForCausalLM", "Qwen2ForTokenClassification"])
    def test_is_its_own_where_it_names_one_that_no_auto_class_gives_it(self, named: str) -> None:
        assert model_class(transformers.MistralConfig(architectures=[named])) is transformers.MistralForCausalLM

    def test_is_no_class_of_a_part_that_an_auto_class_builds_from_that_part(self) -> None:
        config = transformers.MllamaConfig(architectures=["MllamaForCausalLM"])
        assert model_class(config) is transformers.MllamaForConditionalGeneration

    def test_says_when_there_is_no_class(self) -> None:
        with pytest.raises(ModelError, match="no model class for model type ''"):
            model_class(transformers.PreTrainedConfig())
