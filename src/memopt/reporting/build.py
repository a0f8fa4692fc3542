"""Compare stock and patched model, given by a model id or folder, from the config alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from transformers import PreTrainedConfig

from memopt.environment.files import user_path
from memopt.environment.forks import each
from memopt.errors import InputsError, MemoptError, ModelError
from memopt.plan.plan import Plan, make_plan
from memopt.prediction.setup import Setup
from memopt.prediction.sharding import step_of_device
from memopt.prediction.subject import Subject, default_seq, reads_tokens, subject_of
from memopt.reporting.compare import Comparison
from memopt.trace.trace import trace_account
from memopt.trace.training import Request, Step, Training
from memopt.walk.calls.batch import Batch, describe
from memopt.walk.calls.processed import has_processor, processed_batches
from memopt.walk.models.build import build_meta


def compare_training(request: Request, setup: Setup | None = None) -> Comparison:
    """The bytes that a training step saves for backward on a device of `setup`, before and after patching; raises the
    errors of `memopt.report`. If the request has neither sizes nor inputs, the batch comes from a patched folder's
    manifest or, if memopt can guess no inputs, from the folder's processor."""
    inputs, folder = request.inputs, user_path(request.model)
    subject = subject_of(request)
    batch, manifest = subject.batch(), subject.record.manifest if subject.record else None

    def attempts() -> Iterator[Batch | None]:
        yield batch
        if inputs is None and batch is not None:
            yield None
        if subject.any_size and has_processor(folder):
            model = build_meta(subject.config)
            yield from processed_batches(model, folder, trust_remote_code=request.trust_remote_code)

    first: MemoptError | None = None
    for attempt in attempts():
        try:
            comparison = _compare(subject, attempt, setup or Setup())
        except (ModelError, InputsError) as error:
            first = first or error
            continue
        if first is None or batch is None:
            return comparison
        why = "Inputs: guessed, since memopt.json has no values of the batch that it was patched with; see --inputs."
        return replace(comparison, notes=(why, *comparison.notes))
    assert first is not None
    if inputs is None and manifest is not None and manifest.inputs is not None and manifest.inputs.file is not None:
        file = manifest.inputs.file
        raise ModelError(first.message, f"It was patched with --inputs {file}: pass --inputs {file}.") from first
    raise first


def compare_bytes(source: str, config: PreTrainedConfig, plan: Plan) -> Comparison:
    """The bytes that one row saves for backward, stock and by `plan`: full tuning in bf16, guessed inputs, no peak.
    Raises a ModelError if the model cannot be traced from its config."""
    training = Training(seq=default_seq(config) if reads_tokens(config) else None)
    sites, folded = plan.sites, frozenset(norm.name for norm in plan.folds())
    of = Step(config, training, sites, plan.recipe, folded)
    before, after = trace_account(of.stock), trace_account(of)
    return Comparison(source, sites.model_class, plan.recipe.name, training, before, after)


def _compare(subject: Subject, batch: Batch | None, setup: Setup) -> Comparison:
    of, rules = step_of_device(subject.step(batch), setup), subject.rules
    sites, notes = of.sites, list(of.notes)
    before, after = each([partial(trace_account, way, whole=True) for way in (of.stock, of)])
    plan = make_plan(sites, rules)
    if plan.does_nothing:
        notes.append(
            f"Both columns are equal: recipe '{rules.name}' rewrites nothing here, because {plan.why_nothing}."
        )
    notes += plan.notes
    return Comparison(
        model=str(subject.request.model),
        model_class=sites.model_class,
        recipe=rules.name,
        training=of.training,
        before=before,
        after=after,
        notes=tuple(dict.fromkeys((*notes, *before.notes, *after.notes, *filter(None, (sites.unseen,)), *sites.notes))),
        inputs=None if batch is None else describe(batch),
        step=of,
    )
