"""Patches a tiny Llama and GPT-2 where PyTorch lacks the names given to `main`, one process for each argument.

An argument is one name or several, joined by commas. Printed is one JSON object a line. The processes are forked from
one that has imported torch and transformers, so that each costs little more than importing memopt.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

LOOKUP = Path(__file__).parents[2] / "src" / "memopt" / "torch_compat" / "lookup.py"


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    return transformers.LlamaForCausalLM(config).double()


def build_with_readers() -> torch.nn.Module:
    """A model whose linears (Conv1D with a buffer) read handles of a scope, and no recompute specs."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 13, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "resid_pdrop": 0.0}
    sizes |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).double()
    for module in model.modules():
        if isinstance(module, transformers.pytorch_utils.Conv1D):
            module.register_buffer("unused", torch.zeros(()))  # a linear alone would be patched, and read specs
    return model


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    tokens = torch.arange(8).view(2, 4) % 13
    model(input_ids=tokens, labels=tokens).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def kept_bytes(model: torch.nn.Module) -> int:
    """Bytes of what a forward keeps for backward, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor.detach()

    pack.memopt_observer = True  # type: ignore[attr-defined]
    tokens = torch.arange(8).view(2, 4) % 13
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(input_ids=tokens, labels=tokens)
    del output
    return sum(storage.nbytes() for storage in kept.values())


def hide(names: set[str]) -> None:
    """Let memopt's look-up find everything but `names`; memopt must not have been imported yet."""
    assert not any(module.split(".")[0] == "memopt" for module in sys.modules)
    spec = importlib.util.spec_from_file_location("memopt.torch_compat.lookup", LOOKUP)
    assert spec is not None
    assert spec.loader is not None
    lookup: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = lookup
    spec.loader.exec_module(lookup)
    resolve = lookup.resolve

    def resolve_others(name: str) -> Any:
        if name in names:
            raise AttributeError(name)
        return resolve(name)

    lookup.resolve = resolve_others


def examine(names: set[str]) -> dict[str, Any]:
    builders = (build, build_with_readers)
    stock = [gradients(make()) for make in builders]
    hide(names)
    import memopt
    from memopt import torch_compat

    found: dict[str, Any] = {"missing": sorted(entry.name for entry in torch_compat.missing()), "refused": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            models = [memopt.patch(make()) for make in builders]
        except memopt.errors.MemoptError as error:
            found["refused"] = str(error)
            models = []
    found["warnings"] = [str(warning.message) for warning in caught if "with PyTorch" in str(warning.message)]
    found["kept"] = [kept_bytes(model) for model in (build_with_readers(), *models[1:])]
    from memopt.recompute.rules import RULES

    found["rules"] = sorted(RULES.keys() & torch_compat.SAVED_FIELDS.keys())
    errors = [_error(gradients(model), expected) for model, expected in zip(models, stock, strict=False)]
    found["error"] = max(errors, default=0.0)
    return found


def _error(ours: list[torch.Tensor], stock: list[torch.Tensor]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, stock, strict=True))


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    for make in (build, build_with_readers):
        gradients(make())
    for name in ("torch._dynamo", "torch._refs", "torch._subclasses.fake_tensor"):
        importlib.import_module(name)  # every process would import them when it walks
    gc.collect()
    gc.freeze()  # so that counts of bytes, which collect garbage, take no quarter of a second
    for argument in arguments:
        sys.stdout.flush()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            found = examine(set(argument.split(",")))
        except BaseException:
            found = {"failed": traceback.format_exc()}
        print(json.dumps({"hidden": argument, **found}), flush=True)
        os._exit(0)
