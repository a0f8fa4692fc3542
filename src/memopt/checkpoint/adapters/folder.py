"""A folder of a PEFT adapter: its config, its tensors, and the module of the base model to which each tensor belongs.

PEFT names a tensor ``base_model.model.MODULE.PART``: PART is a parameter of an adapter (``lora_A.weight``), or a tensor
of the module itself that was trained as a whole (``modules_to_save``, biases).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from memopt.checkpoint.fold import map_names
from memopt.checkpoint.sources.base import Shard
from memopt.checkpoint.sources.header import FLOAT_DTYPES, read_header
from memopt.checkpoint.sources.safetensors import SafetensorsFiles
from memopt.checkpoint.sources.source import MANIFEST, CheckpointSource, other_files
from memopt.environment.files import ADAPTER_CONFIG, check_folder, read_object, user_path
from memopt.errors import ModelError
from memopt.walk.sites import ancestors

WEIGHTS = "adapter_model.safetensors"
KIND = "adapter"
_PREFIX = "base_model.model."
#: Beginning of the names of the parameters that an adapter adds to a module.
_ADDED = re.compile(r"\.(lora|hada|lokr|oft|boft|vera|ia3)_|\.(token_adapter|trainable_tokens)\.")


class Part(NamedTuple):
    """One tensor of an adapter."""

    key: str
    module: str | None
    """The module of the tensor, by its name in the base model's files; None if they have no such module."""
    leaf: str
    """The rest of the name."""
    added: bool
    """True for a parameter of the adapter; False for a trained tensor of the module itself."""
    base: str | None
    """Name in the base model's files of the tensor that this part replaces or is added to."""

    @property
    def name(self) -> str:
        """The module as the adapter names it."""
        return self.key.removeprefix(_PREFIX).replace(".base_layer.", ".").removesuffix(f".{self.leaf}")


@dataclass(frozen=True)
class Adapter:
    """An opened adapter folder."""

    source: CheckpointSource
    """The adapter's one file of weights; its `config` is the adapter's config."""
    record: Mapping[str, Any] | None
    """The adapter's memopt.json; None if memopt did not convert it."""

    @property
    def config(self) -> Mapping[str, Any]:
        return self.source.config

    @property
    def kind(self) -> str:
        return str(self.config.get("peft_type"))

    def parts(self, base: CheckpointSource) -> list[Part]:
        """Every tensor with its module in the files of the base model. Raises a ModelError if that lacks a module that
        the adapter is added to, or has it in another size."""
        parts = list(_parts(self.source.tensors, base))
        rows = {part.module: self.source.tensors[part.key] for part in parts if part.leaf in _ROWS}
        for part in parts:
            info = self.source.tensors[part.key]
            if info.dtype not in FLOAT_DTYPES:
                raise self.misfit(f"{part.key} is stored as {info.dtype}")
            if part.added and part.module is None:
                raise self.misfit(f"the model has no module for {part.key}")
            if part.leaf in _COLUMNS and part.module not in rows:
                raise self.misfit(f"{part.key} has no B")
            weight = base.tensors.get(part.base or "")
            if part.leaf in _COLUMNS and weight is not None:
                sizes = (rows[part.module].shape[0], *info.shape[1:])
                if sorted(sizes) != sorted(weight.shape):
                    raise self.misfit(
                        f"{part.key} and its pair are for a weight {sizes}, the model's is {weight.shape}"
                    )
        return parts

    def misfit(self, why: str) -> ModelError:
        return ModelError(
            f"The adapter '{self.source.root}' does not fit the model: {why}.", "Give the model that it was trained on."
        )


_COLUMNS, _ROWS = ("lora_A.weight", "lora_A"), ("lora_B.weight", "lora_B")


def open_adapter(folder: str | Path) -> Adapter:
    """Open the folder of a PEFT adapter, headers only; a ModelError if it is none, or a file is damaged or a pickle."""
    root = user_path(folder).resolve()
    if not (root / ADAPTER_CONFIG).is_file():
        raise ModelError(f"'{folder}' has no {ADAPTER_CONFIG}.", "Give the folder of a PEFT adapter.")
    check_folder(root)
    if not (root / WEIGHTS).is_file():
        raise ModelError(f"'{root}' has no {WEIGHTS}.", "Save it with PEFT's save_pretrained(DIR).")
    config = read_object(root / ADAPTER_CONFIG, "Copy it again.")
    record = read_object(root / MANIFEST, "Copy it again.") if (root / MANIFEST).is_file() else None
    if record is not None and record.get("kind") != KIND:
        raise ModelError(f"'{root / MANIFEST}' is that of a model, not of an adapter.", "Keep them in two folders.")
    weights = SafetensorsFiles((Shard(WEIGHTS, read_header(root / WEIGHTS), root / WEIGHTS),), None)
    side_files, left_out = other_files(root, {WEIGHTS, MANIFEST, ADAPTER_CONFIG})
    return Adapter(CheckpointSource(str(folder), root, None, None, weights, side_files, left_out, config), record)


def pattern_value(patterns: object, module: str, default: Any) -> Any:
    """PEFT's rule for ``rank_pattern`` and ``alpha_pattern``: the first key that is the end of the module's name."""
    for key, value in patterns.items() if isinstance(patterns, dict) else ():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _parts(keys: Iterable[str], base: CheckpointSource) -> Iterator[Part]:
    names = {key: key.removeprefix(_PREFIX).replace(".base_layer.", ".") for key in keys}
    modules = {parent for name in base.tensors for parent in ancestors(name)}
    found = map_names({parent for name in names.values() for parent in ancestors(name)}, modules)
    found |= {name.rpartition(".")[0]: key.rpartition(".")[0] for name, key in base.renamed.items()}
    owning = {name.rpartition(".")[0] for name in base.tensors}
    for key, name in names.items():
        owners = [parent for parent in ancestors(name) if parent in found] if key.startswith(_PREFIX) else []
        owner = found[owners[-1]] if owners else None
        leaf = name.removeprefix(f"{owners[-1]}.") if owners else name
        own, weight = (
            base.renamed.get(f"{owners[-1]}.{part}", f"{owner}.{part}") if owners else "" for part in (leaf, "weight")
        )
        if own in base.tensors:
            yield Part(key, owner, leaf, False, own)
        elif owner in owning:
            yield Part(key, owner, leaf, True, weight)
        else:  # its module is not in the files: a head for another task, or the adapter does not fit
            yield Part(key, None, name, bool(_ADDED.search(name)) and key.startswith(_PREFIX), None)


def to_json(value: Mapping[str, Any]) -> str:
    """A small JSON file, as PEFT writes them."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
