"""Level "weights", other files: checks all other files that a loader reads, and that memopt.json is consistent.

config.json is compared key for key, README.md with the source's and the part that patch adds, every other file byte for
byte; memopt.json with itself, with the key in config.json and with the model of the config, built without weights. The
files hold the tensors of that model, so that no level runs random tensors.
"""

from __future__ import annotations

import filecmp
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import memopt
from memopt.checkpoint.card import CARD, MAX_BYTES, patched_card, source_card
from memopt.checkpoint.manifest import CONFIG_KEY, Manifest, differences
from memopt.checkpoint.names import SHOWN, Names, compare_names
from memopt.checkpoint.patched import PatchedFolder, config_key, digest_of_affines
from memopt.checkpoint.sources.base import INDEX
from memopt.checkpoint.sources.source import MANIFEST, CheckpointSource, needs_allow_pickle, open_source
from memopt.emit import file_names
from memopt.environment.files import once
from memopt.errors import ModelError, first_of
from memopt.patches.checks import Check, Level, Status, skipped
from memopt.patches.registry import rows
from memopt.plan.plan import Plan
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import load_config
from memopt.walk.sites import Sites

#: Keys that `save_pretrained` writes on its own.
_OF_THE_SAVING = frozenset(
    {CONFIG_KEY, "transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype"}
)


def files_of(checkpoint: CheckpointSource) -> frozenset[str]:
    """Names of all files of an opened folder, except memopt.json."""
    index = {INDEX} if (checkpoint.root / INDEX).exists() else set()
    shards = {shard.name for shard in checkpoint.shards}
    return frozenset({*checkpoint.side_files, *checkpoint.left_out, "config.json"} | shards | index)


def verify_side_files(
    manifest: Manifest, patched: CheckpointSource, source: CheckpointSource | None
) -> Iterator[Check]:
    """Checks of the files beside the weights; without `source`, only the check of memopt.json."""
    wrong = [*_contradictions(manifest), *_key_errors(manifest, patched.config, source)]
    yield _check("manifest", MANIFEST, wrong, metric="contradictions", reference="memopt.json and config.json")
    if source is None:
        return
    stock = {key: value for key, value in patched.config.items() if key != CONFIG_KEY}
    wrong = sorted({*_twice(patched)} - {*_twice(source)})
    wrong += (_phrase(*each) for each in differences(source.config, stock))
    yield _check(
        "config", "config.json", wrong, metric="values that differ", reference="the source's config.json",
        n=len(source.config),
    )  # fmt: skip
    yield _check(
        "side_files", "tokenizer, code and all other files", list(_file_differences(manifest, source, patched)),
        metric="files that are missing, added or differ", reference="the source's files", n=len(source.side_files),
        note=f"patch leaves out other weights: {', '.join(source.left_out)}" if source.left_out else "",
    )  # fmt: skip


def verify_saved_again(record: PatchedFolder, against: str | None, *, trust_remote_code: bool = False) -> list[Check]:
    """The checks for the files of a patched model that was loaded, trained and saved: its weights are not compared with
    the original's."""
    folder = record.folder
    try:
        patched = open_source(str(folder))
    except ModelError as error:
        return [_check("headers", str(folder), [str(error)])]
    checks = [Check("weights.headers", "weights", str(folder), "pass", n=len(patched.shards))]
    if against is not None:
        checks += _against(patched, against, trust_remote_code)
    why = (
        f"saved after it was patched, so its weights may differ from those of {record.base_model} on purpose; gradient "
        f"and memory are checked on its own weights; `memopt unpatch` restores the stock form"
    )
    return [*checks, Check("weights.trained", "weights", "tensors", "skip", detail=why)]


def verify_sites(record: PatchedFolder, *, trust_remote_code: bool = False) -> Iterator[Check]:
    """Whether every site that memopt.json lists is in the model of the config, built without weights."""
    try:
        model = build_meta(load_config(record.folder, trust_remote_code=trust_remote_code))
    except ModelError:
        return  # the config is at fault; other checks report it
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known = modules | {name for name, _ in model.named_parameters(remove_duplicate=False)}
    entries = record.manifest.entries if record.manifest is not None else ()
    wrong = [f"the model has no {entry.site}" for entry in entries if entry.site not in known]
    yield _check("sites", MANIFEST, wrong, metric="sites that are not there", reference="the config", n=len(entries))


def verify_names(folder: Path, *, trust_remote_code: bool = False) -> Check:
    """Whether the tensors of a patched folder are those of its config's model, by name and shape."""
    try:
        names = _names(str(folder), trust_remote_code)
    except ModelError as error:
        return Check("weights.names", "weights", str(folder), "fail", detail=str(error))
    return Check(
        "weights.names", "weights", names.model, "fail" if names.wrong else "warn" if names.random else "pass",
        metric="tensors that the model and the files do not share", value=len(names.wrong), threshold=0,
        threshold_reason="a load of the folder draws missing tensors at random",
        reference="the model of config.json, as transformers loads it",
        detail=first_of(names.wrong, SHOWN, "; ") or "; ".join(names.notes),
    )  # fmt: skip


def random_tensors(
    level: Level, record: PatchedFolder, trusted: bool, original: str | None = None, revision: str | None = None
) -> list[Check]:
    """A check for each model that `level` cannot use, because a load would leave tensors random: the patched folder
    and, if given, the `original`. `trusted`: run the Python files that come with them."""
    models: list[tuple[str, str | None, bool]] = [(str(record.folder), None, False)]
    if original is not None:
        pickled = record.manifest is not None and needs_allow_pickle(record.manifest.source.files)
        models.append((original, revision, pickled))
    checks = []
    for model, revision, pickled in models:
        try:
            names = _names(model, trusted, revision, pickled)
        except ModelError as error:
            if model == str(record.folder):
                raise
            checks.append(skipped(f"{level}.original", "original model", f"it cannot be opened: {error}"))
            continue
        if names.wrong or names.random:
            unknown = names.wrong or tuple(f"{name} is missing" for name in names.random)
            status = "fail" if names.wrong else "skip"
            detail = (
                f"{first_of(unknown, SHOWN, '; ')}: such tensors are drawn at random, so the models cannot be compared"
            )
            checks.append(Check(f"{level}.names", level, model, status, detail=detail))  # type: ignore[arg-type]
    return checks


def allowed_changes(manifest: Manifest, sites: Sites) -> frozenset[str]:
    """Outputs that may differ from the original's: the folds of the recipe change them, and memopt.json lists them."""
    plan = Plan(manifest.recipe, sites, manifest.entries)
    listed = frozenset(plan.changed_outputs()).intersection(manifest.changed_outputs)
    return frozenset(name for name in listed if not _is_result(name))


def _names(model: str, trust_remote_code: bool, revision: str | None = None, pickled: bool = False) -> Names:
    source = open_source(model, revision=revision, allow_pickle=pickled)
    return compare_names(source, load_config(source.root, trust_remote_code=trust_remote_code))


def _against(patched: CheckpointSource, against: str, trust_remote_code: bool) -> Iterator[Check]:
    """The layout and the config of a model that was saved again, which training does not change."""
    source = open_source(against)
    shapes = {name: list(info.shape) for name, info in source.tensors.items()}
    after = {name: list(info.shape) for name, info in patched.tensors.items()}
    wrong = [f"{name}: {what}" for (name,), what in differences(shapes, after)]
    # Another head has other tensors, and the files of a base model lack its prefix.
    yield _check("layout", "names and shapes", wrong, reference=source.model, n=len(shapes), status="warn")
    one, other = (
        load_config(root, trust_remote_code=trust_remote_code).to_dict() for root in (source.root, patched.root)
    )
    wrong = [_phrase(*each) for each in differences(one, other) if each[0][0] not in _OF_THE_SAVING]
    yield _check("config", "config.json", wrong, reference=source.model, n=len(one), status="warn")


def _twice(checkpoint: CheckpointSource) -> Iterator[str]:
    """The key that occurs twice in config.json; loaders may read either value."""
    try:
        json.loads((checkpoint.root / "config.json").read_text(encoding="utf-8"), object_pairs_hook=once)
    except ValueError as error:
        yield str(error)


def _contradictions(manifest: Manifest) -> Iterator[str]:
    recipe = manifest.recipe
    if not manifest.entries:
        yield "it lists no site of the model"
    if not manifest.source.files:
        yield "it lists no file of the source"
    for name in sorted({*manifest.emitted} - (file_names() & manifest.files.keys())):
        yield f"{name} is no file that `--emit` writes"
    known = rows()
    for entry in manifest.entries:
        its = known.get(entry.kind)
        if its is not None and entry.rewritten and entry.action not in its.actions:
            yield f"{entry.site}: '{entry.action}' is not an action for a {its.noun}"
    planned = {e.site for e in manifest.entries if (its := known.get(e.kind)) is not None and e.action == its.fold}
    folded = [record.fold.norm for record in manifest.folds]
    for name in sorted(planned.symmetric_difference(folded)):
        yield f"{name} is folded by {'its plan, but there is no such fold' if name in planned else 'no entry of it'}"
    for name, count in Counter(folded).items():
        if count > 1:
            yield f"{name} is folded twice"
    if folded and not recipe.folds:
        yield f"recipe '{recipe.name}' folds nothing, and {folded[0]} is folded"
    for name in folded:
        if not recipe.selects(name):
            yield f"recipe '{recipe.name}' leaves out {name}, which is folded"
    for name in manifest.changed_outputs:
        if _is_result(name) or not recipe.changes_outputs or not folded:
            yield f"changed_outputs: no fold of recipe '{recipe.name}' may change {name}"


def _key_errors(manifest: Manifest, config: Mapping[str, Any], source: CheckpointSource | None) -> Iterator[str]:
    """Differences between the key in config.json and the key that was written with this manifest."""
    key = config.get(CONFIG_KEY)
    if not isinstance(key, dict):
        yield f"config.json has no key '{CONFIG_KEY}'"
        return
    record, folds = manifest.source, [each.fold for each in manifest.folds]
    affines = str(key.get("affines"))
    if source is not None and all(name in source.tensors for fold in folds for name in fold.own):
        affines = digest_of_affines(folds, source.read_range)
    expected = config_key(
        record.model, record.path, record.commit, manifest.recipe, folds, affines, manifest.memopt_version
    )
    for where, what in differences(expected, key):
        yield f"config.json contradicts memopt.json: {_phrase((CONFIG_KEY, *where), what)}"


def _file_differences(manifest: Manifest, source: CheckpointSource, patched: CheckpointSource) -> Iterator[str]:
    before = set(source.side_files)
    after = {*patched.side_files, *patched.left_out}
    if (patched.root / INDEX).exists() and patched.weights.index is None:
        after.add(INDEX)
    card, _ = patched_card(source.root, manifest)
    if card is not None:
        yield from _card_differences(card, source, patched, older=manifest.memopt_version != memopt.__version__)
    own = {CARD} if card is not None else set[str]()
    for name in sorted((before | after) - own - (set(manifest.emitted) - before)):
        if name not in after:
            yield f"{name} is missing"
        elif name not in before:
            yield f"{name} is added"
        elif not filecmp.cmp(source.root / name, patched.root / name, shallow=False):
            yield f"{name} differs"
    one, other = _formats(source), _formats(patched)
    if one != other:
        yield f"the weights' metadata name the format {', '.join(other)} instead of {', '.join(one)}"


def _card_differences(
    card: bytes, source: CheckpointSource, patched: CheckpointSource, *, older: bool
) -> Iterator[str]:
    """Differences of the patched folder's README.md from `card`; for an `older` memopt, in the source's part only."""
    one, other = source.root / CARD, patched.root / CARD
    before = one.read_bytes() if one.is_file() else None
    if other.is_file():
        found = other.read_bytes() if other.stat().st_size <= 2 * MAX_BYTES else b""
        if source_card(found) != before:
            yield f"{CARD} differs"
        elif found != card and not older:
            yield f"{CARD} differs in the part that memopt wrote"
    elif before is not None or not older:
        yield f"{CARD} is missing"


def _formats(checkpoint: CheckpointSource) -> list[str]:
    """``format`` in the metadata of the weight files: loaders choose by it how to read a tensor."""
    return sorted({str(shard.header.metadata.get("format")) for shard in checkpoint.shards})


def _phrase(where: tuple[str, ...], what: str) -> str:
    return f"{'.'.join(where)}: {what}"


def _check(
    name: str, subject: str, wrong: list[str], *, status: Status = "fail", note: str = "", **fields: Any
) -> Check:
    shown = first_of(wrong, between="; ")
    return Check(
        id=f"weights.{name}", level="weights", subject=subject, status=status if wrong else "pass",
        value=float(len(wrong)), threshold=0.0, threshold_reason="a loader reads it: any difference is another model",
        detail="; ".join(filter(None, (shown, note))), **fields,
    )  # fmt: skip


def _is_result(name: str) -> bool:
    """Whether an output is a result of the model and not a hidden state; no recipe lets folds change it."""
    return name == "loss" or "logits" in name
