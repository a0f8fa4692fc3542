"""For `memopt.load`: checks a patched folder against its own record, from headers or by digests; for models that are
patched before their weights are read, reads the norms, and patches before transformers shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.checkpoint.fold import FoldPlan
from memopt.checkpoint.manifest import CONFIG_KEY, Manifest, changed_files
from memopt.checkpoint.names import SHOWN, compare_names, with_renamed
from memopt.checkpoint.patched import PatchedFolder, digest_of_folds
from memopt.checkpoint.sources.source import MANIFEST, CheckpointSource, open_source
from memopt.errors import ModelError, first_of
from memopt.walk.models.plain import exchanged


def check_fits(record: PatchedFolder, config: PreTrainedConfig | None, *, digests: bool) -> None:
    """Compare the files of a patched folder, whose weights are safetensors, with its record and, with `digests`, the
    SHA-256 of every file with memopt.json. The tensors must have the names and shapes of the model of `config`; None if
    another class loads. Raises a ModelError if a tensor, the list of folds or a file does not fit, or there are no
    digests to compare with."""
    manifest, source = record.manifest, open_source(str(record.folder))
    wrong: list[str] = []
    if manifest is not None:
        folds = tuple(each.fold for each in manifest.folds)
        key = source.config.get(CONFIG_KEY)
        if isinstance(key, dict) and key.get("folds") not in (None, digest_of_folds(folds)):
            wrong.append(f"{MANIFEST} lists folds that differ from config.json's")
        misfits = FoldPlan(folds).misfits(source.tensors)
        wrong += (f"{MANIFEST} has a fold that the tensors do not allow: {why}" for why in misfits)
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


def _changed(manifest: Manifest, source: CheckpointSource) -> list[str]:
    """The files that were changed or added since the manifest, except files for engines, which users complete."""
    found = changed_files(manifest.files, source.root)
    there = {*source.side_files, *source.left_out, *(shard.name for shard in source.shards)}
    changed = [f"{name} {what}" for name, what in found if name not in manifest.emitted]
    return changed + [f"{name} was added" for name in sorted(there - manifest.files.keys())]


@contextmanager
def affines_read(model: nn.Module, folder: Path, norms: Mapping[str, str]) -> Iterator[list[str]]:
    """Inside, norms (module name -> name in the files) whose parameters are on meta have the weights and biases of the
    files; parameters that still exist afterwards are on meta again. Yields the names of the norms that have values."""
    modules = {name: model.get_submodule(name) for name in norms}
    empty = {name for name, module in modules.items() if any(tensor.is_meta for tensor in module.parameters())}
    source = open_source(str(folder)) if empty else None
    if source is not None and isinstance(model, PreTrainedModel):
        source = with_renamed(source, model)
    lent: list[tuple[nn.Module, str, nn.Parameter]] = []
    known = [name for name in norms if name not in empty]
    for name in empty:
        assert source is not None
        own = {
            each: source.renamed.get(f"{name}.{each}", f"{norms[name]}.{each}") for each in modules[name]._parameters
        }
        if not set(own.values()) <= source.tensors.keys():
            continue
        known.append(name)
        for each, stored in own.items():
            parameter = modules[name].get_parameter(each)
            lent.append((modules[name], each, parameter))
            values = source.read(stored).to(parameter.dtype)
            modules[name]._parameters[each] = nn.Parameter(values, parameter.requires_grad)
    try:
        yield known
    finally:
        for module, each, parameter in lent:
            if each in module._parameters:
                module._parameters[each] = parameter


def before_sharding(change: Callable[[nn.Module], object]) -> AbstractContextManager[None]:
    """Inside, `change` gets every model on meta that ``from_pretrained(distributed_config=...)`` is about to shard.
    Later is too late: a module that FSDP2 has sharded takes no other parameters, and each rank reads only its shards.
    This has no effect if transformers has no ``maybe_distribute_model``."""
    name = "maybe_distribute_model"
    inherited: Any = getattr(PreTrainedModel, name, None)

    def changed(cls: type, model: nn.Module, distributed_config: Any, mesh: Any) -> Any:
        if mesh is not None:
            change(model)
        return inherited.__func__(cls, model, distributed_config, mesh)

    return exchanged([] if inherited is None else [(PreTrainedModel, name, classmethod(changed))])
