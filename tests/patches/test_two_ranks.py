"""FSDP2 with two gloo ranks around a patched model, MLPs sharded by themselves, with activation checkpointing too."""

from __future__ import annotations

import pytest
import torch

from memopt.kernels.linear import function as linear
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import stock_and_patched
from tests.support.ranks import run_ranks


def train(rank: int, folder: str, checkpointing: bool, autocast: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    linear.LARGE = 1  # no weight is too small to be cast again
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh, inputs, gradients = init_device_mesh("cpu", (2,)), tiny_inputs("llama", 2, 16), []
    for model in stock_and_patched(lambda: tiny_model("llama")):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for block in model.model.layers:
            fully_shard(block.mlp, mesh=mesh)
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(3):  # scopes are open in the first step only
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**inputs).loss
            loss.backward()
        gradients.append({n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None})
    torch.distributed.destroy_process_group()
    stock, ours = gradients
    assert stock.keys() == ours.keys()
    for name, gradient in stock.items():
        if autocast:  # sums in another order, of terms in bf16
            limit = 8 * torch.finfo(torch.bfloat16).eps * gradient.abs().max()
            assert (ours[name] - gradient).abs().max() <= limit, name
        else:
            torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize(("checkpointing", "autocast"), [(False, False), (True, False), (False, True)])
@pytest.mark.rotates(3)
def test_gradients_are_those_of_the_stock_model(tmp_path, checkpointing, autocast):
    run_ranks(train, str(tmp_path), checkpointing, autocast)


def train_by_flat_parameters(rank: int, folder: str, original: bool, wrapper: bool) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    inputs, gradients = tiny_inputs("llama", 2, 16), []
    blocks = {type(tiny_model("llama").model.layers[0])}
    for model in stock_and_patched(lambda: tiny_model("llama", use_cache=False)):
        if not wrapper:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        sharded = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy(blocks), device_id=torch.device("cpu"), use_orig_params=original
        )
        if wrapper:  # as accelerate does for fsdp_activation_checkpointing
            apply_activation_checkpointing(sharded, check_fn=lambda module: type(module) in blocks)
        for _ in range(2):
            sharded.zero_grad()
            sharded(**inputs).loss.backward()
        gradients.append([p.grad.clone() for p in sharded.parameters() if p.grad is not None])
    torch.distributed.destroy_process_group()
    stock, ours = gradients
    assert len(stock) == len(ours) > 0
    for one, other in zip(stock, ours, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("original", "wrapper"), [(True, False), (True, True), (False, False)])
@pytest.mark.rotates(3)
def test_flat_parameters_under_checkpointing_have_the_stock_gradients(tmp_path, original, wrapper):
    run_ranks(train_by_flat_parameters, str(tmp_path), original, wrapper)
