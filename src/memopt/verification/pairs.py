"""A patched model and a copy of it with stock modules, both small: few of the alike blocks, few rows of embeddings."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from memopt.api import unpatch
from memopt.patches.record import record_of
from memopt.patches.swap import is_swapped, stock_forwards
from memopt.verification.inputs import Probes
from memopt.verification.models import cast_inputs, load_run_free, reference_for, stored_dtype
from memopt.verification.trial import CheckpointTrial
from memopt.walk.calls.batch import Batch
from memopt.walk.calls.preserve import preserved
from memopt.walk.models.alike import take_out
from memopt.walk.models.build import run_experts

T = TypeVar("T")
#: Rows that remain of an embedding or a head; ids beyond them are mapped to these rows, but not to the first few.
WORDS, _SPECIAL = 4096, 8
_PREFIX = "base_model.model."
"""Prefix that PEFT puts before the names of parameters."""


@dataclass
class Pair:
    """Both models. They are converted and adapted together."""

    patched: nn.Module
    stock: nn.Module
    probes: Probes
    wide: torch.dtype
    """The dtype of the truth."""
    dtypes: dict[str, torch.dtype | None]
    """Parameter or buffer -> fp32 if the model keeps it in fp32, None if it has the model's dtype."""
    blocks: tuple[str, ...]
    left_out: str
    """The blocks and words that were left out, in words."""
    not_run: dict[str, str] = field(default_factory=dict)
    """Situation -> why stock modules did not run in it."""

    @property
    def swapped(self) -> list[tuple[str, nn.Module]]:
        """The patched modules by name; a block patches linears in its first forward."""
        modules = self.patched.named_modules()
        return [(name.removeprefix(_PREFIX), module) for name, module in modules if is_swapped(module)]

    def with_stock(self, patched: int | None) -> AbstractContextManager[None]:
        """Inside, only the first `patched` of the patched modules run patched code; with None, all of them do."""
        return stock_forwards(() if patched is None else (module for _, module in self.swapped[patched:]))

    def adapt(self) -> bool:
        """Give both models the same adapters, once; False if that cannot be done."""
        if hasattr(self.patched, "peft_config"):
            return True
        try:
            from peft import LoraConfig, get_peft_model

            adapted: list[Any] = []
            for each in (self.patched, self.stock):
                adapted.append(get_peft_model(cast(Any, each), LoraConfig(r=4, target_modules="all-linear")))
        except Exception:  # PEFT is not installed, or supports no linear of this model
            return False
        for model in adapted:
            generator = torch.Generator().manual_seed(0)
            for name, each in model.named_parameters():
                if "lora_" in name:
                    drawn = torch.randn(each.shape, generator=generator, dtype=torch.float32) / 50
                    each.data = drawn.bfloat16().to(each.dtype)
        self.patched, self.stock = adapted
        return True

    def convert(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Convert `model` to `dtype`; tensors that the model keeps in fp32 get fp32 at least."""
        for name, each in (*model.named_parameters(), *model.named_buffers()):
            if each.is_floating_point():
                own = self.dtypes.get(name.removeprefix(_PREFIX).replace(".base_layer.", "."))
                each.data = each.data.to(torch.promote_types(dtype, own) if own else dtype)


def with_pair(trial: CheckpointTrial, run: Callable[[Pair], T], *settings: str) -> T | None:
    """The result of `run` on the small pair, patched with `settings`; None if fp32 does not fit into memory."""

    def on_model(model: nn.Module) -> T | None:
        pair = _pair_of(model, trial.probes(model))
        return None if pair is None else run(pair)

    return load_run_free(functools.partial(trial.patched, *settings, dtype=None), on_model)


def _pair_of(model: nn.Module, probes: Probes) -> Pair | None:
    """The patched `model`, which is made small in place, and its copy; None if fp32 does not fit into memory."""
    record = record_of(model)
    blocks = record.plan.sites.blocks if record is not None else ()
    probes, left_out = _made_small(model, blocks, probes)
    stored = stored_dtype(model)
    reference = reference_for(model, copies=8)
    if reference is None:
        return None
    run_experts(model, "eager")
    own = _own_dtypes(model, stored)
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        if own.get(name, stored) is None:
            each.data = each.data.bfloat16().to(stored)  # rounded, so that every precision has equal values
    stock = unpatch(copy.deepcopy(model))
    for ours, theirs in zip(model.modules(), stock.modules(), strict=True):
        # Both use one attention implementation: implementations differ where a row of the mask is empty.
        if isinstance(ours, PreTrainedModel) and isinstance(theirs, PreTrainedModel):
            attention = ours.config._attn_implementation
            if attention is not None and attention != theirs.config._attn_implementation:
                theirs.set_attn_implementation(attention)
    trained = {name for name, _ in model.named_parameters()}
    for name, each in stock.named_parameters():
        each.requires_grad_(each.requires_grad and name in trained)  # not a weight that a fold made constant
    modules = dict(model.named_modules())
    here = tuple(name for name in blocks if name in modules)
    return Pair(model, stock, probes, reference.dtype, own, here, left_out)


def _own_dtypes(model: nn.Module, stored: torch.dtype) -> dict[str, torch.dtype | None]:
    kept = {name for name, _ in model.named_parameters()} | model.state_dict().keys()
    tensors = (*model.named_parameters(), *model.named_buffers())
    floating = ((name, each) for name, each in tensors if each.is_floating_point())
    return {name: None if each.dtype == stored and name in kept else torch.float32 for name, each in floating}


def _made_small(model: nn.Module, blocks: Sequence[str], probes: Probes) -> tuple[Probes, str]:
    """Leave out alike blocks if the model runs without them, then words if it runs without them."""
    lists = {name: dict(each._modules) for name, each in model.named_modules() if isinstance(each, nn.ModuleList)}
    said = []
    left_out = sum(run.left_out for run in take_out(model, blocks, 2, several=True))
    if left_out and _runs(model, probes.batches[0]):
        said.append(f"{left_out} alike blocks left out")
    elif left_out:  # the model does not run with fewer blocks
        for name, modules in lists.items():
            children = model.get_submodule(name)._modules
            children.clear()
            children.update(modules)
    fewer = _fewer_words(model, probes)
    if fewer is not None:
        probes = fewer
        said.append(f"{WORDS} words kept")
    return probes, ", ".join(said)


def _fewer_words(model: nn.Module, probes: Probes) -> Probes | None:
    """Keep the first rows of embeddings and heads; None, with the model unchanged, if it does not run with these."""
    configs = {id(each): each for m in model.modules() if (each := getattr(m, "config", None)) is not None}.values()
    words = {size for each in configs if isinstance(size := getattr(each, "vocab_size", None), int) and size > WORDS}
    if len(words) != 1:
        return None
    (count,) = words
    tensors = [each for each in (*model.parameters(), *model.buffers()) if count in each.shape]
    tables = [vars(each) for each in (*model.modules(), *configs)]
    whole = [(each, each.data) for each in tensors]
    named = [
        (table, name) for table in tables for name, value in table.items() if type(value) is int and value == count
    ]
    for each in tensors:
        for place, size in enumerate(each.shape):
            if size == count:
                each.data = each.data.narrow(place, 0, WORDS).clone()
    for table, name in named:
        table[name] = WORDS
    fewer = replace(
        probes, batches=tuple(map(_with_few_words, probes.batches)), targets=tuple(map(_with_few_words, probes.targets))
    )
    if _runs(model, {**fewer.batches[0], **fewer.targets[0]}):
        return fewer
    for each, data in whole:
        each.data = data
    for table, name in named:
        table[name] = count
    return None


def _with_few_words(batch: Batch) -> dict[str, Any]:
    def few(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.long:
            return value
        return torch.where(value < WORDS, value, _SPECIAL + value % (WORDS - _SPECIAL))

    return {name: few(value) for name, value in batch.items()}


def _runs(model: nn.Module, batch: Batch) -> bool:
    try:
        with preserved(model), torch.no_grad():
            model(**cast_inputs(batch, stored_dtype(model)))
    except Exception:  # any failure means that the model does not run like this
        return False
    return True
