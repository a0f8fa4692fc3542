"""Level "memory": the patched model saves for backward what the plan predicts, block by block.

Three numbers for the same forward: the stock model's saved bytes, the patched model's, and the prediction of a trace of
the plan on the config alone. The patched model's live storages are counted too, so that a tensor hidden in an
attribute shows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memopt.checkpoint.patched import patched_folder
from memopt.checks import Check, ratio_status
from memopt.errors import ModelError
from memopt.reporting.account import Account, account, live_bytes
from memopt.reporting.estimate import trace_account
from memopt.reporting.training import Precision, Training
from memopt.verification.inputs import Probes, probe_inputs
from memopt.verification.models import cast_inputs, load_patched, load_run_free, load_stock, stored_dtype
from memopt.verification.step import training_loss
from memopt.walk.calls.batch import Batch
from memopt.walk.observe import walk_model
from memopt.walk.sites import Sites

_PRECISIONS: dict[torch.dtype, Precision] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

#: Share by which prediction and measurement may differ; 10 % is what PyTorch's own memory tracker is tested to.
PASS_DRIFT, WARN_DRIFT = 0.03, 0.10


@dataclass(frozen=True)
class _Stock:
    """What the stock model saves, and the inputs and sites of all runs."""

    account: Account
    config: Any
    dtype: torch.dtype
    probes: Probes
    driven: Batch | None
    """The batch that the walk runs with; None to guess one."""
    sites: Sites


def verify_memory(folder: Path, *, trust_remote_code: bool = False, inputs: Batch | None = None) -> list[Check]:
    """Measure one forward of both models on real tensors (eval mode, so no dropout masks) and compare."""
    record = patched_folder(folder)

    def run_stock(model: nn.Module) -> _Stock:
        probes = probe_inputs(model, folder, inputs, trust_remote_code=trust_remote_code)
        # The walk guesses inputs itself, in all variants, where there is no batch of the user's or a processor's.
        driven = None if probes.guessed else cast_inputs(probes.batches[0], stored_dtype(model))
        sites = walk_model(model, driven)
        return _Stock(_measure(model, probes, sites)[0], model.config, stored_dtype(model), probes, driven, sites)

    stock = load_run_free(functools.partial(load_stock, folder, trust_remote_code=trust_remote_code), run_stock)
    probes, driven, sites = stock.probes, stock.driven, stock.sites
    patched, live = load_run_free(
        functools.partial(load_patched, folder, trust_remote_code=trust_remote_code, inputs=driven),
        lambda model: _measure(model, probes, sites),
    )
    checks = list(_compare(stock.account, patched, live, probes))
    precision = _PRECISIONS.get(stock.dtype)
    if precision is None:
        return [*checks, _skip("no trace is made for checkpoints in this dtype")]
    recipe = record.recipe.unfolded()
    training = Training(probes.rows, probes.tokens_per_row, precision, dropout=False, cuda_kernels=False)
    try:
        predicted = trace_account(
            stock.config, training, sites=sites, recipe=recipe, folded=record.folded_norms(), inputs=driven
        )
    except ModelError as error:
        return [*checks, _skip(str(error))]
    return [*checks, *_against_plan(patched, predicted)]


def _measure(model: nn.Module, probes: Probes, sites: Sites) -> tuple[Account, int]:
    inputs = cast_inputs({**probes.batches[0], **probes.targets[0]}, stored_dtype(model))

    def run() -> torch.Tensor:
        return training_loss(model, inputs)

    return account(model, run, blocks=sites.blocks, sites=sites), live_bytes(run)


def _compare(stock: Account, patched: Account, live: int, probes: Probes) -> Iterator[Check]:
    blocks = list(stock.blocks)
    before, after = _of_blocks(stock), _of_blocks(patched)
    subject = f"{len(blocks)} blocks" if blocks else "whole model"
    ratio = after / before if before else float("nan")
    yield Check(
        id="memory.kept",
        level="memory",
        subject=subject,
        status="pass" if ratio < 1 else "fail",
        metric="bytes saved for backward / the stock model's",
        value=ratio,
        threshold=1.0,
        threshold_reason="patching must save",
        reference="stock modules, same weights and inputs",
        n=after,
        detail=(
            f"{_mib(before)} -> {_mib(after)} in the {subject}, "
            f"whole model {_mib(stock.total)} -> {_mib(patched.total)}"
        ),
    )
    growing = [block for block in blocks if patched.per_block()[block] > stock.per_block()[block]]
    yield Check(
        id="memory.no_block_grows",
        level="memory",
        subject=growing[0] if growing else subject,
        status="fail" if growing else "pass",
        metric="blocks that save more than before",
        value=float(len(growing)),
        threshold=0.0,
        reference="stock modules, same weights and inputs",
        n=len(blocks),
    )
    hidden = live - patched.saved
    yield Check(
        id="memory.nothing_hidden",
        level="memory",
        subject="whole model",
        status="pass" if hidden == 0 else "fail",
        metric="live bytes after forward that are in no saved tensor",
        value=float(hidden),
        threshold=0.0,
        threshold_reason="every live byte belongs to a saved tensor",
        reference="live storages after the forward",
        n=live,
        detail=f"inputs: {probes.source}",
    )


def _against_plan(patched: Account, predicted: Account) -> Iterator[Check]:
    measured, planned = _of_blocks(patched), _of_blocks(predicted)
    drift = abs(measured - planned) / planned if planned else float("nan")
    yield Check(
        id="memory.plan",
        level="memory",
        subject=f"{len(patched.blocks)} blocks" if patched.blocks else "whole model",
        status=ratio_status(drift, PASS_DRIFT, WARN_DRIFT),
        metric="difference to the plan's bytes",
        value=drift,
        threshold=PASS_DRIFT,
        threshold_reason="10 % is PyTorch's own tolerance for its memory tracker; 3 % is this tool's",
        reference="trace of the plan from the config alone",
        n=measured,
        detail=f"planned {_mib(planned)}, measured {_mib(measured)}",
    )


def _of_blocks(kept: Account) -> int:
    """Bytes of all blocks, shared ones included; of the whole model where it has no blocks."""
    if not kept.blocks:
        return kept.total
    return sum(kept.per_block().values()) + kept.per_part().get("shared", 0)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"


def _skip(reason: str) -> Check:
    return Check(id="memory.plan", level="memory", subject="blocks", status="skip", detail=reason)
