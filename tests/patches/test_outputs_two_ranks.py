"""Recomputed outputs of linears with two gloo ranks: DDP, and FSDP2, which frees the weights between."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import memopt
from tests.factories import tiny_inputs, tiny_model
from tests.support.ranks import run_ranks


def train(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh, inputs = init_device_mesh("cpu", (2,)), tiny_inputs("llama", 2, 16, seed=rank)
    for how in ("ddp", "blocks", "linears"):
        gradients = []
        for recompute in ("none", "auto"):
            model = tiny_model("llama", use_cache=False)
            memopt.patch(model, memopt.load_recipe("exact-unfolded", (f"linears.recompute={recompute}",)))
            if how == "ddp":
                model = DistributedDataParallel(model)
            else:
                for block in model.model.layers:
                    for unit in (block.mlp.up_proj, block.self_attn) if how == "linears" else ():
                        fully_shard(unit, mesh=mesh)
                    fully_shard(block, mesh=mesh)
                fully_shard(model, mesh=mesh)
            for _ in range(2):
                model.zero_grad()
                model(**inputs).loss.backward()
            gradients.append(
                {n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for n, p in model.named_parameters()}
            )
        exact, found = gradients
        for name, gradient in exact.items():
            assert torch.equal(found[name], gradient), (how, name)
    torch.distributed.destroy_process_group()


@pytest.mark.rotates(3)
def test_gradients_are_those_of_saved_outputs(tmp_path):
    run_ranks(train, str(tmp_path))
