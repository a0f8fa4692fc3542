"""One model type's loss: the stock model's and that of a patched head, in fp64 and in bf16, with labels that fit.

`benchmarks.coverage --losses` runs it on every type with a head, `tests/zoo/test_losses.py` on some.
"""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memopt.patches.apply import apply, undo
from memopt.plan.plan import Plan, make_plan
from memopt.plan.recipe import load_recipe
from memopt.verification.forward import PASS_RATIO
from memopt.walk.aten.precision import precise
from memopt.walk.calls.inputs import runnable_calls, training_targets
from memopt.walk.calls.preserve import preserved
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import one_line
from memopt.walk.observe import find_sites
from tests.zoo.build import Row, Stop, config_of, model_types, twin_of
from tests.zoo.coverage_sums import COVERAGE, Sum
from tests.zoo.examine import difference

#: What the last `benchmarks.coverage --losses` recorded.
LOSSES = COVERAGE.with_name("losses.json")
#: Largest relative difference of loss, gradients and logits.
TOLERANCE = 1e-10
_RECIPE = (
    *(f"{key}.method=none" for key in ("norms", "activations", "gated_mlps", "softmaxes")),
    "loss.method=chunked",
)


@dataclass
class LossRow:
    model_type: str
    status: str = ""
    """``fused``, ``whole`` (the logits were computed whole), ``wrong``, or ``left`` (there is no cross-entropy over a
    head's logits, or no inputs are known)."""
    reason: str = ""
    difference: float = 0.0
    bf16: float | None = None
    """The larger of two errors in bf16 over the stock model's: that of the loss to the loss of the same logits in fp64,
    and that of all gradients to the fp64 run; None where the model does not run in bf16."""


def types_with_a_head() -> list[str]:
    """Model types in which the last `make coverage` found a head over a vocabulary, and types that it did not know."""
    recorded = {row["model_type"]: row["counts"] for row in json.loads(COVERAGE.read_text())["rows"]}
    return [name for name in model_types() if "loss" in recorded.get(name, "loss")]


def loss_sums(rows: Sequence[dict[str, Any]]) -> list[Sum]:
    """What is promised of the rows' losses."""
    of = {
        status: [row["model_type"] for row in rows if row["status"] == status] for status in ("wrong", "fused", "whole")
    }
    compared = sum(map(len, of.values()))
    ratios = {row["model_type"]: row["bf16"] for row in rows if row.get("bf16") is not None}
    worse = [name for name, ratio in ratios.items() if not ratio <= PASS_RATIO]
    fused = len(of["fused"]) / max(compared, 1)
    return [
        Sum(
            "losses that are not the stock model's",
            f"{', '.join(of['wrong']) or 0} of {compared}",
            "0",
            not of["wrong"],
        ),
        Sum(
            "losses from logits that are never whole",
            f"{len(of['fused'])} of {compared} ({100 * fused:.1f} %)",
            ">= 97 %",
            fused >= 0.97,
        ),
        Sum(
            f"bf16 errors above {PASS_RATIO} times stock's", f"{', '.join(worse) or 0} of {len(ratios)}", "0", not worse
        ),
    ]


def loss_page(document: dict[str, Any]) -> str:
    """docs/losses.md."""
    rows = document["rows"]
    lines = [_INTRO, "| | | wanted |", "|---|---|---|"]
    lines += [
        f"| {each.name} | {each.text}{'' if each.holds else ' **short**'} | {each.target} |" for each in loss_sums(rows)
    ]
    for title, statuses in (("Computed whole, or wrong", ("whole", "wrong")), ("Not compared", ("left", "not run"))):
        lines += ["", f"## {title}", "", "| reason | types |", "|---|---|"]
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if row["status"] in statuses:
                reasons.setdefault(row["reason"].replace("|", "\\|"), []).append(row["model_type"])
        lines += [f"| {reason} | {', '.join(names)} |" for reason, names in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


_INTRO = """\
# Losses

Written by `python -m benchmarks.coverage --losses`; do not edit.

Every model type in which a head over a vocabulary was found is built small, given labels that fit, and its loss is
computed by the stock model and with the head patched alone. Loss, the gradient of every parameter and `outputs.logits`
are compared in fp64 (1e-10). In bf16, two errors are divided by the stock model's: that of the loss to the loss of the
same logits in fp64, and that of all gradients to the fp64 run. A loss that is computed whole is the stock model's,
without the saving.
"""


class _Losses(TorchFunctionMode):
    """Inside, notes cross-entropies of tensors with this many columns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.seen: list[float] = []
        self.exact: list[float] = []
        """The same of the same logits, computed in fp64; of the stock model alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (F.cross_entropy, F.nll_loss):
            logits, *others = args or [kwargs["input"]]
            if self.width in logits.shape:
                self.seen.append(float(result.detach().double().mean()))
                if type(logits) is Tensor:
                    given = {**kwargs, "input": logits.detach().double()}
                    given.update(zip(("target", "weight"), others, strict=False))
                    if given.get("weight") is not None:
                        given["weight"] = given["weight"].double()
                    self.exact.append(float(func(**given).mean()))
        return result


def examine_loss(model_type: str) -> LossRow:
    """Compare the losses of one model type."""
    row = LossRow(model_type, "left")
    try:
        twin = twin_of(config_of(Row(model_type)))
        for parameter in twin.parameters():  # so that the fp64 run is the truth of the bf16 ones
            parameter.data = parameter.data.bfloat16().to(parameter.dtype)
        calls = runnable_calls(twin, variants=("plain",))
    except Stop as stop:
        row.reason = stop.reason
        return row
    sites = find_sites(build_meta(twin.config))
    if not calls or sites.loss_head is None:
        obstacles = [head.obstacle for head in sites.loss_heads if head.obstacle]
        row.reason = (obstacles or ["no head over a vocabulary"])[0] if calls else "no inputs"
        return row
    batch = dict(calls[0].kwargs)
    targets = training_targets(twin, batch)
    if not targets:
        row.reason = "no loss with labels that are made here"
        return row
    plan = make_plan(sites, load_recipe("exact-unfolded", _RECIPE))
    try:
        with _Losses(sites.loss_head.vocab_size) as losses:
            stock = _run(twin, {**batch, **targets})
    except Exception as error:
        row.reason = f"the stock model's step does not run here: {type(error).__name__}: {one_line(error)}"
        return row
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
        difference({k: stock[k] for k in keys}, {k: run[k] for k in keys}, 1e-4) for keys, run in pairs
    )
    row.status, row.reason = ("whole", _reader(notes[0])) if notes else ("fused", "")
    if not row.difference <= TOLERANCE:
        row.status, row.reason = "wrong", f"differs by {row.difference:.1e}"
    row.bf16 = _bf16(twin, {**batch, **targets}, plan, stock, sites.loss_head.vocab_size)
    return row


def _reader(note: str) -> str:
    """Who read the logits, by a note of a patched head: the operation, the file without its folder, the line."""
    found = re.search(r"since (.+) at (?:.*/)?(\S+);", note)
    return f"{found[1]} in {found[2]}" if found else note


def _bf16(twin: nn.Module, batch: dict[str, Any], plan: Plan, truth: dict[str, Tensor], width: int) -> float | None:
    """Errors of a patched step in bf16 over those of a stock one, the larger of loss and gradients; `twin` is cast."""
    twin.bfloat16()
    batch = {k: v.bfloat16() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    runs = []
    try:
        with _Losses(width) as stock:
            runs.append(_run(twin, batch, torch.bfloat16, read=False))
    except Exception:  # the stock model's: a type that does not run in bf16
        return None
    apply(twin, plan)
    with _Losses(width) as ours:
        runs.append(_run(twin, batch, torch.bfloat16, read=False))
    one, other = (_gradient_error(run, truth) for run in runs)
    of_losses = (
        _loss_error(mine, exact) / _loss_error(its, exact)
        for mine, its, exact in zip(ours.seen, stock.seen, stock.exact, strict=False)
    )
    return max(one / max(other, 1e-30), *of_losses)


def _loss_error(loss: float, exact: float) -> float:
    """Relative to the loss of the same logits, and at least the roundoff of bf16: a loss that is right by luck is no
    yardstick, nor is the fp64 model's, from which the logits of both are off by more."""
    return max(abs(loss - exact) / max(abs(exact), 1e-30), torch.finfo(torch.bfloat16).eps / 2)


def _gradient_error(run: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Of all gradients, each relative to its own size."""
    gradients = [name for name in run.keys() & truth.keys() if name != "loss" and truth[name].any()]
    squares = ((run[n].double() - truth[n]).norm() / truth[n].norm() for n in gradients)
    return float(sum(each**2 for each in squares)) ** 0.5


def _run(
    model: nn.Module, batch: dict[str, Any], dtype: torch.dtype = torch.float64, *, read: bool = True
) -> dict[str, Tensor]:
    """Loss and gradients of one step, and the logits if they are to be `read`."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    with preserved(model), precise(dtype):
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
