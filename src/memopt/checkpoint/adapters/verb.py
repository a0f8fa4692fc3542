"""Convert an adapter of the stock model into one of its folded form, and back. `memopt` re-exports the function.

The folder that is written has PEFT's two files, and memopt.json, which names the model that the adapter fits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import memopt
from memopt.checkpoint.adapters.convert import Converted, convert
from memopt.checkpoint.adapters.folder import KIND, WEIGHTS, Adapter, open_adapter, to_json
from memopt.checkpoint.atomic import Note, Notes, staged
from memopt.checkpoint.fold import Fold, FoldPlan
from memopt.checkpoint.manifest import CONFIG_KEY, FileRecord
from memopt.checkpoint.original import folds_of, named, original_of, walk_source
from memopt.checkpoint.patched import digest_of_affines, digest_of_folds, is_patched, patched_folder
from memopt.checkpoint.sources.header import build_header
from memopt.checkpoint.sources.source import MANIFEST, CheckpointSource, open_source, sha256
from memopt.checkpoint.target import check_space, check_target, default_folder
from memopt.checkpoint.writer import copy_files, keep_private
from memopt.environment.files import ADAPTER_CONFIG, user_path
from memopt.environment.generators import generators_kept
from memopt.errors import MemoptError, ModelError, NegativeVerdict
from memopt.plan.plan import make_plan
from memopt.plan.recipe import DEFAULT_CHECKPOINT_RECIPE, Recipe, load_recipe

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Fit:
    """The model that an adapter fits."""

    form: Literal["folded", "stock"]
    base_model: str
    """The model before it was folded: a hub id, or the name of its folder."""
    commit: str | None
    folds: str
    """Digest of the folds between both forms."""
    affines: str
    """Digest of the stock model's weights and biases of the folded norms."""


@dataclass(frozen=True)
class AdapterResult:
    """The result of :func:`convert_adapter`."""

    adapter: Path
    """The adapter that was read."""
    out: Path
    """The folder that was written."""
    fits: Fit
    """The model that the written adapter fits."""
    base: str
    """The base model that the written adapter's config names."""
    changed: tuple[str, ...]
    """Tensors that differ from those of the adapter that was read."""
    tensors: int
    notes: tuple[str, ...]
    """Sentences that a user should read."""


@dataclass(frozen=True)
class _Forms:
    """The stock and the folded form of a model."""

    original: CheckpointSource
    folds: tuple[Fold, ...]
    folded: str
    """Folder of the folded form; if it is not written yet, its default folder."""

    def fit(self, form: Literal["folded", "stock"]) -> Fit:
        name = self.original.model if self.original.commit else self.original.root.name
        affines = digest_of_affines(self.folds, self.original.read_range)
        return Fit(form, name, self.original.commit, digest_of_folds(self.folds), affines)


@generators_kept()
def convert_adapter(
    adapter: str | Path,
    model: str | Path,
    out: str | Path | None = None,
    *,
    back: bool = False,
    against: str | Path | None = None,
    recipe: str | Path | Recipe = DEFAULT_CHECKPOINT_RECIPE,
    overrides: Iterable[str] = (),
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    note: Note | None = None,
) -> AdapterResult:
    """Write `adapter`, trained on a stock model, as an adapter of the folded model; with `back`, the other way round.

    Both adapters compute the same function, up to one rounding of each stored element. Further training takes the path
    of the model that the new adapter fits (docs/fine-tuning.md).

    Args:
        adapter: folder of a PEFT adapter.
        model: a folder that `memopt patch` wrote; without `back` also the model itself, a folder or a hub id.
        out: the folder to write; by default the adapter's name and ``-folded`` or ``-stock`` in the current folder.
        back: convert from the folded model to the stock model.
        against: the model that the patched folder was made from; by default the place that memopt.json names.
        recipe: recipe by which `model` is folded, if it is not patched yet.
        overrides: keys of the recipe to change, as ``key=value``.
        revision: branch, tag or commit; hub ids only.
        trust_remote_code: run the Python files that come with the model.
        allow_pickle: read ``pytorch_model*.bin``.
        note: called with each note of the result as soon as it is known.

    Raises:
        ModelError: a folder cannot be read, or the adapter was not trained on this model.
        NegativeVerdict: nothing is folded, or the adapter has no exact form on the other side.
        OutputError: `out` cannot be used or written.
    """
    notes = Notes(note)
    opened = open_adapter(adapter)
    source = open_source(str(model), revision=revision, allow_pickle=allow_pickle)
    if is_patched(source.root):
        forms = _of_patched(source, against, trust_remote_code, allow_pickle)
    elif back:
        raise ModelError(f"'{model}' is not patched.", "Give the patched folder that the adapter was trained on.")
    else:
        forms = _of_stock(source, load_recipe(recipe, overrides), trust_remote_code)
    if not forms.folds:
        raise NegativeVerdict(f"No norm of '{model}' is folded, so the adapter fits the stock and the patched model.")
    _check_fit(opened, forms, forms.fit("folded" if back else "stock"), notes.tell)
    converted = convert(opened, forms.original, forms.folds, back=back)
    for text in converted.notes:
        notes.tell(text)
    fit = forms.fit("stock" if back else "folded")
    target = Path(out) if out is not None else Path(f"{opened.source.root.name}-{fit.form}")
    stock = forms.original.model if forms.original.commit else str(forms.original.root)
    base = stock if back else forms.folded
    _write(opened, converted, fit, target, base=base, note=notes.tell)
    tensors = len(converted.tensors)
    return AdapterResult(opened.source.root, target, fit, base, converted.changed, tensors, tuple(notes))


def _of_patched(
    patched: CheckpointSource, against: str | Path | None, trust_remote_code: bool, allow_pickle: bool
) -> _Forms:
    record = patched_folder(patched.root)
    if not record.folded_norms():
        return _Forms(patched, (), str(patched.root))
    original = original_of(record, against, allow_pickle)
    folds = folds_of(record, patched, original, trust_remote_code)
    return _Forms(named(original, trust_remote_code), folds, str(patched.root))


def _of_stock(source: CheckpointSource, rules: Recipe, trust_remote_code: bool) -> _Forms:
    source, sites, _ = walk_source(source, rules, None, trust_remote_code)
    folds = FoldPlan.from_plan(make_plan(sites, rules), source.tensors, source.weights.aliases, source.renamed).folds
    if any(source.tensors[name].dtype == "F16" for fold in folds for name in fold.touched):
        raise ModelError(
            f"Some folds of '{source.model}' may overflow F16, which shows only when they are written.",
            "Patch it first, and give the patched folder.",
        )
    return _Forms(source, folds, str(default_folder(source.model).resolve()))


def _check_fit(adapter: Adapter, forms: _Forms, expected: Fit, tell: Note) -> None:
    """Raise if the adapter is known to fit another model, or the other form of this model."""
    if adapter.record is not None:
        found = adapter.record.get("fits")
        right = {key: getattr(expected, key) for key in ("form", "folds", "affines")}
        if not isinstance(found, dict) or any(found.get(key) != value for key, value in right.items()):
            found = found if isinstance(found, dict) else {}
            which = f"the {found.get('form')} form of {found.get('base_model')}" if found else "nothing"
            if all(found.get(key) == right[key] for key in ("folds", "affines")):
                other = "unpatch" if found.get("form") == "folded" else "patch"
                hint = f"Use it unchanged, or convert it back with `memopt {other} --adapter`."
                raise ModelError(f"The adapter '{adapter.source.root}' fits {which} already.", hint)
            raise adapter.misfit(f"its memopt.json says that it fits {which}, with other weights or folds")
        return
    base = adapter.config.get("base_model_name_or_path")
    folder = user_path(str(base))
    if not base or not folder.is_dir():
        if base != forms.original.model:
            which = f"The adapter's base model '{base}' is not here" if base else "The adapter names no base model"
            tell(f"{which}: names and shapes fit, its weights were not compared.")
        return
    if is_patched(folder) != (expected.form == "folded"):
        was, other = ("folded", "unpatch") if is_patched(folder) else ("stock", "patch")
        raise adapter.misfit(f"it was trained on the {was} model '{folder}', see `memopt {other} --adapter`")
    if digests := _digests(folder, forms.folds):
        wrong = digests != ((expected.folds, expected.affines) if expected.form == "folded" else (expected.affines,))
        if wrong:
            raise adapter.misfit(f"its base model '{folder}' has other norms")


def _digests(folder: Path, folds: tuple[Fold, ...]) -> tuple[str, ...]:
    """Digests (folds, affines) of a patched folder, (affines,) of a stock folder; empty if it cannot be read."""
    try:
        source = open_source(str(folder), allow_pickle=True)
        key = source.config.get(CONFIG_KEY)
        if isinstance(key, dict):
            return str(key.get("folds")), str(key.get("affines"))
        return (digest_of_affines(folds, source.read_range),)
    except KeyError:  # it has no such norm
        return ("",)
    except MemoptError:
        return ()


def _write(adapter: Adapter, converted: Converted, fit: Fit, out: Path, *, base: str, note: Note) -> None:
    """Write the adapter to the folder `out`, all of it or nothing; its config names the base model `base`."""
    source = adapter.source
    out = check_target(out, source.root, force=None)
    header = build_header(WEIGHTS, converted.tensors)
    check_space(out, header.file_size)
    with staged(out, force=None, note=note) as stage:
        with open(stage / WEIGHTS, "xb") as file:
            file.write(header.raw)
            for name in header.tensors:  # in the order of their bytes
                for block in converted.blocks(name):
                    file.write(block)
        config = {**converted.config, "base_model_name_or_path": base}
        (stage / ADAPTER_CONFIG).write_text(to_json(config), encoding="utf-8")
        copy_files(source, stage)
        files = {p.relative_to(stage).as_posix(): p for p in sorted(stage.rglob("*")) if p.is_file()}
        record: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "kind": KIND,
            "memopt_version": memopt.__version__,
            "fits": asdict(fit),
            "converted_from": {"path": str(source.root), "sha256": sha256(source.shards[0].origin)},
            "files": {name: asdict(FileRecord(sha256(path), path.stat().st_size)) for name, path in files.items()},
        }
        (stage / MANIFEST).write_text(to_json(record), encoding="utf-8")
        keep_private(source, stage, otherwise=source.shards[0].origin)
