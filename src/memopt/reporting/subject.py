"""What a report is of: a model and a training step, known well enough to be traced from the config alone."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from memopt.checkpoint.patched import PatchedFolder, is_patched, patched_folder
from memopt.errors import ModelError
from memopt.plan.plan import make_plan
from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, Recipe, load_recipe
from memopt.reporting.adapters import check_peft
from memopt.reporting.estimate import max_positions
from memopt.reporting.quantised import other_method, quantisation_of
from memopt.reporting.training import Training
from memopt.walk.calls.batch import Batch, check_names, given_batch, in_words, placed, rows_of, tokens_of
from memopt.walk.deep import find_deep_sites
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import load_config, model_class
from memopt.walk.observe import find_sites, walk_config
from memopt.walk.sites import Sites

_LONGEST_DEFAULT_SEQ = 2048


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
    """The model of `source` and what is known of it; arguments and errors are those of `memopt.report`."""
    config = load_config(source, revision=revision, trust_remote_code=trust_remote_code)
    record, rules = record_of(Path(source).expanduser()), chosen_recipe(source, recipe)
    return subject_of(config, training, seq, rules, record, given_batch(inputs), trust_remote_code)


def subject_of(
    config: PreTrainedConfig,
    training: Training,
    seq: int | None,
    rules: Recipe,
    record: PatchedFolder | None,
    batch: Batch | None,
    trust_remote_code: bool,
) -> Subject:
    """:func:`subject` of a config that is loaded and a recipe that is known.

    Args:
        record: of the patched folder that the config is of, if it is of one.
        batch: the inputs that were given.
    """
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
        counted = (
            "its linears count in bitsandbytes' 4 bits" if training.train == "qlora" else "its weights count whole"
        )
        notes.append(f"The checkpoint is quantised ({method}), which is not counted: {counted}.")
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


def chosen_recipe(source: str | Path, recipe: str | Path | Recipe | None) -> Recipe:
    """`recipe`, else that of the patched folder `source`, else ``exact-unfolded``.

    Raises:
        RecipeError: the recipe is unknown.
    """
    record = None if recipe is not None else record_of(Path(source).expanduser())
    return load_recipe(recipe or (record.recipe if record else DEFAULT_MEMORY_RECIPE))


def record_of(folder: Path) -> PatchedFolder | None:
    """What `folder` says of itself; None where it is no patched folder."""
    return patched_folder(folder) if folder.is_dir() and is_patched(folder) else None


def default_seq(config: PreTrainedConfig) -> int:
    """Tokens in a row where none are given: what the config allows up to 2048."""
    return min(_LONGEST_DEFAULT_SEQ, max_positions(config) or _LONGEST_DEFAULT_SEQ)


def reads_tokens(config: PreTrainedConfig) -> bool:
    """Whether the model of `config` reads token ids (and not images or sounds alone)."""
    return not {"input_ids", "decoder_input_ids"}.isdisjoint(inspect.signature(model_class(config).forward).parameters)


def _sites_alone(model: PreTrainedModel, batch: Batch | None) -> Sites:
    """Sites without proofs; with guessed inputs where the batch does not run on shapes alone."""
    if batch is not None:
        check_names(model, batch)
        sites = find_sites(model, placed(batch, None, model.dtype))
        if sites.ran:
            return sites
    return find_deep_sites(model)
