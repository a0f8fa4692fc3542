"""A patched folder and its record: one definition for patch, load, verify, report and unpatch.

`memopt patch` writes two records: memopt.json, and the key ``memopt`` in config.json. `save_pretrained` of the loaded
model writes only the key, so a folder with the key alone holds weights that were saved later, as a rule after training.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memopt
from memopt.checkpoint.fold import Fold
from memopt.checkpoint.manifest import CONFIG_KEY, Manifest, fold_to_dict, read_manifest
from memopt.checkpoint.sources.source import MANIFEST, read_config
from memopt.environment.files import ADAPTER_CONFIG, refuse_adapter
from memopt.errors import ModelError
from memopt.plan.recipe import Recipe

KEY_SCHEMA_VERSION = 2


@dataclass(frozen=True)
class ConfigKey:
    """The value of ``memopt`` in config.json, which is still there when the model is saved after training."""

    schema_version: int
    version: str
    """Version of the memopt that patched the model."""
    base_model: str
    """The model that was patched: a hub id, or the name of its folder (no path)."""
    commit: str | None
    recipe: dict[str, Any]
    folded_norms: tuple[str, ...]
    """Module names."""
    folds: str
    """Digest of the folds: how they were made."""
    affines: str
    """Digest of the original weights and biases of the folded norms."""


@dataclass(frozen=True)
class PatchedFolder:
    """A patched folder with its record, from memopt.json or from the key in config.json."""

    folder: Path
    manifest: Manifest | None
    """None if the model was loaded and saved again."""
    key: ConfigKey | None
    """Read only if there is no manifest."""
    recipe: Recipe

    @property
    def base_model(self) -> str:
        """The model that was patched, for a sentence or a command."""
        if self.manifest is not None:
            source = self.manifest.source
            return source.model if source.commit else source.path
        return self.key.base_model if self.key else "MODEL"

    def origin(self) -> tuple[str | None, str | None]:
        """(model, revision) to open the model that was patched; (None, None) if it is unknown or no longer there."""
        if self.manifest is None:
            assert self.key is not None
            return (self.key.base_model, self.key.commit) if self.key.commit else (None, None)
        source = self.manifest.source
        if source.commit is not None:
            return source.model, source.commit
        return (source.path if os.path.isdir(source.path) else None), None

    def folded_norms(self) -> frozenset[str]:
        """Module names of the norms whose affine was folded into the next linears."""
        if self.manifest is not None:
            return self.manifest.folded_norms()
        return frozenset(self.key.folded_norms if self.key else ())

    def batch(self) -> dict[str, Any] | None:
        """The batch that the model was patched with, on the meta device; None if it was guessed or is not known."""
        return None if self.manifest is None else self.manifest.batch()


def is_patched(folder: Path) -> bool:
    """Whether `memopt patch` wrote `folder`, or a patched model was loaded and saved to it."""
    if (folder / MANIFEST).is_file():  # a converted adapter has a memopt.json too
        return (folder / "config.json").is_file() or not (folder / ADAPTER_CONFIG).is_file()
    try:
        return CONFIG_KEY in read_config(folder)
    except ModelError:
        return False


def check_patched(folder: Path) -> None:
    """Raise a ModelError if `folder` is not patched."""
    if not is_patched(folder):
        refuse_adapter(folder)
        raise ModelError(f"'{folder}' was not patched.", "Give a folder that `memopt patch` wrote.")


def patched_folder(folder: Path) -> PatchedFolder:
    """The record of the patched folder. Raises a ModelError if `folder` is not patched (an adapter with a memopt.json
    is not), or its memopt.json is damaged or, without a memopt.json, its key."""
    if not (folder / "config.json").is_file():
        refuse_adapter(folder)
    if (folder / MANIFEST).is_file() or not is_patched(folder):
        manifest = read_manifest(folder)
        return PatchedFolder(folder, manifest, None, manifest.recipe)
    key, recipe = _parse(folder, read_config(folder)[CONFIG_KEY])
    return PatchedFolder(folder, None, key, recipe)


def config_key(
    model: str,
    path: str | Path,
    commit: str | None,
    recipe: Recipe,
    folds: Iterable[Fold],
    affines: str,
    version: str | None = None,
) -> dict[str, Any]:
    """The value of the key for `model`, read from the folder `path`."""
    folds = tuple(folds)
    return {
        "schema_version": KEY_SCHEMA_VERSION,
        "version": version or memopt.__version__,
        "base_model": model if commit else Path(path).name,
        "commit": commit,
        "recipe": recipe.model_dump(mode="json", exclude={"description"}),
        "folded_norms": [fold.norm for fold in folds],
        "folds": digest_of_folds(folds),
        "affines": affines,
    }


def digest_of_folds(folds: Iterable[Fold]) -> str:
    """SHA-256 of the description of the folds; no weight enters it."""
    return hashlib.sha256(json.dumps([fold_to_dict(fold) for fold in folds], sort_keys=True).encode()).hexdigest()


def digest_of_affines(folds: Iterable[Fold], read: Callable[[str], bytes | bytearray]) -> str:
    """SHA-256 of the weights and biases of the folded norms; `read` gives the original bytes of a tensor."""
    digest = hashlib.sha256()
    for fold in folds:
        for name in fold.own:
            digest.update(read(name))
    return digest.hexdigest()


def _parse(folder: Path, value: Any) -> tuple[ConfigKey, Recipe]:
    from pydantic import TypeAdapter, ValidationError

    try:
        key = TypeAdapter(ConfigKey).validate_json(json.dumps(value), strict=True)
        if key.schema_version != KEY_SCHEMA_VERSION:
            raise ValueError(f"schema_version is {key.schema_version}")
        return key, Recipe.model_validate_json(json.dumps(key.recipe))
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    except ValueError as error:
        why = str(error)
    raise ModelError(
        f"The key '{CONFIG_KEY}' in config.json of '{folder}' is damaged or of another version of memopt ({why}).",
        f"Put the {MANIFEST} of the patched folder beside it, or remove the key.",
    )
