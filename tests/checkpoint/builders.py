"""Tiny checkpoints on disk with the sites that a walk would find in them. Builders only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from memopt.plan.plan import Plan, make_plan
from memopt.plan.recipe import load_recipe
from memopt.walk.sites import Consumer, NormSite, Sites

HIDDEN = 24


def write_checkpoint_files(
    folder: Path, tensors: Mapping[str, torch.Tensor], *, shards: int = 1, config: Mapping[str, object] | None = None
) -> Path:
    """A safetensors checkpoint with config, tokenizer and licence, as `save_pretrained` leaves one."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"model_type": "made-up", "architectures": ["MadeUp"], "hidden_size": HIDDEN} | dict(config or {})
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "LICENSE").write_text("Do as you please.\n")
    names = sorted(tensors)
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {
        name: f"model-{1 + i * shards // len(names):05}-of-{shards:05}.safetensors" for i, name in enumerate(names)
    }
    for shard in sorted(set(weight_map.values())):
        part = {name: tensors[name] for name in names if weight_map[name] == shard}
        save_file(part, folder / shard, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def rms_tensors(
    dtype: torch.dtype = torch.bfloat16, *, layers: int = 2, hidden: int = HIDDEN
) -> dict[str, torch.Tensor]:
    """Pre-norm blocks: one RMS norm that two linears read, and an embedding that nothing folds into."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors = {"model.embed.weight": random(50, hidden)}
    for i in range(layers):
        tensors[f"model.layers.{i}.norm.weight"] = random(hidden)
        tensors[f"model.layers.{i}.q.weight"] = random(hidden, hidden)
        tensors[f"model.layers.{i}.up.weight"] = random(3 * hidden, hidden)
        tensors[f"model.layers.{i}.out.weight"] = random(hidden, 3 * hidden)
    return tensors


def rms_norm(i: int, *, hidden: int = HIDDEN, **changes: object) -> NormSite:
    """The norm of block `i` of :func:`rms_tensors`."""
    block = f"model.layers.{i}"
    consumers = tuple(Consumer(f"{block}.{name}.weight", f"{block}.{name}", axis=1) for name in ("q", "up"))
    values = {
        "kind": "rms",
        "hidden_size": hidden,
        "eps": 1e-6,
        "weight": f"{block}.norm.weight",
        "consumers": consumers,
    }
    return NormSite(f"{block}.norm", **(values | changes))  # type: ignore[arg-type]


def plan_of(norms: Iterable[NormSite], *overrides: str) -> Plan:
    """The plan of recipe `exact` for a model with these norms."""
    sites = Sites(model_class="MadeUp", model_type="made-up", norms=tuple(norms))
    return make_plan(sites, load_recipe("exact", overrides))


def rms_plan(layers: int = 2, *, hidden: int = HIDDEN) -> Plan:
    return plan_of(rms_norm(i, hidden=hidden) for i in range(layers))
