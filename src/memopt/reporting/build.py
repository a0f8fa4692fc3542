"""From a model id or folder to the comparison of stock and patched, from the config alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from memopt.checkpoint.patched import PatchedFolder, is_patched, patched_folder
from memopt.errors import InputsError, MemoptError, ModelError
from memopt.forks import each
from memopt.plan.plan import Plan, make_plan
from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, Recipe, load_recipe
from memopt.reporting.adapters import check_peft
from memopt.reporting.compare import Comparison
from memopt.reporting.estimate import max_positions, trace_account
from memopt.reporting.quantised import other_method, quantisation_of
from memopt.reporting.training import Training
from memopt.walk.calls.batch import Batch, check_names, describe, given_batch, in_words, placed, rows_of, tokens_of
from memopt.walk.calls.processed import has_processor, processed_batches
from memopt.walk.deep import find_deep_sites
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import load_config, model_class
from memopt.walk.observe import find_sites, walk_config
from memopt.walk.sites import Sites

_LONGEST_DEFAULT_SEQ = 2048


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
    record, rules = _record(folder), chosen_recipe(source, recipe)
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


def default_seq(config: PreTrainedConfig) -> int:
    """Tokens in a row where none are given: what the config allows up to 2048."""
    return min(_LONGEST_DEFAULT_SEQ, max_positions(config) or _LONGEST_DEFAULT_SEQ)


def chosen_recipe(source: str | Path, recipe: str | Path | Recipe | None) -> Recipe:
    """`recipe`, else that of the patched folder `source`, else ``exact-unfolded``.

    Raises:
        RecipeError: the recipe is unknown.
    """
    record = None if recipe is not None else _record(Path(source).expanduser())
    return load_recipe(recipe or (record.recipe if record else DEFAULT_MEMORY_RECIPE))


def _record(folder: Path) -> PatchedFolder | None:
    return patched_folder(folder) if folder.is_dir() and is_patched(folder) else None


@dataclass(frozen=True)
class Subject:
    """A model and a training step, ready to be traced from the config alone."""

    config: PreTrainedConfig
    training: Training
    sites: Sites
    recipe: Recipe
    folded: frozenset[str] = frozenset()
    """Norms whose affine is folded in the checkpoint."""
    inputs: Batch | None = None
    """The batch that was given."""
    notes: tuple[str, ...] = ()


def subject(
    source: str | Path,
    training: Training,
    *,
    seq: int | None = None,
    recipe: str | Path | Recipe | None = None,
    inputs: Batch | str | Path | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Subject:
    """The model of `source` and what is known of it; arguments and errors are those of :func:`compare_training`."""
    config = load_config(source, revision=revision, trust_remote_code=trust_remote_code)
    record, rules = _record(Path(source).expanduser()), chosen_recipe(source, recipe)
    return _subject(config, training, seq, rules, record, given_batch(inputs), trust_remote_code)


def _subject(
    config: PreTrainedConfig,
    training: Training,
    seq: int | None,
    rules: Recipe,
    record: PatchedFolder | None,
    batch: Batch | None,
    trust_remote_code: bool,
) -> Subject:
    if quantisation_of(config) is not None:
        if training.train == "full":
            raise ModelError(
                "The checkpoint holds its weights in bitsandbytes' 4 bits, which cannot be trained.",
                "Use --train qlora, or the model that it was quantised from.",
            )
        training = replace(training, train="qlora")
    if training.has_adapters:
        check_peft()
    notes = []
    if (method := other_method(config)) is not None:
        notes.append(
            f"The checkpoint is quantised ({method}), which is not counted: its weights count as if they were not."
        )
    if batch is not None:
        training = replace(training, batch=rows_of(batch), seq=tokens_of(batch))
        notes.append(f"Inputs: a batch of {in_words(batch)}.")
    elif not reads_tokens(config):
        notes += ["The model reads no tokens, so --seq has no effect."] if seq else []
        training = replace(training, seq=None)
    else:
        training = replace(training, seq=seq or default_seq(config))
    if record is not None or not rules.folds:
        # The folded norms are known, so no fold has to be proved.
        sites = _sites_alone(build_meta(config), batch)
        folded = record.folded_norms() if record is not None else frozenset()
    else:
        sites = walk_config(config, inputs=batch, trust_remote_code=trust_remote_code)
        folded = frozenset(norm.name for norm in make_plan(sites, rules).folds())
    return Subject(config, training, sites, rules, folded, batch, tuple(notes))


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
    of = _subject(config, training, seq, rules, record, batch, trust_remote_code)
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


def _sites_alone(model: PreTrainedModel, batch: Batch | None) -> Sites:
    """Sites without proofs; with guessed inputs where the batch does not run on shapes alone."""
    if batch is not None:
        check_names(model, batch)
        sites = find_sites(model, placed(batch, None, model.dtype))
        if sites.ran:
            return sites
    return find_deep_sites(model)


def reads_tokens(config: PreTrainedConfig) -> bool:
    """Whether the model of `config` reads token ids (and not images or sounds alone)."""
    return not {"input_ids", "decoder_input_ids"}.isdisjoint(inspect.signature(model_class(config).forward).parameters)
