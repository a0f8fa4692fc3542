"""`memopt.load` of a folder into shards: each rank reads its own alone, and trains as if it had read all."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers.distributed import DistributedConfig

import memopt
from memopt.trace.account import live_bytes
from tests.distributed.engines import Case as Training
from tests.distributed.engines import batch, blocks
from tests.distributed.pair import RANKS, Pair
from tests.factories import tiny_model

#: About 220 MiB of weights, so that a tensor in work and pages of mapped files (15 to 30 MiB) are little beside them.
LARGE: Any = {"hidden_size": 1024, "intermediate_size": 5504, "num_hidden_layers": 3, "num_attention_heads": 8}
#: A rank's share of them, and half as much again.
MOST = 1.5 / RANKS
STEPS = 3


def sharded(folder: str) -> Any:
    return memopt.load(folder, distributed_config=DistributedConfig(fsdp_size=RANKS))


def whole(parameter: Any) -> torch.Tensor:
    found: torch.Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return found.detach()


def trained(rank: int, model: nn.Module) -> list[float]:
    """Losses of some steps, whose logits are never whole."""
    optimizer = torch.optim.SGD(model.train().parameters(), 0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        outputs = model(**batch(Training("fsdp2"), rank, step))
        loss = outputs.loss
        assert outputs.logits.value is None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compared(rank: int, folder: str) -> None:
    ours, other = sharded(folder), memopt.load(folder)
    summary = str(memopt.summary(ours))
    assert summary == str(memopt.summary(other))
    assert ours.state_dict().keys() == other.state_dict().keys()
    for name, parameter in other.named_parameters():
        assert torch.equal(whole(ours.get_parameter(name)), parameter)
        assert ours.get_parameter(name).to_local().numel() < parameter.numel()
    for name, buffer in other.named_buffers():  # the identities of folded norms among them
        assert torch.equal(ours.get_buffer(name), buffer)
    for module in (*blocks(other), other):
        fully_shard(module)
    assert trained(rank, ours) == pytest.approx(trained(rank, other), rel=2**-22)  # two ulps of fp32
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(whole(ours.get_parameter(name)), whole(parameter), rtol=2**-22, atol=1e-7)
    ours.save_pretrained(f"{folder}-trained")
    torch.distributed.barrier()
    stock, loading = transformers.LlamaForCausalLM.from_pretrained(f"{folder}-trained", output_loading_info=True)
    assert not any(loading.values())
    for name, parameter in ours.named_parameters():
        assert torch.equal(whole(parameter), stock.get_parameter(name))
    assert str(memopt.summary(memopt.load(f"{folder}-trained"))) == summary


@pytest.mark.parametrize("recipe", ["exact", "exact-unfolded"])
def test_shards_train_as_a_model_that_was_loaded_whole(pair: Pair, recipe: str, tmp_path: Path) -> None:
    tiny_model("llama", use_cache=False).save_pretrained(tmp_path / "stock")
    memopt.patch_checkpoint(tmp_path / "stock", tmp_path / "patched", recipe)
    pair.call(compared, str(tmp_path / "patched"))


def parallel(rank: int, folder: str, recipe: str) -> tuple[float, float]:
    """Largest relative difference of a gradient to stock's under the same plan, and share of saved bytes."""
    found = []
    inputs = batch(Training("fsdp2"), 0, 0)
    for load, name, more in (
        (transformers.LlamaForCausalLM.from_pretrained, "stock", {}),
        (memopt.load, recipe, {"overrides": ("loss.method=none",)}),
    ):
        model: Any = load(f"{folder}/{name}", distributed_config=DistributedConfig(tp_size=RANKS), **more).train()
        loss = model(**inputs).loss
        loss.backward()
        assert "in place of memopt" not in str(memopt.summary(model))
        gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        found.append((loss.item(), gradients, live_bytes(lambda model=model: model(**inputs).loss)))
    (stock_loss, stock, before), (loss, ours, after) = found
    assert loss == pytest.approx(stock_loss, rel=1e-6)
    untouched = [n for n in ours if recipe == "exact-unfolded" or "_proj" not in n]
    return max(float((ours[n] - stock[n]).norm() / stock[n].norm()) for n in untouched), after / before


@pytest.mark.parametrize(("recipe", "most"), [("exact", 0.7), ("exact-unfolded", 0.8)])
def test_a_tensor_parallel_plan_trains_as_stock(pair: Pair, recipe: str, most: float, tmp_path: Path) -> None:
    tiny_model("llama", use_cache=False).save_pretrained(tmp_path / "stock")
    memopt.patch_checkpoint(tmp_path / "stock", tmp_path / recipe, recipe)
    for error, share in pair.call(parallel, str(tmp_path), recipe):
        assert error < 2e-6
        assert share < most


def patched_in_memory(rank: int, folder: str, expert_parallel: bool) -> tuple[float, float, str]:
    """`parallel` for a model that is patched after `from_pretrained`, and its summary."""
    plan = {"tp_plan": "auto", "enable_expert_parallel": True} if expert_parallel else {}
    config = DistributedConfig(tp_size=RANKS, **plan)
    inputs = batch(Training("fsdp2"), 0, 0)
    found, saved = [], []
    for patches in (False, True):
        model: Any = transformers.MixtralForCausalLM.from_pretrained(folder, distributed_config=config).train()
        if patches:
            memopt.patch(model)
        model(**inputs).loss.backward()
        found.append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
        saved.append(live_bytes(lambda model=model: model(**inputs).loss))
    stock, ours = found
    assert ours.keys() == stock.keys()
    error = max(float((ours[n] - stock[n]).norm() / stock[n].norm()) for n in stock)
    return error, saved[1] / saved[0], str(memopt.summary(model))


@pytest.mark.filterwarnings("ignore:memopt did not change")
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_experts_in_a_parallel_plan_are_patched_in_memory(pair: Pair, expert_parallel: bool, tmp_path: Path) -> None:
    tiny_model("mixtral", use_cache=False).save_pretrained(tmp_path)
    for error, share, summary in pair.call(patched_in_memory, str(tmp_path), expert_parallel):
        assert error < 2e-6
        assert share < 0.8
        assert "2 gated MLPs: 2 recomputed" in summary
        assert "lm_head: its forward was replaced on the instance by transformers.distributed" in summary


def trained_norm(rank: int, folder: str) -> None:
    """A folded norm that somebody trained since is a parameter, sharded like the others."""
    name = "model.layers.0.input_layernorm.weight"
    ours, other = sharded(folder), memopt.load(folder)
    assert torch.equal(whole(ours.get_parameter(name)), other.get_parameter(name))
    assert ours.get_parameter(name).to_local().numel() < other.get_parameter(name).numel()
    assert ours.get_buffer(name.replace("layers.0", "layers.1")).unique().tolist() == [1.0]


def test_a_folded_norm_that_was_trained_is_no_identity(pair: Pair, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "stock")
    memopt.patch_checkpoint(tmp_path / "stock", tmp_path / "patched")
    stock = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "patched")
    nn.init.uniform_(stock.model.layers[0].input_layernorm.weight)
    stock.save_pretrained(tmp_path / "trained")
    pair.call(trained_norm, str(tmp_path / "trained"))


def peaks(rank: int, folder: str) -> tuple[float, float]:
    """Most resident bytes of a load of shards, and of one of the whole, every element read; MiB."""
    # What else the process touches for the first time comes on top, so the least of several tries.
    return min(resident(lambda: sharded(folder)) for _ in range(4)), resident(lambda: memopt.load(folder))


def resident(load: Any) -> float:
    """By how much the peak of the process's resident memory exceeds what was there before; Linux."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    model = load()
    for parameter in model.parameters():
        getattr(parameter, "to_local", lambda p=parameter: p)().detach().sum()
    return (status("VmHWM") - before) / 1024


def status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory is measured on Linux alone")
def test_no_rank_has_the_whole_model(pair: Pair, tmp_path: Path) -> None:
    model = tiny_model("llama", **LARGE)
    model.save_pretrained(tmp_path / "stock", max_shard_size="50MB")
    memopt.patch_checkpoint(tmp_path / "stock", tmp_path / "patched")
    size = sum(4 * parameter.numel() for parameter in model.parameters()) / 2**20
    for shards, everything in pair.call(peaks, str(tmp_path / "patched")):
        assert shards < MOST * size
        assert everything > size
