"""From a model id or folder to the comparison of stock and patched, by the config alone."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedConfig

from memopt.checkpoint.manifest import is_patched, read_manifest
from memopt.plan import make_plan
from memopt.recipe import DEFAULT_MEMORY_RECIPE, Recipe, load_recipe
from memopt.report.compare import Comparison
from memopt.report.estimate import max_positions, trace_account
from memopt.report.training import Training
from memopt.walk.build import build_meta, load_config
from memopt.walk.config import model_class
from memopt.walk.observe import find_sites, walk_config

_LONGEST_DEFAULT_SEQ = 2048


def compare_training(
    source: str | Path,
    training: Training,
    *,
    seq: int | None = None,
    recipe: str | Path | Recipe | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Comparison:
    """What a training step of `source` keeps for backward, before and after patching.

    Args:
        source: a hub id, a local folder, or a folder that `memopt patch` wrote. Only its config is read.
        training: how it is trained; its `seq` gives way to `seq`.
        seq: tokens in a row; by default as many as the config allows, up to 2048.
        recipe: by default the one in the folder's manifest, else ``exact-unfolded``.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run the code that the model carries.

    Raises:
        ModelError: the config cannot be found, built or traced.
        RecipeError: the recipe is unknown.
    """
    config = load_config(source, revision=revision, trust_remote_code=trust_remote_code)
    notes = []
    if not reads_tokens(config):
        notes = ["The model reads no tokens, so --seq has no effect."] if seq else []
        training = replace(training, seq=None)
    else:
        training = replace(training, seq=seq or default_seq(config))
    folder = Path(source).expanduser()
    manifest = read_manifest(folder) if folder.is_dir() and is_patched(folder) else None
    rules = load_recipe(recipe or (manifest.recipe if manifest else DEFAULT_MEMORY_RECIPE))
    if manifest is not None or rules.norms.fold == "never":
        # What is folded is known, so no fold has to be proved.
        sites = find_sites(build_meta(config))
        folded = manifest.folded_norms() if manifest is not None else frozenset()
    else:
        sites = walk_config(config, trust_remote_code=trust_remote_code)
        folded = frozenset(norm.name for norm in make_plan(sites, rules).norms("fold"))
    before = trace_account(config, training, sites=sites)
    after = trace_account(config, training, sites=sites, recipe=rules, folded=folded)
    return Comparison(
        model=str(source),
        model_class=sites.model_class,
        recipe=rules.name,
        training=training,
        before=before,
        after=after,
        notes=tuple(dict.fromkeys((*notes, *before.notes, *after.notes, *sites.notes))),
    )


def reads_tokens(config: PreTrainedConfig) -> bool:
    """Whether the model of `config` reads token ids (and not images or sounds alone)."""
    return not {"input_ids", "decoder_input_ids"}.isdisjoint(inspect.signature(model_class(config).forward).parameters)


def default_seq(config: PreTrainedConfig) -> int:
    """As many tokens as the model has positions for, up to 2048."""
    return min(_LONGEST_DEFAULT_SEQ, max_positions(config) or _LONGEST_DEFAULT_SEQ)
