"""The model that a patched folder was made from, and how its norms were folded."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from memopt.checkpoint.fold import Fold, FoldPlan
from memopt.checkpoint.manifest import CONFIG_KEY
from memopt.checkpoint.names import with_renamed
from memopt.checkpoint.patched import PatchedFolder, digest_of_affines, digest_of_folds, is_patched
from memopt.checkpoint.sources.source import MANIFEST, CheckpointSource, needs_allow_pickle, open_source
from memopt.errors import ModelError
from memopt.plan.plan import make_plan
from memopt.plan.recipe import Recipe
from memopt.walk.calls.batch import Batch
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import load_config
from memopt.walk.observe import walk_folder
from memopt.walk.sites import Sites


def original_of(record: PatchedFolder, against: str | Path | None, allow_pickle: bool) -> CheckpointSource:
    """The model that a patched folder was made from."""
    model, revision = (str(against), None) if against is not None else record.origin()
    if model is None:
        raise ModelError(
            f"'{record.folder}' does not say where {record.base_model}, from which it was made, is now.",
            "Give it with --against (in Python: against=).",
        )
    read = record.manifest is not None and needs_allow_pickle(record.manifest.source.files)
    source = open_source(model, revision=revision, allow_pickle=allow_pickle or read)
    if is_patched(source.root):
        raise ModelError(f"'{model}' is itself patched.", "Give the model that it was made from.")
    return source


def folds_of(
    record: PatchedFolder, patched: CheckpointSource, original: CheckpointSource, trust_remote_code: bool
) -> tuple[Fold, ...]:
    """The folds of a patched folder; without memopt.json they are planned again, and must match config.json's key."""
    if record.manifest is not None:
        folds = tuple(each.fold for each in record.manifest.folds)
    else:
        original, sites, _ = walk_source(original, record.recipe, None, trust_remote_code)
        plan = make_plan(sites, record.recipe)
        planned = FoldPlan.from_plan(plan, original.tensors, original.weights.aliases, original.renamed)
        folds = tuple(fold for fold in planned.folds if fold.norm in record.folded_norms())
    key = patched.config.get(CONFIG_KEY)
    expected = key if isinstance(key, dict) else {}
    if record.manifest is None and digest_of_folds(folds) != expected.get("folds"):
        raise ModelError(
            f"The folds of '{record.folder}' cannot be planned again from '{original.model}' (it was patched by "
            f"memopt {expected.get('version')}).",
            f"Give the model that it was made from, or copy the {MANIFEST} of the patched folder into this one.",
        )
    there = all(name in original.tensors for fold in folds for name in fold.own)  # otherwise `unfold` keeps these folds
    if there and expected.get("affines", found := digest_of_affines(folds, original.read_range)) != found:
        raise ModelError(
            f"'{original.model}' is not the model that '{record.folder}' was made from: its norms have other weights.",
            "Give that model with --against.",
        )
    return folds


def named(source: CheckpointSource, trust_remote_code: bool) -> CheckpointSource:
    """`source` with the names of its model's parameters; without them if its model cannot be built. A model of its own
    code, which needs trust, is one that transformers renames nothing of."""
    with suppress(ModelError):
        return with_renamed(source, build_meta(load_config(source.root, trust_remote_code=trust_remote_code)))
    return source


def walk_source(
    source: CheckpointSource, rules: Recipe, batch: Batch | None, trust_remote_code: bool
) -> tuple[CheckpointSource, Sites, Batch | None]:
    """`source` with the names of its parameters, sites, and the batch that the walk ran with: the user's, the
    processor's, or None for guessed inputs."""
    config = load_config(source.root, trust_remote_code=trust_remote_code)
    sites, driven = walk_folder(
        config, source.root, inputs=batch, attention=rules.runs_attention, trust_remote_code=trust_remote_code
    )
    return with_renamed(source, build_meta(config)), sites, driven
