"""One model type's loss: the stock model's and that of a patched head, in fp64, with labels that fit."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memopt.patches.apply import apply, undo
from memopt.plan.plan import make_plan
from memopt.plan.recipe import load_recipe
from memopt.walk.aten.precision import precise
from memopt.walk.calls.inputs import training_targets
from memopt.walk.calls.preserve import preserved
from memopt.walk.observe import walk_config
from tests.zoo.examine import Row, _config, _difference, _Stop, _twin, every_call

#: Largest relative difference of loss, gradients and logits.
TOLERANCE = 1e-10
_RECIPE = ("norms.method=none", "activations.method=none", "gated_mlps.method=none", "loss.method=chunked")


@dataclass
class LossRow:
    model_type: str
    status: str = ""
    """``fused``, ``whole`` (the logits were computed whole), ``wrong``, or ``left`` (there is no cross-entropy over a
    head's logits, or no inputs are known)."""
    reason: str = ""
    difference: float = 0.0


class _Losses(TorchFunctionMode):
    """Inside, counts cross-entropies of tensors with this many columns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.seen = width, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):
            self.seen += self.width in (args[0] if args else kwargs["input"]).shape
        return func(*args, **kwargs)


def examine_loss(model_type: str) -> LossRow:
    """Compare the losses of one model type."""
    row = LossRow(model_type, "left")
    try:
        twin = _twin(_config(Row(model_type)))
        calls = every_call(twin)
    except _Stop as stop:
        row.reason = stop.reason
        return row
    sites = walk_config(twin.config)
    if not calls or sites.loss_head is None:
        row.reason = "no head over a vocabulary" if calls else "no inputs"
        return row
    batch = dict(calls[0].kwargs)
    targets = training_targets(twin, batch)
    if not targets:
        row.reason = "no loss with labels that are made here"
        return row
    plan = make_plan(sites, load_recipe("exact-unfolded", _RECIPE))
    with _Losses(sites.loss_head.vocab_size) as losses:
        stock = _run(twin, {**batch, **targets})
    if not losses.seen:
        row.reason = "its loss is no cross-entropy over the head's logits"
        return row
    applied = apply(twin, plan)
    if not applied.done:
        row.status, row.reason = "whole", str(applied.refused or plan.refusals)
        return row
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ours = _run(twin, {**batch, **targets}, read=False)
    notes = [str(each.message) for each in seen if "computed whole" in str(each.message)]
    read = _run(twin, {**batch, **targets})
    undo(twin)
    pairs = ((stock.keys() & ours.keys(), ours), (stock.keys(), read))
    row.difference = max(
        _difference({k: stock[k] for k in keys}, {k: run[k] for k in keys}, 1e-4) for keys, run in pairs
    )
    row.status, row.reason = ("whole", notes[0]) if notes else ("fused", "")
    if not row.difference <= TOLERANCE:
        row.status, row.reason = "wrong", f"differs by {row.difference:.1e}"
    return row


def _run(model: nn.Module, batch: dict[str, Any], *, read: bool = True) -> dict[str, Tensor]:
    """Loss and gradients of one step, and the logits if they are to be `read`."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    with preserved(model), precise(torch.float64):
        model.train()
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        output = model(**batch)
        found = torch.autograd.grad(output.loss, list(parameters.values()), allow_unused=True)
        results = {n: g for n, g in zip(parameters, found, strict=True) if g is not None}
        results["loss"] = output.loss.detach()
        logits = getattr(output, "logits", None)
        if read and isinstance(logits, Tensor):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results["logits"] = logits.detach().as_subclass(Tensor)
    return results
