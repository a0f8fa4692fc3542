"""Models that carry their own code (``auto_map``): the class that transformers takes is walked, folded and loaded."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import memopt
from memopt.errors import ModelError
from memopt.pipeline import patch_checkpoint, unpatch_checkpoint
from memopt.walk.models.config import load_config, model_class
from tests.factories import tiny_inputs, tiny_model

#: A Llama whose MLPs read the output of their norm twice, in a linear and beside it.
MODELING = """
from transformers.models.llama import modeling_llama as llama
class OwnMLP(llama.LlamaMLP):
    def forward(self, x):
        return super().forward(x) + x
class OwnModel(llama.LlamaModel):
    pass
class OwnForCausalLM(llama.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.__class__ = OwnMLP
class OwnForMaskedLM(llama.LlamaForCausalLM):
    pass
"""
#: A model of a type of its own, which generates only with the mixin that transformers adds.
GENERATING = """
from torch import nn
from transformers.models.llama import modeling_llama as llama
from .configuration_own import OwnConfig
class OwnForCausalLM(llama.LlamaPreTrainedModel):
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.model = llama.LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
    def forward(self, input_ids=None, attention_mask=None, **_):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return llama.CausalLMOutputWithPast(logits=self.lm_head(hidden))
    def prepare_inputs_for_generation(self, input_ids, **_):
        return {"input_ids": input_ids}
"""
CONFIGURATION = """
from transformers import LlamaConfig
class OwnConfig(LlamaConfig):
    model_type = "own"
"""
CAUSAL_LM = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


@pytest.fixture(autouse=True)
def _modules_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    _forget_modules()
    yield
    _forget_modules()


def _forget_modules() -> None:
    """Python finds modules in the folder in which it found their package first, which is another test's."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of type Llama with its own head; ``auto_map`` has no AutoConfig."""
    tiny_model("llama").save_pretrained(tmp_path / "own")
    return with_code(tmp_path / "own", {"modeling_own": MODELING}, auto_map=CAUSAL_LM, architectures=["OwnForCausalLM"])


@pytest.fixture
def generating(tmp_path: Path) -> Path:
    """A folder whose type, config and model are its own."""
    tiny_model("llama", tie_word_embeddings=False).save_pretrained(tmp_path / "own")
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", **CAUSAL_LM}
    code = {"modeling_own": GENERATING, "configuration_own": CONFIGURATION}
    return with_code(tmp_path / "own", code, model_type="own", auto_map=auto_map, architectures=["OwnForCausalLM"])


def with_code(folder: Path, code: dict[str, str], **settings: Any) -> Path:
    """`folder`, to which the modules of `code` and the `settings` of its config are added."""
    for name, text in code.items():
        (folder / f"{name}.py").write_text(text)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__name__ == "OwnForCausalLM"
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=tiny_inputs("llama", 2, 16)["input_ids"]).logits
    return result


class TestFolder:
    def test_a_norm_that_the_own_code_reads_elsewhere_is_not_folded(self, folder: Path, tmp_path: Path) -> None:
        result = patch_checkpoint(folder, tmp_path / "patched", trust_remote_code=True)
        assert result.plan.sites.model_class == "OwnForCausalLM"
        folded = {norm.name for norm in result.plan.folds()}
        assert "model.layers.0.input_layernorm" in folded
        assert "model.layers.0.post_attention_layernorm" not in folded
        torch.testing.assert_close(logits(tmp_path / "patched"), logits(folder))

    def test_loads_as_the_class_that_transformers_loads(self, folder: Path, tmp_path: Path) -> None:
        patch_checkpoint(folder, tmp_path / "patched", trust_remote_code=True)
        model = memopt.load(tmp_path / "patched", trust_remote_code=True).eval()
        assert type(model).__name__ == "OwnForCausalLM"
        got = model(input_ids=tiny_inputs("llama", 2, 16)["input_ids"]).logits
        torch.testing.assert_close(got, logits(folder))

    def test_without_consent_its_code_does_not_run(self, folder: Path, tmp_path: Path) -> None:
        (folder / "modeling_own.py").write_text("raise SystemExit")
        result = patch_checkpoint(folder, tmp_path / "patched")
        assert result.plan.sites.model_class == "LlamaForCausalLM"
        assert type(memopt.load(tmp_path / "patched")).__name__ == "LlamaForCausalLM"

    def test_a_loaded_model_is_saved_with_its_code(self, generating: Path, tmp_path: Path) -> None:
        patch_checkpoint(generating, tmp_path / "patched", trust_remote_code=True)
        memopt.load(tmp_path / "patched", trust_remote_code=True).save_pretrained(tmp_path / "saved")
        assert {"modeling_own.py", "configuration_own.py"} <= {path.name for path in (tmp_path / "saved").iterdir()}
        torch.testing.assert_close(logits(tmp_path / "saved"), logits(generating))

    def test_a_loaded_model_generates_each_time(self, generating: Path, tmp_path: Path) -> None:
        patch_checkpoint(generating, tmp_path / "patched", trust_remote_code=True)
        for _ in range(2):
            model: Any = memopt.load(tmp_path / "patched", trust_remote_code=True)
            assert model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2).shape == (1, 5)

    def test_unpatch_names_the_code_that_the_folder_lacks(self, folder: Path, tmp_path: Path) -> None:
        tokenizer = ["own/repository--slow.Slow", "fast_own.Fast", None]
        with_code(folder, {}, auto_map={**CAUSAL_LM, "AutoTokenizer": tokenizer})
        patch_checkpoint(folder, tmp_path / "patched", "exact-unfolded", trust_remote_code=True)
        (tmp_path / "patched" / "modeling_own.py").unlink()
        notes = unpatch_checkpoint(tmp_path / "patched", out=tmp_path / "stock", trust_remote_code=True).notes
        assert [note for note in notes if "the folder lacks (modeling_own.py, fast_own.py)" in note]


class TestClass:
    @pytest.mark.parametrize(
        ("auto_map", "named", "expected"),
        [
            (CAUSAL_LM, "OwnForCausalLM", "OwnForCausalLM"),
            (CAUSAL_LM, "LlamaForCausalLM", "OwnForCausalLM"),
            (CAUSAL_LM, "LlamaForSequenceClassification", "LlamaForSequenceClassification"),
            ({"AutoModel": "modeling_own.OwnModel"}, "LlamaForCausalLM", "LlamaForCausalLM"),
            ({"AutoModel": "modeling_own.OwnModel", **CAUSAL_LM}, "LlamaModel", "OwnModel"),
            ({"AutoModel": "modeling_own.OwnModel", **CAUSAL_LM}, "Unknown", "OwnForCausalLM"),
            ({"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, "LlamaForCausalLM", "LlamaForCausalLM"),
            ("modeling_own.OwnModel", "LlamaForCausalLM", "LlamaForCausalLM"),
        ],
    )
    def test_is_own_code_where_transformers_takes_it(
        self, folder: Path, auto_map: Any, named: str, expected: str
    ) -> None:
        with_code(folder, {}, auto_map=auto_map, architectures=[named])
        assert model_class(load_config(folder, trust_remote_code=True)).__name__ == expected

    def test_stays_for_a_copy_of_the_config(self, folder: Path) -> None:
        config = copy.deepcopy(load_config(folder, trust_remote_code=True))
        assert model_class(config).__name__ == "OwnForCausalLM"

    def test_is_not_own_code_for_a_config_that_was_read_without_consent(self, folder: Path) -> None:
        assert model_class(AutoConfig.from_pretrained(folder)) is transformers.LlamaForCausalLM

    def test_needs_consent_where_transformers_has_no_class_in_its_place(self, folder: Path) -> None:
        auto_map = {"AutoModelForMaskedLM": "modeling_own.OwnForMaskedLM"}
        with_code(folder, {}, auto_map=auto_map, architectures=["OwnForMaskedLM"])
        with pytest.raises(ModelError, match="does not run without your consent"):
            load_config(folder)
        assert model_class(load_config(folder, trust_remote_code=True)).__name__ == "OwnForMaskedLM"

    def test_is_the_class_that_the_user_registered(self, generating: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class RegisteredConfig(transformers.LlamaConfig):
            model_type = "own"

        class Registered(transformers.LlamaForCausalLM):
            config_class = RegisteredConfig

        for mapping in (transformers.CONFIG_MAPPING, AutoModelForCausalLM._model_mapping):
            monkeypatch.setattr(mapping, "_extra_content", dict(mapping._extra_content))
        AutoConfig.register("own", RegisteredConfig)
        AutoModelForCausalLM.register(RegisteredConfig, Registered)
        (generating / "modeling_own.py").write_text("raise SystemExit")
        for consent in (False, True):
            assert model_class(load_config(generating, trust_remote_code=consent)) is Registered


def test_a_budget_is_planned_for_the_own_class_of_a_model_in_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memopt.prediction.planner import training

    built: list[str] = []
    build = training.build_meta
    monkeypatch.setattr(
        training,
        "build_meta",
        lambda config, **given: built.append(model_class(config).__name__) or build(config, **given),
    )
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    memopt.patch(model, budget="1GiB", seq=16)
    assert built == ["OwnForCausalLM"]
