"""Level "weights": the files alone, without building a model. Every tensor is checked, bit by bit.

A folded tensor must equal the fp64 result of the fold on the source's tensor, rounded once (`recompute`); every other
tensor must have the source's bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from memopt.checkpoint.fold import Fold, FoldPlan, Operation
from memopt.checkpoint.manifest import Manifest, changed_files, read_manifest
from memopt.checkpoint.shards import BLOCK, Digests
from memopt.checkpoint.sources.base import Shard
from memopt.checkpoint.sources.source import MANIFEST, CheckpointSource, needs_allow_pickle, open_source
from memopt.emit import file_names
from memopt.errors import ModelError, first_of
from memopt.patches.checks import Check, Status
from memopt.verification.recompute import Comparison, TensorComparison
from memopt.verification.side_files import files_of, verify_side_files

_EXACT = "the fold is deterministic: a tolerance would hide a wrong norm, axis or offset"
_SAVED_OVER = f". If the model was trained and saved into this folder: remove {MANIFEST} and verify again"


def verify_weights(patched_dir: str | Path, against: str | None = None) -> list[Check]:
    """Check the files of the folder `patched_dir`, which `memopt patch` wrote, and its weights against the source's.
    `against`: the source, a folder or hub id; by default where the manifest says it was. Raises a ModelError if the
    folder has no readable manifest, or `against` cannot be opened."""
    folder = Path(patched_dir)
    manifest = read_manifest(folder)
    try:
        patched = open_source(str(folder))
    except ModelError as error:
        damaged = _check("headers", str(folder), "fail", detail=str(error))
        return [_check_files(folder, manifest, frozenset(), {}), damaged]
    folds = tuple(record.fold for record in manifest.folds)
    source, missing = _open_original(manifest, against)
    misfits = [] if source is None else list(FoldPlan(folds).misfits(source.tensors))
    digests, comparisons = dict[Path, str](), dict[str, TensorComparison]()
    if source is not None:
        digests, comparisons = _read_both(source, patched, {} if misfits else FoldPlan(folds).operations())
    checks = [_check_files(folder, manifest, files_of(patched), digests)]
    checks.append(_check("headers", str(folder), "pass", n=len(patched.shards), detail="shard headers and index agree"))
    if source is not None:
        source, found = _check_original(manifest, source, digests, given=against is not None)
    else:
        found = _check("source", manifest.source.model, "skip", detail=missing)
    others = _check_others(manifest, source, given=against is not None)
    checks += [found, *others, *verify_side_files(manifest, patched, source)]
    if source is None:
        return [*checks, _check("fold", "folded tensors", "skip", detail=found.detail)]
    layout = _check_layout(source, patched)
    checks.append(layout)
    if layout.status == "fail":
        return checks
    if misfits:
        named = f"memopt.json has folds that these tensors do not allow: {first_of(misfits)}"
        return [*checks, _check("fold", "folded tensors", "fail", detail=named)]
    return checks + _check_tensors(folds, comparisons)


#: SHA-256 of the patched shards, and of the source's that have the same layout; and tensor -> its comparison, for every
#: tensor that both have in the same dtype and shape.
_Reading = tuple[dict[Path, str], dict[str, TensorComparison]]


def _read_both(source: CheckpointSource, patched: CheckpointSource, operations: Mapping[str, Operation]) -> _Reading:
    """Read and compare; `operations`: tensor -> the operation on it; all other tensors are unchanged."""
    reading: _Reading = ({}, {})
    with ThreadPoolExecutor(2, thread_name_prefix="memopt") as pool:
        for digests, comparisons in pool.map(
            lambda shard: _read_shard(source, patched, shard, operations), patched.shards
        ):
            reading[0].update(digests)
            reading[1].update(comparisons)
    return reading


def _read_shard(
    source: CheckpointSource, patched: CheckpointSource, shard: Shard, operations: Mapping[str, Operation]
) -> _Reading:
    twin = next((other for other in source.shards if (other.name, other.header) == (shard.name, shard.header)), None)
    hashed = twin is not None and source.weights.copies_as_is
    comparisons: dict[str, TensorComparison] = {}
    with Digests() as digests:
        digests.update(memoryview(shard.header.raw))
        for info in sorted(shard.header.tensors.values(), key=lambda info: (info.offset, info.nbytes)):
            original = source.tensors.get(info.name)
            alike = original is not None and (original.dtype, original.shape) == (info.dtype, info.shape)
            # A tensor that the source lacks, or has in another layout, is hashed only.
            comparison = Comparison(
                source if alike else patched, info.name, operations.get(info.name) if alike else None
            )
            for piece, start, stop in comparison.pieces(BLOCK):
                after, before = digests.buffers(stop - start)
                patched.weights.read_into(after, info, start)
                if not alike or original is None:
                    digests.update(after)
                    continue
                source.weights.read_into(before, original, start)
                digests.update(after, before if hashed else None)
                comparison.add(piece, start, before, after)
            if alike:
                comparisons[info.name] = comparison.result
        mine, theirs = digests.hex()
    found = {shard.origin: mine}
    if hashed and twin is not None:
        found[twin.origin] = theirs
    return found, comparisons


def _check_files(folder: Path, manifest: Manifest, there: frozenset[str], digests: Mapping[Path, str]) -> Check:
    found = changed_files(manifest.files, folder.resolve(), digests)
    found += [(name, "was added") for name in sorted(there - manifest.files.keys())]
    wrong = [" ".join(each) for each in found]
    # Files for inference engines are no part of the model, and users complete them.
    edited = all(name in manifest.emitted and name in file_names() for name, _ in found)
    return _check(
        "files", str(folder), "pass" if not wrong else "warn" if edited else "fail",
        metric="files that differ from the manifest", value=len(wrong), reference="SHA-256 in memopt.json",
        n=len(manifest.files),
        detail=first_of(wrong, between="; ") + (_SAVED_OVER if "config.json was changed" in wrong else ""),
    )  # fmt: skip


def _open_original(manifest: Manifest, against: str | None) -> tuple[CheckpointSource | None, str]:
    """(the source, or the reason why it cannot be compared)."""
    record = manifest.source
    if against is None and not os.path.isdir(record.path):
        return None, f"'{record.path}' does not exist: give it with --against"
    try:
        return open_source(against or record.path, allow_pickle=needs_allow_pickle(record.files)), ""
    except ModelError as error:
        if against is not None:
            raise
        return None, f"{error} Give the source with --against"


def _check_original(
    manifest: Manifest, source: CheckpointSource, read: Mapping[Path, str], *, given: bool
) -> tuple[CheckpointSource | None, Check]:
    """(the source, or None if it must not be compared; the check of its weight files)."""
    record = manifest.source
    wrong = [name for name, _ in changed_files(record.files, source.root, read)]
    status: Status = "pass"
    detail = ""
    if wrong:
        status = "warn" if given else "skip"
        detail = f"{', '.join(wrong)} changed since the patch"
        detail += "; its tensors are compared anyway" if given else ": give the original with --against"
    check = _check(
        "source", source.model, status, metric="source files that differ from the manifest", value=len(wrong),
        reference="SHA-256 in memopt.json", n=len(record.files), detail=detail,
    )  # fmt: skip
    return (None if status == "skip" else source), check


def _check_others(manifest: Manifest, source: CheckpointSource | None, *, given: bool) -> Iterator[Check]:
    """The check that config, tokenizer and other files of the source are unchanged since the patch."""
    if source is None:
        return
    pinned = manifest.source.others
    wrong = [name for name, _ in changed_files(pinned, source.root)]
    status: Status = "pass" if not wrong else "warn" if given else "skip"
    remedy = "" if given else ": give the original with --against"
    detail = f"{first_of(wrong)} changed since the patch{remedy}" if wrong else ""
    yield _check("source_files", "the source's config and other files", status, n=len(pinned), detail=detail)


def _check_layout(source: CheckpointSource, patched: CheckpointSource) -> Check:
    """The check that both checkpoints have equal names, dtypes and shapes."""

    def layout(one: CheckpointSource) -> dict[str, Any]:
        return {name: (info.dtype, info.shape) for name, info in one.tensors.items()}

    before, after = layout(source), layout(patched)
    wrong = [f"{name} is missing" for name in sorted(before.keys() - after.keys())]
    wrong += [f"{name} is extra" for name in sorted(after.keys() - before.keys())]
    wrong += [
        f"{name} has another dtype or shape"
        for name in sorted(before.keys() & after.keys())
        if before[name] != after[name]
    ]
    metric = "tensors that are missing, extra or of another layout"
    return _check_none(wrong, "tensors", "names, dtypes and shapes", metric, "source headers", len(before))


def _check_tensors(folds: tuple[Fold, ...], results: dict[str, TensorComparison]) -> list[Check]:
    folded = frozenset[str]().union(*(fold.touched for fold in folds))
    untouched = sorted(results.keys() - folded)
    different = [name for name in untouched if results[name].different]
    metric, subject = "tensors whose bytes differ", "tensors that no fold touches"
    checks = [_check_none(different, "unchanged", subject, metric, "source bytes", len(untouched))]
    checks += [_check_fold(fold, results) for fold in folds]
    if folds:
        checks.append(_check_range([results[name] for name in folded]))
    return checks


def _check_fold(fold: Fold, results: dict[str, TensorComparison]) -> Check:
    wrong = {name: results[name].different for name in sorted(fold.touched) if results[name].different}
    return _check(
        "fold", fold.norm, "fail" if wrong else "pass", metric="elements that differ", value=sum(wrong.values()),
        reference="the source's tensors, folded in fp64 and rounded once",
        n=sum(results[name].elements for name in fold.touched),
        detail=first_of([f"{name}: {count}" for name, count in wrong.items()]),
    )  # fmt: skip


def _check_range(results: list[TensorComparison]) -> Check:
    total = sum(results, TensorComparison())
    return _check(
        "range", "folded tensors", "fail" if total.infinities else "pass",
        metric="elements that became infinite or NaN", value=total.infinities, reference="source", n=total.elements,
        detail=f"{total.zeros} became zero, {total.subnormals} subnormal",
    )  # fmt: skip


def _check_none(wrong: list[str], name: str, subject: str, metric: str, reference: str, n: int) -> Check:
    """A check of `n` things, which fails if `wrong` lists any of them."""
    status: Status = "fail" if wrong else "pass"
    fields = {"metric": metric, "reference": reference, "n": n, "detail": first_of(wrong)}
    return _check(name, subject, status, value=len(wrong), **fields)


def _check(name: str, subject: str, status: Status, *, value: float | None = None, **fields: Any) -> Check:
    exact = {} if value is None else {"value": value, "threshold": 0, "threshold_reason": _EXACT}
    return Check(id=f"weights.{name}", level="weights", subject=subject, status=status, **exact, **fields)  # type: ignore[arg-type]
