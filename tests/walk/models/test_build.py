"""Models that are built or copied without memory."""

from __future__ import annotations

import copy
import math
import threading
import time
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.errors import ModelError
from memopt.torch_compat import storage_id
from memopt.walk.calls.batch import placed
from memopt.walk.calls.twin import build_twin
from memopt.walk.models.build import build_meta, clone_to_meta
from tests.factories import tiny_model
from tests.walk.configs import FAMILIES, inputs_of, llama_8b, llama_70b, make_config, tiny_llama, twin
from tests.zoo.build import small_config


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

    def test_a_part_runs_sdpa_where_the_class_around_it_refuses(self) -> None:
        config, _ = small_config("depth_anything")
        # As it is loaded: transformers chooses for each part.
        stock = transformers.DepthAnythingForDepthEstimation(copy.deepcopy(config))
        assert stock.config._attn_implementation == "eager"
        built = build_meta(config)
        assert built.config._attn_implementation == "eager"
        assert built.backbone.config._attn_implementation == stock.backbone.config._attn_implementation == "sdpa"

    def test_uses_sdpa_where_it_can(self) -> None:
        assert build_meta(make_config("llama")).config._attn_implementation == "sdpa"

    def test_runs_experts_without_asking_for_values(self) -> None:
        model = build_meta(make_config("mixtral"))
        assert model.config._experts_implementation == "batched_mm"

    def test_explains_a_config_that_does_not_build(self) -> None:
        with pytest.raises(ModelError, match="BertForMaskedLM cannot be built from its config: ValueError"):
            build_meta(make_config("bert", num_attention_heads=7))


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

    def test_shares_attributes_that_cannot_be_copied(self) -> None:
        model = nn.Linear(2, 2)
        vars(model).update(rotate=staticmethod(torch.neg), library=math, lock=threading.Lock())
        clone = clone_to_meta(model)
        assert (clone.rotate, clone.library, clone.lock) == (model.rotate, math, model.lock)
        assert clone.weight.is_meta

    def test_runs_on_meta_inputs(self) -> None:
        clone = clone_to_meta(twin("bert"))
        assert clone(**placed(inputs_of(clone), "meta", torch.float32)).logits.is_meta

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
