"""Tiles of tokens with two gloo ranks: FSDP2 and DDP, accumulation, LoRA, and ranks with other numbers of tokens.

Other tiled MLPs gave a parameter one gradient a tile (Liger-Kernel#893) or gathered weights once a tile, so that ranks
with other numbers of tokens waited for ever (kernels-community#1000). ZeRO-3: tests/distributed/test_zero_tiles.py.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import memopt
from memopt.patches.tile import module as tiles
from memopt.plan.recipe import load_recipe
from tests.factories import tiny_inputs, tiny_model
from tests.support.ranks import run_ranks


def train(rank: int, folder: str, engine: str, adapted: bool, lengths: tuple[int, int]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    tiles._STEP, tiles._COPIES, ran = 5, 1 << 30, []
    found = tiles._gradients
    tiles._gradients = lambda *given: ran.append(1) or found(*given)
    batches, gradients = [tiny_inputs("llama", 2, lengths[rank], seed=3 * rank + i) for i in range(2)], []
    for patched in (False, True):
        model = _model(adapted)
        if patched:
            recipe = load_recipe("exact-unfolded", ["checkpointing.method=full", "tiles.method=tokens"])
            memopt.patch(model, recipe)
        model = _wrapped(model, engine)
        for last, batch in enumerate(batches):
            unsynchronised = model.no_sync() if engine == "ddp" and not last else nullcontext()
            with unsynchronised:
                model(**batch).loss.backward()
        own = {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients.append({name: each.full_tensor() if engine != "ddp" else each for name, each in own.items()})
    torch.distributed.destroy_process_group()
    stock, ours = gradients
    assert bool(ran) == (lengths[rank] > 2)
    assert stock.keys() == ours.keys()
    for name, gradient in stock.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()), msg=name)


def _model(adapted: bool) -> nn.Module:
    model = tiny_model("llama").train()
    if adapted:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        model.enable_input_require_grads()
    return model


def _wrapped(model: nn.Module, engine: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2,))
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for block in inner.model.layers:
        if engine == "fsdp, each MLP":
            fully_shard(block.mlp, mesh=mesh)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "fsdp, each MLP"])
@pytest.mark.rotates(3)
def test_gradients_are_those_of_the_stock_model(tmp_path, engine, adapted):
    run_ranks(train, str(tmp_path), engine, adapted, (16, 16))


def test_ranks_may_have_other_numbers_of_tiles(tmp_path):
    run_ranks(train, str(tmp_path), "fsdp, each MLP", False, (16, 2))
