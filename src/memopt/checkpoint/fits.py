"""Check a patched folder against its own record before it is loaded: from headers, or by digests."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedConfig

from memopt.checkpoint.fold import FoldPlan
from memopt.checkpoint.manifest import CONFIG_KEY, Manifest
from memopt.checkpoint.names import SHOWN, compare_names
from memopt.checkpoint.patched import PatchedFolder, digest_of_folds
from memopt.checkpoint.sources.source import MANIFEST, CheckpointSource, open_source
from memopt.errors import ModelError, first_of


def check_fits(record: PatchedFolder, config: PreTrainedConfig | None, *, digests: bool) -> None:
    """Compare the files of a patched folder, whose weights are safetensors, with its record.

    Args:
        config: config of the model to load, whose names and shapes the tensors must have; None if another class loads.
        digests: compare the SHA-256 of every file with memopt.json as well.

    Raises:
        ModelError: a tensor, the list of folds or a file does not fit, or there are no digests to compare with.
    """
    manifest, source = record.manifest, open_source(str(record.folder))
    wrong: list[str] = []
    if manifest is not None:
        folds = [each.fold for each in manifest.folds]
        key = source.config.get(CONFIG_KEY)
        if isinstance(key, dict) and key.get("folds") not in (None, digest_of_folds(folds)):
            wrong.append(f"{MANIFEST} lists folds that differ from config.json's")
        wrong += (f"{MANIFEST} has a fold that the tensors do not allow: {why}" for why in _misfits(manifest, source))
        if digests:
            wrong += _changed(manifest, source)
    elif digests:
        hint = "Load it without verify=True: a folder that was saved after the patch has no digests."
        raise ModelError(f"'{record.folder}' has no {MANIFEST}, so its files have no digests.", hint)
    if not wrong and config is not None:
        wrong += compare_names(source, config).wrong
    if wrong:
        raise ModelError(
            f"'{record.folder}' differs from what `memopt patch` wrote: {first_of(wrong, SHOWN, '; ')}.",
            f"Patch the model again. If it was trained and saved into this folder, remove {MANIFEST}.",
        )


def _misfits(manifest: Manifest, source: CheckpointSource) -> Iterator[str]:
    return FoldPlan(tuple(each.fold for each in manifest.folds)).misfits(source.tensors)


def _changed(manifest: Manifest, source: CheckpointSource) -> list[str]:
    """The files that were changed or added since the manifest, except files for engines, which users complete."""
    found = manifest.changed_files(source.root)
    there = {*source.side_files, *source.left_out, *(shard.name for shard in source.shards)}
    changed = [f"{name} {what}" for name, what in found if name not in manifest.emitted]
    return changed + [f"{name} was added" for name in sorted(there - manifest.files.keys())]
