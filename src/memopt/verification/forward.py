"""Level "forward": the outputs of the patched model are as close to the truth as the original's.

The truth is a run of the original weights in fp64. Both models are compared with it and not with each other, because
two correct 16-bit models differ from each other as much as from the truth. One more rounding of the weights predicts a
ratio of errors of at most 1.12; 1.25 passes, and 2 is the limit of FlashAttention's and PyTorch's own comparisons.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from memopt.checkpoint.patched import PatchedFolder
from memopt.environment.generators import seed_all
from memopt.errors import ModelError
from memopt.patches.checks import Check, limited, skipped
from memopt.patches.record import record_of
from memopt.verification.inputs import Probes
from memopt.verification.models import cast_inputs, floating_outputs, load_patched, load_run_free, load_stock
from memopt.verification.ratios import chance_ratio
from memopt.verification.side_files import allowed_changes
from memopt.verification.stochastic import JUMP_SCALE, JumpingRows, RandomRounding, Run, rounded_at_random
from memopt.verification.trial import CheckpointTrial, StoredRun
from memopt.walk.aten.precision import precise

PASS_RATIO = 1.25
WARN_RATIO = 2.0
#: Squared, because the divergence grows with the square of the error.
PASS_DIVERGENCE = PASS_RATIO**2
WARN_DIVERGENCE = WARN_RATIO**2
#: Errors below this many unit roundoffs of the truth count as this many: rounding the result alone costs that.
FLOOR_ROUNDOFFS = 1
#: Least and most runs of the original with random rounding, if a check does not pass. Each comes with a second run,
#: which finds the rows that jump.
_ROUNDED, _MOST = 4, 16
#: If an output has fewer elements, its limits are widened by the effect of chance on the ratio of so few errors.
_FEW = 512


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


def verify_forward(trial: CheckpointTrial, folder: PatchedFolder, model: str, revision: str | None) -> list[Check]:
    """One check for each floating-point output, and for logits their KL divergence and top token. `model` and
    `revision`: the original that `folder` was made from."""
    trust = trial.trust_remote_code
    load_original = functools.partial(load_stock, model, revision=revision, trust_remote_code=trust)
    try:
        loaded = [load_original()]
    except ModelError as error:
        return [_skipped(f"the original cannot be loaded: {error}")]
    # Popped, so that nothing else refers to the model when it is freed.
    original = load_run_free(loaded.pop, functools.partial(trial.stored_run, _run, 2))
    if original is None:
        return [_skipped("no more precise run than the model's own fits into memory")]
    probes, dtype, reference = original.probes, original.dtype, original.reference

    def true_outputs(model: nn.Module) -> Run:
        with precise(reference.dtype):
            return _run(model, probes, reference.dtype)

    truth = load_run_free(functools.partial(load_original, dtype=reference.dtype), true_outputs)
    manifest = folder.manifest
    assert manifest is not None  # weights that were saved again are compared with no original

    def run_patched(model: nn.Module) -> tuple[Run, frozenset[str]]:
        record = record_of(model)
        changed = allowed_changes(manifest, record.plan.sites) if record else frozenset[str]()
        return _run(model, probes, dtype, training_path=True), changed

    patched, changed = load_run_free(
        functools.partial(load_patched, folder.folder, trust_remote_code=trust, inputs=trial.inputs), run_patched
    )
    outputs = {
        "patched": patched,
        "stock classes on the patched files": load_run_free(trial.stock, lambda model: _run(model, probes, dtype)),
    }
    source = f"{reference.name} run of the original weights" + (f"; {reference.note}" if reference.note else "")
    compared = _Comparison(outputs, truth, dtype, source, probes.source, changed)
    checks = list(compared.checks([original.result]))
    if all(check.status == "pass" for check in checks):
        return checks
    folded = frozenset().union(*(record.fold.touched for record in manifest.folds))
    usual = {
        field: compared.errors(original.result, field).rms
        for field, value in truth[0].items()
        if value.dim() >= 2
        and all(field in batch for batch in original.result)
        and _shapes(original.result, field) == _shapes(truth, field)
    }
    jumps = JumpingRows(truth, usual, outputs.values())
    again = load_run_free(load_original, functools.partial(_rounded_at_random, original, folded, jumps))
    return list(compared.checks([original.result, *again], jumps.rows()))


@torch.no_grad()
def _rounded_at_random(
    original: StoredRun[Run], folded: Collection[str], jumps: JumpingRows, model: nn.Module
) -> list[Run]:
    """Runs of the original in which the weights that folds change are rounded at random, as a fold rounds them again.
    Further runs round every result too, more coarsely; rows that jump in these depend on one rounding (`jumps`).
    """
    weights = {name: parameter for name, parameter in model.named_parameters() if name in folded}
    stored = {name: parameter.clone() for name, parameter in weights.items()}
    generator = torch.Generator().manual_seed(0)
    coarsely = RandomRounding(original.dtype, JUMP_SCALE)

    def run(scale: float) -> Run:
        for name, parameter in weights.items():
            parameter.copy_(rounded_at_random(stored[name], generator, scale))
        with contextlib.nullcontext() if scale == 1 else coarsely:
            return _run(model, original.probes, original.dtype)

    runs: list[Run] = []
    # A choice may differ in only one run of ten.
    while len(runs) < _ROUNDED or (len(runs) < _MOST and jumps.may_jump_in_more(runs)):
        runs.append(run(1.0))
        jumps.add(run(JUMP_SCALE))
    return runs


def _shapes(run: Run, field: str) -> tuple[tuple[int, ...], ...]:
    """The shape of an output in each batch. It may depend on the precision, where it follows random numbers (VITS)."""
    return tuple(tuple(batch[field].shape) for batch in run)


def _run(model: nn.Module, probes: Probes, dtype: torch.dtype, *, training_path: bool = False) -> Run:
    """Outputs for every probe. Patched modules run memopt's forward only where gradients are recorded."""
    results = []
    seed_all(0)
    for inputs in probes.batches:
        with torch.set_grad_enabled(training_path):
            outputs = floating_outputs(model(**cast_inputs(inputs, dtype)))
        results.append({name: tensor.detach().clone() for name, tensor in outputs.items()})
    return results


@dataclass(frozen=True)
class _Comparison:
    """Runs of patched files, which are compared with those of the original, and the truth."""

    outputs: dict[str, Run]
    """The run with memopt's modules, ``patched``, and the run with stock classes."""
    truth: Run
    dtype: torch.dtype
    reference: str
    probe_source: str
    changed: Collection[str]
    """Fields that the recipe allows folds to change."""

    def checks(
        self, originals: Sequence[Run], jumps: Mapping[str, list[Tensor]] = MappingProxyType({})
    ) -> Iterator[Check]:
        """Checks of every field: the largest error of the `originals`, runs of the original, counts. `jumps` are rows
        of each batch that are left out, by field."""
        runs = (*self.outputs.values(), *originals)
        batches = [batch.keys() for run in (self.truth, *runs) for batch in run]
        fields = sorted(set().union(*batches))
        if not fields:
            yield _skipped("the model returns no floating-point output")
        for field in fields:
            if not all(field in batch for batch in batches):
                yield Check(
                    "forward.outputs", "forward", field, "fail", detail="not every run returns it in every batch"
                )
                continue
            own, shapes = ({_shapes(run, field) for run in each} for each in ((self.truth, *originals), runs))
            if len(own) > 1 or len(shapes) > 1:
                yield Check(
                    id="forward.shape", level="forward", subject=field, status="skip" if len(own) > 1 else "fail",
                    reference=self.reference,
                    detail=f"{'runs of the original' if len(own) > 1 else 'the two models'} give it different shapes: "
                    + " and ".join(map(str, sorted(own if len(own) > 1 else shapes))),
                )  # fmt: skip
                continue
            if field.partition("[")[0] in self.changed:
                yield self._changed_output(field)
                continue
            left_out = jumps.get(field)
            # A few numbers (the logits of a classifier) may be right by luck.
            elements = sum(batch[field].numel() for batch in self.truth)
            chance = chance_ratio(elements) if len(originals) > 1 and elements < _FEW else 1.0
            original = max((self.errors(run, field, left_out) for run in originals), key=lambda errors: errors.rms)
            bound = max(original.rms, original.floor(self.dtype) / PASS_RATIO)
            for candidate, run in self.outputs.items():
                errors = self.errors(run, field, left_out)
                ratio = errors.rms / bound if bound else (0.0 if errors.rms == 0 else float("inf"))
                yield limited(
                    "forward.error_ratio", f"{field}, {candidate}", ratio, PASS_RATIO * chance,
                    "RMS error / the original's own", "one more rounding of the weights predicts 1.12; above 2 fails",
                    self.reference, errors.n,
                    f"RMS error {errors.rms:.3g}, the original's {original.rms:.3g}, inputs: {self.probe_source}"
                    + _left_out(left_out), warns=WARN_RATIO * chance,
                )  # fmt: skip
            if field == "logits":
                yield self._divergence(originals, left_out, chance**2)

    def _changed_output(self, field: str) -> Check:
        errors = self.errors(self.outputs["patched"], field)
        size = math.sqrt(errors.square_truth / max(errors.n, 1))
        return Check(
            id="forward.changed_output", level="forward", subject=f"{field}, patched", status="pass",
            metric="RMS change / RMS of the original's", value=errors.rms / size if size else float("inf"),
            reference=self.reference, n=errors.n,
            detail="changed on purpose: the recipe's norms.hidden_states lets folds change hidden states",
        )  # fmt: skip

    def errors(self, run: Run, field: str, left_out: list[Tensor] | None = None) -> _Errors:
        errors = _Errors()
        for position, (got, expected) in enumerate(zip(run, self.truth, strict=True)):
            rows = slice(None) if left_out is None else ~left_out[position]
            errors = errors.add(got[field][rows], expected[field][rows])
        return errors

    def _divergence(self, originals: Sequence[Run], left_out: list[Tensor] | None, chance: float) -> Check:
        def mean(run: Run) -> tuple[float, float]:
            """Divergence a row, and the share of rows whose top choice is the reference's."""
            total, agreed = 0.0, 0
            for got, exact, chosen in zip(run, exacts, rows, strict=True):
                approximate = got["logits"][chosen].double().log_softmax(-1)
                total += float((exact.exp() * (exact - approximate)).sum())
                agreed += int((exact.argmax(-1) == approximate.argmax(-1)).sum())
            return max(total, 0.0) / count, agreed / count

        rows = [slice(None) if left_out is None else ~left_out[position] for position in range(len(self.truth))]
        logits = [expected["logits"][chosen].double() for expected, chosen in zip(self.truth, rows, strict=True)]
        exacts = [each.log_softmax(-1) for each in logits]
        count = sum(each[..., 0].numel() for each in logits)
        scale = sum(float(each.var(-1, correction=0).sum()) for each in logits)
        (divergence, agreement), (own, own_agreement) = mean(self.outputs["patched"]), max(map(mean, originals))
        # The divergence of logits that are off by e is about half the mean of e squared; e is one rounding of the
        # logits.
        floor = (FLOOR_ROUNDOFFS * torch.finfo(self.dtype).eps / 2) ** 2 * scale / count / 2
        # Its terms are of size one and summed in fp64, so its own error is the epsilon of fp64.
        floor = max(floor, torch.finfo(torch.float64).eps)
        ratio = divergence / max(own, floor / PASS_DIVERGENCE)
        return limited(
            "forward.divergence_ratio", "logits, patched", ratio, PASS_DIVERGENCE * chance,
            "mean KL divergence / the original's own", "the divergence grows with the square of the error",
            self.reference, count,
            f"KL {divergence:.3g}, the original's {own:.3g}; top choice agrees with the reference "
            f"in {agreement:.1%} of positions, the original's in {own_agreement:.1%}{_left_out(left_out)}",
            warns=WARN_DIVERGENCE * chance,
        )  # fmt: skip


def _left_out(rows: list[Tensor] | None) -> str:
    count = sum(int(each.sum()) for each in rows or ())
    return f"; {count} rows in which a choice depends on one rounding are left out" if count else ""


_skipped = functools.partial(skipped, "forward.error_ratio", "outputs")
