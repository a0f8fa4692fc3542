"""Level "forward": the outputs of the patched model are as close to the truth as the original's.

The truth is a run of the original weights in fp64. Both models are compared with it and not with each other, since two
correct 16-bit models differ from each other as much as from the truth. One more rounding of the weights predicts a
ratio of errors of at most 1.12; 1.25 passes, and 2 is the limit of FlashAttention's and PyTorch's own comparisons.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memopt.checkpoint.manifest import read_manifest
from memopt.checks import Check, ratio_status
from memopt.errors import ModelError
from memopt.patches.record import record_of
from memopt.verification.inputs import Probes, probe_inputs
from memopt.verification.models import (
    Pair,
    Reference,
    cast_inputs,
    choose_reference,
    floating_outputs,
    load_patched,
    load_run_free,
    load_stock,
    stored_dtype,
)
from memopt.verification.side_files import allowed_changes
from memopt.walk.aten.precision import precise

PASS_RATIO = 1.25
WARN_RATIO = 2.0
#: Squared, because the divergence grows with the square of the error.
PASS_DIVERGENCE = PASS_RATIO**2
WARN_DIVERGENCE = WARN_RATIO**2
#: Errors below this many unit roundoffs of the truth count as this many: rounding the result alone costs that.
FLOOR_ROUNDOFFS = 1


@dataclass(frozen=True)
class _Errors:
    """Sums over all probe inputs."""

    square_error: float = 0.0
    square_truth: float = 0.0
    n: int = 0

    def add(self, value: Tensor, truth: Tensor) -> _Errors:
        difference = value.double() - truth.double()
        return _Errors(
            self.square_error + float(difference.square().sum()),
            self.square_truth + float(truth.double().square().sum()),
            self.n + truth.numel(),
        )

    @property
    def rms(self) -> float:
        return math.sqrt(self.square_error / max(self.n, 1))

    def floor(self, dtype: torch.dtype) -> float:
        unit_roundoff = torch.finfo(dtype).eps / 2
        return FLOOR_ROUNDOFFS * unit_roundoff * math.sqrt(self.square_truth / max(self.n, 1))


@dataclass(frozen=True)
class _Original:
    """The run of the original weights, and the probes and dtypes of all runs."""

    outputs: list[dict[str, Tensor]]
    dtype: torch.dtype
    reference: Reference
    probes: Probes


def verify_forward(pair: Pair) -> list[Check]:
    """One check for each floating-point output, and for logits their KL divergence and top token."""
    trust = pair.trust_remote_code
    load_original = functools.partial(load_stock, pair.original, revision=pair.revision, trust_remote_code=trust)
    try:
        original = load_run_free(functools.partial(_loaded, load_original), functools.partial(_run_original, pair))
    except _NotLoaded as error:
        return [_skip(f"the original cannot be loaded: {error}")]
    if original is None:
        return [_skip("no more precise run than the model's own fits into memory")]
    probes, dtype, reference = original.probes, original.dtype, original.reference

    def true_outputs(model: nn.Module) -> list[dict[str, Tensor]]:
        with precise(reference.dtype):
            return _run(model, probes, reference.dtype)

    truth = load_run_free(functools.partial(load_original, dtype=reference.dtype), true_outputs)
    manifest = read_manifest(pair.patched)

    def run_patched(model: nn.Module) -> tuple[list[dict[str, Tensor]], frozenset[str]]:
        record = record_of(model)
        changed = allowed_changes(manifest, record.plan.sites) if record else frozenset[str]()
        return _run(model, probes, dtype, training_path=True), changed

    patched, changed = load_run_free(
        functools.partial(load_patched, pair.patched, trust_remote_code=trust, inputs=pair.inputs), run_patched
    )
    outputs = {
        "original": original.outputs,
        "patched": patched,
        "stock classes on the patched files": load_run_free(
            functools.partial(load_stock, pair.patched, trust_remote_code=trust),
            lambda model: _run(model, probes, dtype),
        ),
    }
    source = f"{reference.name} run of the original weights" + (f"; {reference.note}" if reference.note else "")
    return list(_compare(outputs, truth, dtype, source, probes.source, changed))


class _NotLoaded(Exception):
    """The original cannot be loaded."""


def _loaded(load: Callable[[], nn.Module]) -> nn.Module:
    try:
        return load()
    except ModelError as error:
        raise _NotLoaded(str(error)) from error


def _run_original(pair: Pair, model: nn.Module) -> _Original | None:
    """The original's outputs; None where no more precise run fits into memory."""
    dtype = stored_dtype(model)
    reference = choose_reference(sum(p.numel() for p in model.parameters()), dtype, copies=2)
    if reference is None:
        return None
    probes = probe_inputs(model, pair.patched, pair.inputs, trust_remote_code=pair.trust_remote_code)
    return _Original(_run(model, probes, dtype), dtype, reference, probes)


def _run(
    model: nn.Module, probes: Probes, dtype: torch.dtype, *, training_path: bool = False
) -> list[dict[str, Tensor]]:
    """Outputs for every probe. Patched modules run memopt's forward only where gradients are recorded."""
    results = []
    for inputs in probes.batches:
        with torch.set_grad_enabled(training_path):
            outputs = floating_outputs(model(**cast_inputs(inputs, dtype)))
        results.append({name: tensor.detach().clone() for name, tensor in outputs.items()})
    return results


def _compare(
    outputs: dict[str, list[dict[str, Tensor]]],
    truth: list[dict[str, Tensor]],
    dtype: torch.dtype,
    reference: str,
    probe_source: str,
    changed: Collection[str],
) -> Iterator[Check]:
    """Checks of every field; `changed`: those that the recipe allows folds to change."""
    fields = [field for field in truth[0] if all(field in batch for run in outputs.values() for batch in run)]
    if not fields:
        yield _skip("the model returns no floating-point output")
    for field in fields:
        shapes = {tuple(run[0][field].shape) for run in (*outputs.values(), truth)}
        if len(shapes) > 1:
            yield Check(
                id="forward.shape",
                level="forward",
                subject=field,
                status="fail",
                reference=reference,
                detail="the two models give it different shapes: " + " and ".join(map(str, sorted(shapes))),
            )
            continue
        if field.partition("[")[0] in changed:
            yield _changed(outputs["patched"], truth, field, reference)
            continue
        original = _errors(outputs["original"], truth, field)
        bound = max(original.rms, original.floor(dtype) / PASS_RATIO)
        for candidate in ("patched", "stock classes on the patched files"):
            errors = _errors(outputs[candidate], truth, field)
            ratio = errors.rms / bound if bound else (0.0 if errors.rms == 0 else float("inf"))
            yield Check(
                id="forward.error_ratio",
                level="forward",
                subject=f"{field}, {candidate}",
                status=ratio_status(ratio, PASS_RATIO, WARN_RATIO),
                metric="RMS error / the original's own",
                value=ratio,
                threshold=PASS_RATIO,
                threshold_reason="one more rounding of the weights predicts 1.12; above 2 fails",
                reference=reference,
                n=errors.n,
                detail=f"RMS error {errors.rms:.3g}, the original's {original.rms:.3g}, inputs: {probe_source}",
            )
        if field == "logits":
            yield _divergence(outputs, truth, dtype, reference)


def _changed(patched: list[dict[str, Tensor]], truth: list[dict[str, Tensor]], field: str, reference: str) -> Check:
    errors = _errors(patched, truth, field)
    size = math.sqrt(errors.square_truth / max(errors.n, 1))
    return Check(
        id="forward.changed_output",
        level="forward",
        subject=f"{field}, patched",
        status="pass",
        metric="RMS change / RMS of the original's",
        value=errors.rms / size if size else float("inf"),
        reference=reference,
        n=errors.n,
        detail="changed on purpose: the recipe's norms.hidden_states lets folds change hidden states",
    )


def _errors(run: list[dict[str, Tensor]], truth: list[dict[str, Tensor]], field: str) -> _Errors:
    errors = _Errors()
    for got, expected in zip(run, truth, strict=True):
        errors = errors.add(got[field], expected[field])
    return errors


def _divergence(
    outputs: dict[str, list[dict[str, Tensor]]], truth: list[dict[str, Tensor]], dtype: torch.dtype, reference: str
) -> Check:
    values: dict[str, float] = {}
    agreement: dict[str, float] = {}
    rows, scale = 0, 0.0
    for name in ("original", "patched"):
        total, agreed, rows, scale = 0.0, 0, 0, 0.0
        for got, expected in zip(outputs[name], truth, strict=True):
            exact = expected["logits"].double().log_softmax(-1)
            approximate = got["logits"].double().log_softmax(-1)
            total += float((exact.exp() * (exact - approximate)).sum())
            agreed += int((exact.argmax(-1) == approximate.argmax(-1)).sum())
            rows += exact[..., 0].numel()
            scale += float(expected["logits"].double().var(-1, correction=0).sum())
        values[name], agreement[name] = max(total, 0.0) / rows, agreed / rows
    # The divergence of logits that are off by e is about half the mean of e squared; e is one rounding of the logits.
    floor = (FLOOR_ROUNDOFFS * torch.finfo(dtype).eps / 2) ** 2 * scale / rows / 2
    # Its terms are of size one and summed in fp64, so it is known to the epsilon of that.
    floor = max(floor, torch.finfo(torch.float64).eps)
    ratio = values["patched"] / max(values["original"], floor / PASS_DIVERGENCE)
    return Check(
        id="forward.divergence_ratio",
        level="forward",
        subject="logits, patched",
        status=ratio_status(ratio, PASS_DIVERGENCE, WARN_DIVERGENCE),
        metric="mean KL divergence / the original's own",
        value=ratio,
        threshold=PASS_DIVERGENCE,
        threshold_reason="the divergence grows with the square of the error",
        reference=reference,
        n=rows,
        detail=(
            f"KL {values['patched']:.3g}, the original's {values['original']:.3g}; "
            f"top choice agrees with the reference "
            f"in {agreement['patched']:.1%} of positions, the original's in {agreement['original']:.1%}"
        ),
    )


def _skip(reason: str) -> Check:
    return Check(id="forward.error_ratio", level="forward", subject="outputs", status="skip", detail=reason)
