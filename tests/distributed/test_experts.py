"""Adapters on experts in two processes: sums that are recomputed from weights which an engine gathers and frees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Dinov2Config, Dinov2ForImageClassification

import memopt
from tests.distributed.engines import blocks
from tests.distributed.pair import Pair
from tests.factories import tiny_inputs, tiny_model
from tests.patches.test_experts import IDS, adapted, base

WAYS = {"DDP": (False, False), "FSDP2": (True, False), "FSDP2, checkpointing": (True, True)}


def gradients(rank: int, shards: bool, checkpointing: bool, patches: bool) -> tuple[dict[str, Tensor], bool]:
    """Of every adapter after two backwards, and whether a sum was saved."""
    model: Any = adapted(base("Qwen3Moe", "grouped_mm", torch.float32))
    if patches:
        memopt.patch(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if shards:
        for module in (*blocks(model), model):
            fully_shard(module)
    running: nn.Module = model if shards else DistributedDataParallel(model)
    weights, shapes = {p.shape[1:] for p in model.parameters() if p.dim() == 3}, set()

    def pack(tensor: Tensor) -> Tensor:
        whole = tensor if tensor._base is None else tensor._base
        shapes.add(whole.shape[-2:])
        return tensor.detach()

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    pack.memopt_observer = unpack.memopt_observer = True  # type: ignore[attr-defined]
    for _ in range(2):
        ids = IDS.roll(rank, 1)
        with saved_tensors_hooks(pack, unpack):
            loss = running(input_ids=ids, labels=ids).loss
        loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (g.full_tensor() if shards else g).detach() for name, g in found.items()}, bool(weights & shapes)


def compared(rank: int, shards: bool, checkpointing: bool) -> tuple[float, bool, bool]:
    stock, stock_saves = gradients(rank, shards, checkpointing, patches=False)
    ours, saves = gradients(rank, shards, checkpointing, patches=True)
    assert ours.keys() == stock.keys()
    return max(float((ours[n] - g).norm() / g.norm()) for n, g in stock.items()), saves, stock_saves


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_adapters_on_experts_are_stocks(pair: Pair, way: str) -> None:
    shards, checkpointing = WAYS[way]
    for error, saves, stock_saves in pair.call(compared, shards, checkpointing):
        assert error < 2e-5
        assert not saves
        assert stock_saves is not checkpointing


X = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))


def dinov2() -> nn.Module:
    """Its blocks scale what their attention and their MLP return, so they read outputs of linears in these."""
    config = Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=2, image_size=28, patch_size=14,
        num_labels=3, layerscale_value=0.7,
    )  # fmt: skip
    return Dinov2ForImageClassification(config).train()


def of_units(
    rank: int, unit: str, recipe: str | None, settings: tuple[str, ...], name: str = "mixtral"
) -> dict[str, Tensor]:
    """Gradients of a model with FSDP2 units inside of its blocks."""
    torch.manual_seed(0)
    model: Any = dinov2() if name == "dinov2" else tiny_model(name, torch.float32).train()
    if recipe is not None:
        memopt.patch(model, memopt.load_recipe(recipe, settings))
    if not settings and name == "mixtral":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for block in model.dinov2.encoder.layer if name == "dinov2" else blocks(model):
        fully_shard(block.get_submodule(unit))
        fully_shard(block)
    fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        inputs = (
            {"pixel_values": X, "labels": torch.tensor([0, 2])} if name == "dinov2" else tiny_inputs(name, seed=rank)
        )
        model(**inputs).loss.backward()
    return {name: p.grad.full_tensor().detach() for name, p in model.named_parameters() if p.grad is not None}


def differences_of_units(rank: int, unit: str) -> list[float]:
    stock = of_units(rank, unit, None, ())
    full = ("checkpointing.method=full",)
    ways = (("exact-unfolded", ()), ("exact-unfolded", full), ("exact-levels", full), ("long-context", full))
    found = []
    for ours in (of_units(rank, unit, recipe, settings) for recipe, settings in ways):
        assert ours.keys() == stock.keys()
        found.append(max(float((ours[n] - g).norm() / g.norm().clamp(min=1e-6)) for n, g in stock.items()))
    return found


@pytest.mark.parametrize("unit", ["mlp", "mlp.experts"])
def test_units_inside_of_checkpointed_blocks_save_alike_in_both_runs(pair: Pair, unit: str) -> None:
    for errors in pair.call(differences_of_units, unit):
        assert max(errors) < 2e-4


def difference_of_levels(rank: int, name: str, unit: str) -> float:
    stock, ours = (of_units(rank, unit, recipe, (), name) for recipe in (None, "exact-levels"))
    assert ours.keys() == stock.keys()
    largest = max(float(g.norm()) for g in stock.values())
    return max(float((ours[n] - g).norm() / (g.norm() + 1e-4 * largest)) for n, g in stock.items())


@pytest.mark.parametrize(("name", "unit"), [("dinov2", "mlp"), ("dinov2", "attention"), ("bert", "attention")])
def test_outputs_of_linears_whose_unit_frees_its_weights_are_saved(pair: Pair, name: str, unit: str) -> None:
    for error in pair.call(difference_of_levels, name, unit):
        assert error < 2e-4
