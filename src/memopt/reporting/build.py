"""From a model id or folder to the comparison of stock and patched, from the config alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedConfig

from memopt.checkpoint.patched import PatchedFolder
from memopt.errors import InputsError, MemoptError, ModelError
from memopt.forks import each
from memopt.plan.plan import Plan, make_plan
from memopt.plan.recipe import Recipe
from memopt.reporting.compare import Comparison
from memopt.reporting.estimate import trace_account
from memopt.reporting.subject import chosen_recipe, default_seq, reads_tokens, record_of, subject_of
from memopt.reporting.training import Training
from memopt.walk.calls.batch import Batch, describe, given_batch
from memopt.walk.calls.processed import has_processor, processed_batches
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import load_config


def compare_training(
    source: str | Path,
    training: Training,
    *,
    seq: int | None = None,
    recipe: str | Path | Recipe | None = None,
    inputs: Batch | str | Path | None = None,
    any_size: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Comparison:
    """Which bytes a training step of `source` saves for backward, before and after patching.

    Arguments and errors are those of `memopt.report`, and:

    Args:
        training: how it is trained; `seq` replaces its `seq`, and the sizes of `inputs` its sizes.
        any_size: allow a batch of another size: that of a patched folder's manifest, or, where no inputs can be
            guessed, one from the folder's processor.
    """
    batch = given_batch(inputs)
    config = load_config(source, revision=revision, trust_remote_code=trust_remote_code)
    folder = Path(source).expanduser()
    record, rules = record_of(folder), chosen_recipe(source, recipe)
    manifest = record.manifest if record else None
    if batch is None and any_size and record is not None:
        batch = record.batch()

    def attempts() -> Iterator[Batch | None]:
        yield batch
        if inputs is None and batch is not None:
            yield None
        if inputs is None and any_size and has_processor(folder):
            yield from processed_batches(build_meta(config), folder, trust_remote_code=trust_remote_code)

    first: MemoptError | None = None
    for attempt in attempts():
        try:
            comparison = _compare(str(source), config, training, seq, rules, record, attempt, trust_remote_code)
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
    """What one row saves for backward, stock and by `plan`: full tuning in bf16, guessed inputs, no peak.

    Raises:
        ModelError: the model cannot be traced from its config.
    """
    training = Training(seq=default_seq(config) if reads_tokens(config) else None)
    sites, folded = plan.sites, frozenset(norm.name for norm in plan.folds())
    before = trace_account(config, training, sites=sites)
    after = trace_account(config, training, sites=sites, recipe=plan.recipe, folded=folded)
    return Comparison(source, sites.model_class, plan.recipe.name, training, before, after)


def _compare(
    source: str,
    config: PreTrainedConfig,
    training: Training,
    seq: int | None,
    rules: Recipe,
    record: PatchedFolder | None,
    batch: Batch | None,
    trust_remote_code: bool,
) -> Comparison:
    of = subject_of(config, training, seq, rules, record, batch, trust_remote_code)
    sites, notes = of.sites, list(of.notes)
    stock = partial(trace_account, config, of.training, sites=sites, inputs=batch, peak=True)
    before, after = each([stock, partial(stock, recipe=rules, folded=of.folded)])
    plan = make_plan(sites, rules)
    if plan.does_nothing:
        notes.append(f"Both columns are equal: recipe '{rules.name}' rewrites nothing here, since {plan.why_nothing}.")
    notes += plan.notes
    return Comparison(
        model=source,
        model_class=sites.model_class,
        recipe=rules.name,
        training=of.training,
        before=before,
        after=after,
        notes=tuple(dict.fromkeys((*notes, *before.notes, *after.notes, *sites.notes))),
        inputs=None if batch is None else describe(batch),
        subject=of,
    )
