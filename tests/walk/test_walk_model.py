"""Walks of live models: wrapped, not from transformers, or not runnable."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.amp import autocast
from transformers.distributed.expert_parallel import ExpertParallelLayer
from transformers.distributed.tensor_parallel import TensorParallelLayer

from memopt.walk.observe import NOT_IN_MEMORY, walk_model
from memopt.walk.sites import Sites
from tests.factories import tiny_model


class Plain(nn.Module):
    """No config of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class LeavesAutocast(Plain):
    """By a class that was imported before the walk, as rotary embeddings outside transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        with autocast(x.device.type, enabled=False):
            return super().forward(x)


class Picky(Plain):
    """No inputs can be made for it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] != 1234:
            raise ValueError("it takes 1234 rows")
        return super().forward(x)


@pytest.fixture(scope="module")
def lora() -> Sites:
    config = peft.LoraConfig(target_modules="all-linear", r=2, lora_dropout=0.1)
    return walk_model(peft.get_peft_model(tiny_model("llama"), config))


def test_structure_is_that_of_the_unwrapped_model() -> None:
    sites = walk_model(tiny_model("llama"))
    assert sites.blocks == ("model.layers.0", "model.layers.1")
    assert len(sites.gated_mlps) == 2
    assert sites.norms[0].consumers


def test_nothing_is_folded_in_memory() -> None:
    sites = walk_model(tiny_model("llama"))
    assert all(NOT_IN_MEMORY in norm.fold_obstacles and norm.proof is None for norm in sites.norms)


def test_lora_matrices_are_consumers_too(lora: Sites) -> None:
    norm = next(n for n in lora.norms if n.name.endswith("layers.0.input_layernorm"))
    kinds = {consumer.parameter.split("_proj.")[-1] for consumer in norm.consumers}
    assert kinds == {"base_layer.weight", "lora_A.default.weight"}


def test_gated_mlps_are_found_under_adapters(lora: Sites) -> None:
    prefix = "base_model.model.model.layers"
    assert [site.name for site in lora.gated_mlps] == [f"{prefix}.0.mlp", f"{prefix}.1.mlp"]
    assert lora.gated_mlps[0].down == f"{prefix}.0.mlp.down_proj.base_layer.weight"


def test_blocks_and_dropouts_are_found_under_adapters(lora: Sites) -> None:
    assert lora.blocks == ("base_model.model.model.layers.0", "base_model.model.model.layers.1")
    assert {round(d.probability, 6) for d in lora.dropouts} == {0.1}


def test_a_model_of_ones_own_is_walked_with_inputs() -> None:
    sites = walk_model(Plain(), {"x": torch.randn(2, 3, 8)})
    assert [norm.name for norm in sites.norms] == ["blocks.0.0", "blocks.1.0"]
    assert [c.parameter for c in sites.norms[0].consumers] == ["blocks.0.1.weight"]
    assert [(a.kind, a.source) for a in sites.activations][:1] == [("gelu_erf", "blocks.0.1.weight")]
    assert sites.blocks == ("blocks.0", "blocks.1")
    assert (sites.model_class, sites.model_type) == ("Plain", "")


def test_without_inputs_modules_are_probed_and_the_rest_is_said_to_be_unknown() -> None:
    sites = walk_model(Picky())
    assert [(norm.name, norm.kind, norm.executed) for norm in sites.norms] == [
        ("blocks.0.0", "layer", False),
        ("blocks.1.0", "layer", False),
    ]
    assert [a.kind for a in sites.activations] == ["gelu_erf", "gelu_erf"]
    assert [(d.name, d.probability) for d in sites.dropouts] == [("blocks.0.3", 0.3), ("blocks.1.3", 0.3)]
    assert any("no forward of the model runs here" in note for note in sites.notes)


@pytest.mark.parametrize("style", [TensorParallelLayer, ExpertParallelLayer])
def test_experts_in_a_parallel_plan_are_walked_without_it(style: Any) -> None:
    model = tiny_model("mixtral")
    model.set_experts_implementation("grouped_mm")
    stock = walk_model(model)
    for layer in model.model.layers:
        style().install_forward(layer.mlp.experts, None)
    sites = walk_model(model)
    assert sites.ran
    assert (sites.norms, sites.gated_mlps, sites.linears) == (stock.norms, stock.gated_mlps, stock.linears)


def test_the_live_model_is_not_touched() -> None:
    model = tiny_model("bert").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    walk_model(model)
    assert model.training
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class Snake(nn.Module):
    """x + sin(alpha * x)^2 / alpha, with an alpha for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.alpha * x).square() / self.alpha


def test_a_module_with_vectors_that_no_patch_rewrites_is_named_with_a_reason() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Snake(), nn.Linear(8, 4))
    sites = walk_model(model, {"input": torch.randn(2, 3, 8)})
    assert sites.ran
    assert [name for name, reason in sites.skipped if "its own parameters" in reason] == ["1"]


def test_hidden_states_that_hooks_of_transformers_record_are_there_in_the_walk() -> None:
    """A backbone gets its hooks when it is built."""
    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    stages = {"out_features": ["stage1", "stage2"], "reshape_hidden_states": False}
    config = transformers.DepthAnythingConfig(
        backbone_config=transformers.Dinov2Config(**small, image_size=56, patch_size=14, **stages),
        reassemble_hidden_size=32, reassemble_factors=[2, 1], neck_hidden_sizes=[16, 16], fusion_hidden_size=16,
        head_hidden_size=8,
    )  # fmt: skip
    sites = walk_model(transformers.DepthAnythingForDepthEstimation(config))
    assert sites.ran
    assert not sites.unseen


def test_a_hook_that_belongs_to_no_module_is_left_out_of_the_walk() -> None:
    model, called = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)), list[object]()
    model[0].register_forward_hook(called.append)  # a method of a built-in object
    assert walk_model(model, {"input": torch.randn(2, 3, 8)}).ran
    assert not called


def test_a_model_that_imports_autocast_by_name_runs_in_the_walk() -> None:
    model = LeavesAutocast()
    assert walk_model(model, {"x": torch.randn(2, 3, 8)}).ran
    with pytest.raises(RuntimeError, match="unsupported"):
        autocast("meta")  # the walk leaves the class as it was


class CastToType(nn.Module):
    """Casts by the name of a type, as axial position embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x) + torch.ones(8).type(x.type()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_casts_by_the_name_of_a_type_runs_in_the_walk(dtype: torch.dtype) -> None:
    cast = torch.Tensor.type
    sites = walk_model(CastToType().to(dtype), {"x": torch.randn(2, 5, 8)})
    assert sites.ran
    assert torch.Tensor.type is cast


class OfParts(nn.Sequential):
    """A block with two methods."""

    def parallel(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parallel(x)


class CallsMethods(Plain):
    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        self.blocks = nn.ModuleList(OfParts(*block) for block in self.blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = getattr(block, self.method)(x)
        return x


@pytest.mark.parametrize(("method", "reasons"), [("parallel", 2), ("forward", 0), ("__call__", 0)])
def test_blocks_that_run_by_another_method_are_not_checkpointed(method: str, reasons: int) -> None:
    sites = walk_model(CallsMethods(method), {"x": torch.randn(2, 3, 8)})
    assert len(sites.blocks) == 2
    assert sum("another method" in reason for _, reason in sites.run_once) == reasons
