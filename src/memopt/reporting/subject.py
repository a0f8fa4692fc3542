"""From what a user asks about to a step that can be traced from the config alone."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from memopt.checkpoint.patched import PatchedFolder, is_patched, patched_folder
from memopt.errors import ModelError
from memopt.plan.plan import make_plan
from memopt.plan.recipe import DEFAULT_MEMORY_RECIPE, Recipe, load_recipe
from memopt.reporting.adapters import check_peft
from memopt.reporting.estimate import max_positions
from memopt.reporting.quantised import other_method, quantisation_of
from memopt.reporting.step import Step
from memopt.reporting.training import Request
from memopt.walk.calls.batch import Batch, check_names, given_batch, in_words, placed, rows_of, tokens_of
from memopt.walk.deep import find_deep_sites
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import load_config, model_class
from memopt.walk.observe import find_sites, walk_config
from memopt.walk.sites import Sites

_LONGEST_DEFAULT_SEQ = 2048


def step_of(request: Request) -> Step:
    """The step that `request` asks about; errors are those of `memopt.report`."""
    config = load_config(request.model, revision=request.revision, trust_remote_code=request.trust_remote_code)
    record, rules = record_of(request.model), chosen_recipe(request)
    return step_with(config, request, rules, record, given_batch(request.inputs))


def step_with(
    config: PreTrainedConfig, request: Request, rules: Recipe, record: PatchedFolder | None, batch: Batch | None
) -> Step:
    """:func:`step_of` with a config that is loaded and a recipe that is known.

    Args:
        record: of the patched folder that the config is of, if it is of one.
        batch: the inputs that were given.
    """
    training, seq = request.training, request.seq
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
        sites = walk_config(config, inputs=batch, trust_remote_code=request.trust_remote_code)
        folded = frozenset(norm.name for norm in make_plan(sites, rules).folds())
    return Step(config, training, sites, rules, folded, batch, tuple(notes))


def chosen_recipe(request: Request) -> Recipe:
    """The recipe of `request`, else that of its patched folder, else ``exact-unfolded``.

    Raises:
        RecipeError: the recipe is unknown.
    """
    record = None if request.recipe is not None else record_of(request.model)
    return load_recipe(request.recipe or (record.recipe if record else DEFAULT_MEMORY_RECIPE))


def record_of(model: str | Path) -> PatchedFolder | None:
    """What the folder `model` says of itself; None where it is no patched folder."""
    folder = Path(model).expanduser()
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
