"""From a folder to a config, to a class, to a model on meta and to its random twin."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.errors import ModelError
from memopt.torch_compat import storage_id
from memopt.walk.calls.inputs import dummy_inputs
from memopt.walk.calls.twin import build_twin
from memopt.walk.models import limits
from memopt.walk.models.build import build_meta, clone_to_meta
from memopt.walk.models.config import load_config, model_class
from tests.factories import tiny_model
from tests.walk.configs import FAMILIES, llama_8b, llama_70b, make_config, tiny_llama, twin

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

    def test_asks_for_the_flag_before_it_runs_remote_code(self, remote_folder: Path) -> None:
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
        monkeypatch.setattr("memopt.walk.models.config.hub_answers", lambda *_: True)
        _hub_answers(monkeypatch, error)
        with pytest.raises(ModelError, match=sentence):
            load_config("org/it", revision="v9")


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

    def test_says_when_there_is_no_class(self) -> None:
        with pytest.raises(ModelError, match="no model class for model type ''"):
            model_class(transformers.PreTrainedConfig())


class TestBuildMeta:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_family_builds_without_memory(self, family: str) -> None:
        model = build_meta(make_config(family))
        assert all(parameter.is_meta for parameter in model.parameters())
        assert not model.training

    @pytest.mark.parametrize("config", [llama_8b(), llama_70b()], ids=["8b", "70b"])
    def test_large_shapes_take_seconds(self, config: transformers.PreTrainedConfig) -> None:
        start = time.perf_counter()
        parameters = sum(parameter.numel() for parameter in build_meta(config).parameters())
        assert time.perf_counter() - start < 20
        assert parameters > 7e9

    def test_leaves_the_config_as_it_was(self) -> None:
        config = make_config("gemma2")
        before = copy.deepcopy(vars(config))
        build_meta(config)
        assert vars(config) == before

    def test_turns_the_cache_off_in_nested_configs_too(self) -> None:
        assert build_meta(make_config("qwen2_vl")).config.text_config.use_cache is False

    def test_takes_the_dtype_of_the_config(self) -> None:
        assert build_meta(make_config("llama", dtype="bfloat16")).dtype is torch.bfloat16

    def test_takes_the_dtype_that_is_asked_for(self) -> None:
        assert build_meta(make_config("llama", dtype="bfloat16"), dtype=torch.float16).dtype is torch.float16
        assert torch.get_default_dtype() is torch.float32

    def test_falls_back_to_eager_where_the_class_refuses_sdpa(self) -> None:
        config = make_config("bloom")
        assert not transformers.BloomForCausalLM._supports_sdpa
        assert build_meta(config).config._attn_implementation == "eager"

    def test_uses_sdpa_where_it_can(self) -> None:
        assert build_meta(make_config("llama")).config._attn_implementation == "sdpa"

    def test_runs_experts_without_asking_for_values(self) -> None:
        model = build_meta(make_config("mixtral"))
        assert model.config._experts_implementation == "batched_mm"

    def test_explains_a_config_that_does_not_build(self) -> None:
        with pytest.raises(ModelError, match="BertForMaskedLM cannot be built from its config: ValueError"):
            build_meta(make_config("bert", num_attention_heads=7))


class TestBuildTwin:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_names_are_those_of_the_real_model(self, family: str) -> None:
        real = build_meta(make_config(family))
        assert {name for name, _ in twin(family).named_modules()} <= {name for name, _ in real.named_modules()}
        assert {name for name, _ in twin(family).named_parameters()} <= {name for name, _ in real.named_parameters()}

    def test_the_same_seed_gives_the_same_twin(self) -> None:
        one, other = build_twin(make_config("llama"), seed=3), build_twin(make_config("llama"), seed=3)
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))

    def test_another_seed_gives_another_twin(self) -> None:
        one, other = build_twin(make_config("llama"), seed=3), build_twin(make_config("llama"), seed=4)
        assert not any(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))

    def test_leaves_the_global_generator_alone(self) -> None:
        torch.manual_seed(5)
        before = torch.random.get_rng_state()
        build_twin(make_config("bert"))
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_is_fp64_in_eval_mode_on_cpu(self) -> None:
        model = build_twin(make_config("gpt2"))
        assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float64, "cpu")}
        assert not model.training

    @pytest.mark.parametrize("family", ["llama", "gemma", "bert", "vit", "bloom"])
    def test_every_parameter_carries_signal(self, family: str) -> None:
        for name, parameter in twin(family).named_parameters():
            assert parameter.std() > 0.03 or parameter.numel() < 8, name

    def test_norm_weights_have_both_signs_and_none_near_zero(self) -> None:
        weight = twin("llama").model.norm.weight
        assert weight.min() < -0.4 < 0.4 < weight.max()
        assert weight.abs().min() > 0.4

    def test_offset_norm_weights_keep_their_scale_away_from_zero(self) -> None:
        weight = twin("gemma").model.norm.weight
        assert (1 + weight).abs().min() > 0.4
        assert weight.std() > 0.1

    def test_rotary_tables_are_not_randomised(self) -> None:
        size = twin("llama").config.head_dim
        expected = 1e4 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        torch.testing.assert_close(twin("llama").model.rotary_emb.inv_freq.double(), expected, rtol=1e-6, atol=0)

    def test_ties_stay_tied(self) -> None:
        assert twin("gpt2").lm_head.weight is twin("gpt2").transformer.wte.weight

    def test_dropout_stays_as_configured(self) -> None:
        assert build_twin(make_config("bert", hidden_dropout_prob=0.25)).bert.embeddings.dropout.p == 0.25


class TestCloneToMeta:
    def test_keeps_names_shapes_dtypes_and_requires_grad(self) -> None:
        model = build_twin(tiny_llama(), dtype=torch.bfloat16)
        model.model.embed_tokens.weight.requires_grad_(False)
        clone = clone_to_meta(model)

        def facts(module: nn.Module) -> list[Any]:
            return [(n, p.shape, p.stride(), p.dtype, p.requires_grad) for n, p in module.named_parameters()]

        assert facts(clone) == facts(model)
        assert [n for n, _ in clone.named_buffers()] == [n for n, _ in model.named_buffers()]
        assert all(tensor.is_meta for tensor in (*clone.parameters(), *clone.buffers()))

    def test_lying_in_one_flat_buffer_is_no_tie(self) -> None:
        model = build_twin(tiny_llama())  # which DeepSpeed lays out so
        parameters, first = list(model.parameters()), 0
        flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
        for parameter in parameters:
            parameter.data = flat[first : first + parameter.numel()].view(parameter.shape)
            first += parameter.numel()
        storages = {storage_id(parameter.untyped_storage()) for parameter in clone_to_meta(model).parameters()}
        assert len(storages) == len(parameters)

    def test_leaves_the_model_as_it_was(self) -> None:
        model = build_twin(tiny_llama())
        values = [parameter.clone() for parameter in model.parameters()]
        clone_to_meta(model)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), values, strict=True))

    def test_keeps_ties(self) -> None:
        clone = clone_to_meta(build_twin(tiny_llama(tie_word_embeddings=True)))
        assert clone.lm_head.weight is clone.model.embed_tokens.weight

    def test_keeps_views_that_overlap(self) -> None:
        base = torch.randn(8, 4)
        model = nn.Module()
        model.top, model.bottom = nn.Parameter(base[:5]), nn.Parameter(base[4:])
        clone = clone_to_meta(model)
        assert clone.top.untyped_storage()._cdata == clone.bottom.untyped_storage()._cdata
        assert clone.bottom.storage_offset() == 16

    def test_moves_tensors_that_are_no_parameters(self) -> None:
        model = nn.Linear(2, 2)
        model.cache = [torch.ones(3), {"mask": torch.ones(4)}]  # type: ignore[assignment]
        clone = clone_to_meta(model)
        assert clone.cache[0].is_meta
        assert clone.cache[1]["mask"].is_meta

    def test_runs_on_meta_inputs(self) -> None:
        clone = clone_to_meta(twin("bert"))
        assert clone(**dummy_inputs(clone, device="meta")).logits.is_meta

    def test_copies_an_adapted_model(self) -> None:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(build_twin(tiny_llama()), peft.LoraConfig(r=2, target_modules=["q_proj"]))
        clone = clone_to_meta(model)
        trainable = {n for n, p in clone.named_parameters() if p.requires_grad}
        assert trainable == {n for n, p in model.named_parameters() if p.requires_grad}
        assert trainable
        assert type(clone) is type(model)

    def test_allocates_nothing_off_meta(self) -> None:
        model = twin("llama")
        with _Allocations() as allocations:
            clone_to_meta(model)
        assert allocations.devices == {"meta"}


class _Allocations(TorchDispatchMode):
    """Devices of every tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.devices.add(result.device.type)
        return result


def _loop() -> None:
    while True:
        pass


def _grow() -> None:
    found = []
    for number in range(10**9):
        found.append((number,))


def _swallow() -> None:
    with contextlib.suppress(BaseException):
        _loop()


class TestLimits:
    @pytest.mark.parametrize("build", [_loop, _grow, _swallow])
    def test_a_constructor_that_takes_too_much_is_stopped(
        self, build: Callable[[], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(limits, "_MAX_SECONDS", 10 if build is _grow else 0.3)
        monkeypatch.setattr(limits, "_MAX_BYTES", 50 << 20)

        def run() -> None:
            with limits.watched_build():
                build()

        with pytest.raises(ModelError, match="more than 50 MiB" if build is _grow else "more than 0 seconds"):
            run()

    def test_a_constructor_that_ignores_it_is_stopped_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "_MAX_SECONDS", 0.1)
        monkeypatch.setattr(limits, "_STOPPED_AFTER", 0.1)
        started = time.thread_time()

        def build() -> None:
            _swallow()  # as a finalizer does
            while time.thread_time() < started + 20:
                pass

        with pytest.raises(ModelError, match="more than 0 seconds"), limits.watched_build():
            build()
        assert time.thread_time() < started + 10

    def test_what_is_quick_is_left_alone(self) -> None:
        for _ in range(20):
            with limits.watched_build():
                pass
        assert not [thread for thread in threading.enumerate() if thread.name == "memopt-watch"]

    def test_parts_are_counted_in_this_thread_alone_and_hooks_are_removed(self) -> None:
        with limits.bounded_build(parts=5):
            other = threading.Thread(target=lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(9))))
            other.start()
            other.join()
            nn.Linear(2, 2)
            with pytest.raises(ModelError, match="5 modules and parameters"):
                nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))

    @pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer", "depths", "num_experts", "image_size"])
    @pytest.mark.parametrize("nested", [False, True])
    def test_a_count_that_no_model_has_is_refused_by_name(self, tmp_path: Path, name: str, nested: bool) -> None:
        part: dict[str, Any] = {name: [2, 10**6] if name == "depths" else 10**6}
        folder = _folder(tmp_path, {"model_type": "llama", **({"parts": [part]} if nested else part)})
        with pytest.raises(ModelError, match=f"'{name}' is above 20,000"):
            load_config(folder)


class _Codes(nn.Module):
    """A linear of a library that keeps what its codes mean on the parameter itself, which no copy has."""

    def __init__(self, linear: nn.Linear, bits: torch.dtype = torch.int8) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.weight = nn.Parameter(linear.weight.detach().mul(100).to(bits), requires_grad=False)
        self.weight.scale = 0.01  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.weight.scale, self.bias)


def test_a_linear_with_codes_is_a_plain_frozen_one_in_the_copy() -> None:
    model = nn.Sequential(nn.Linear(6, 4), _Codes(nn.Linear(4, 3))).eval()
    clone = clone_to_meta(model)
    assert isinstance(clone[1], nn.Linear)
    assert (clone[1].weight.shape, clone[1].weight.requires_grad, clone[1].training) == ((3, 4), False, False)
    assert clone(torch.ones(2, 6, device="meta")).shape == (2, 3)
    assert clone[1](torch.ones(2, 4, device="meta", dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert type(model[1]) is _Codes


def test_only_codes_make_a_linear_of_an_unknown_module() -> None:
    model = nn.Sequential(_Codes(nn.Linear(4, 3), torch.float32), nn.Linear(4, 3))
    model[0].register_buffer("steps", torch.zeros(1, dtype=torch.int64))
    model[1].register_buffer("steps", torch.zeros(1, dtype=torch.int64))
    assert [type(each) for each in clone_to_meta(model)] == [_Codes, nn.Linear]


def test_a_model_on_codes_is_walked_as_on_plain_linears() -> None:
    model = tiny_model("llama")
    plain = memopt.plan_for(model).counts()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers" in name:
            model.set_submodule(name, _Codes(module))
    plan = memopt.plan_for(model)
    assert (plan.sites.ran, plan.sites.notes) == (True, ())
    assert plan.counts()["gated_mlp"] == plain["gated_mlp"]


def test_sizes_that_a_forward_computes_with_keep_their_values_on_meta() -> None:
    config = transformers.EncodecConfig(num_filters=4, hidden_size=16, codebook_size=32, codebook_dim=16)
    on_meta = build_meta(config)
    live = transformers.EncodecModel(config)
    clone = clone_to_meta(live)
    for model in (on_meta, clone):
        strides = {name: int(number) for name, number in model.named_buffers() if name.endswith("stride")}
        assert strides == {name: int(number) for name, number in live.named_buffers() if name.endswith("stride")}
        assert max(strides.values()) == 8
        assert all(parameter.is_meta for parameter in model.parameters())
        assert model(torch.empty(2, 1, 640, device="meta")).audio_values.shape == (2, 1, 640)
