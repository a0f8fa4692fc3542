"""Write a patched checkpoint folder: shards, side files, index, config and manifest."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

import memopt
from memopt.checkpoint.arithmetic import RangeChanges, epsilon
from memopt.checkpoint.atomic import Note, Notes, staged
from memopt.checkpoint.card import CARD, patched_card
from memopt.checkpoint.fold import Fold, FoldPlan
from memopt.checkpoint.manifest import (
    CONFIG_KEY,
    SCHEMA_VERSION,
    FileRecord,
    FoldRecord,
    InputsRecord,
    Manifest,
    SourceRecord,
    add_config_key,
)
from memopt.checkpoint.patched import config_key, digest_of_affines
from memopt.checkpoint.shards import WrittenShard, read_floats, restore, write_shard
from memopt.checkpoint.sources.base import INDEX
from memopt.checkpoint.sources.hub import TENSORS
from memopt.checkpoint.sources.source import MANIFEST, CheckpointSource, sha256
from memopt.checkpoint.target import check_space, check_target, restrict
from memopt.errors import NegativeVerdict, OutputError
from memopt.plan.plan import Plan

_MAX_WORKERS = 2  # shards at a time; each has two threads more for its digests
_WAKE_SECONDS = 0.1
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class WriteResult:
    """The result of :func:`write_checkpoint`."""

    out: Path
    plan: Plan
    """The plan that was carried out: a norm whose fold the files do not allow is shared instead."""
    manifest: Manifest
    nbytes: int
    """Size of all weights."""
    changed_tensors: int
    changed_nbytes: int


def write_checkpoint(
    source: CheckpointSource,
    plan: Plan,
    out: Path,
    *,
    force: bool = False,
    inputs: InputsRecord | None = None,
    emitted: Mapping[str, bytes] | None = None,
    progress: Progress | None = None,
    note: Note | None = None,
) -> WriteResult:
    """Write `source` to the folder `out` with the folds of `plan` applied; all of it or nothing.

    Args:
        force: replace an `out` that memopt wrote and that nobody changed.
        inputs: the batch that the walk ran with, for the manifest.
        emitted: files to add, for training engines: name -> content.
        progress: called with (bytes written, bytes to write).
        note: called with each sentence that a user should read.

    Raises:
        OutputError: `out` cannot be used or written, or the source has a file with the name of an added file.
        NegativeVerdict: the source is a patched checkpoint.
    """
    added = dict(emitted or {})
    if taken := sorted(added.keys() & {*source.side_files, *source.left_out}):
        raise OutputError(f"'{source.model}' has its own {taken[0]}.", "Remove it there first, or emit elsewhere.")
    if CONFIG_KEY in source.config:
        raise NegativeVerdict(f"'{source.model}' is already patched.", "Patch the model that it was made from.")
    out = check_target(out, source.root, force=force)
    check_space(out, source.space_needed)
    notes = Notes(note)
    with staged(out, force=force, note=note or (lambda text: None)) as stage, _Workers(source, progress) as workers:
        folds = FoldPlan.from_plan(plan, source.tensors, source.weights.aliases, source.renamed)
        folds, shards = _write_shards(source, folds, stage, workers)
        for norm, reason in folds.refused:
            notes.tell(f"{norm} is shared instead of folded: {reason}.")
        plan = plan.without_folds(dict(folds.refused))
        copy_side_files(source, stage, notes.tell)
        affines = digest_of_affines(folds.folds, source.read_range)
        key = config_key(source.model, source.root, source.commit, plan.recipe, folds.folds, affines)
        (stage / "config.json").write_bytes(add_config_key((source.root / "config.json").read_bytes(), key))
        manifest = _manifest(source, plan, folds, shards, stage, workers, inputs)
        card, why_not = patched_card(source.root, manifest)
        if why_not:
            notes.tell(why_not)
        manifest = _write_files({} if card is None else {CARD: card}, manifest, stage)
        manifest = replace(_write_files(added, manifest, stage), notes=tuple(notes), emitted=tuple(sorted(added)))
        (stage / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        keep_private(source, stage)
    changed = folds.operations()
    return WriteResult(
        out, plan, manifest, source.nbytes, len(changed), sum(source.tensors[name].nbytes for name in changed)
    )


class _Workers:
    """A thread pool over shards that reports progress, and is stopped by an error in the `with` block."""

    def __init__(self, source: CheckpointSource, progress: Progress | None) -> None:
        self._total = source.space_needed
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        count = min(_MAX_WORKERS, os.cpu_count() or 1, len(source.shards))
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="memopt")

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def advance(self, count: int) -> None:
        """Report `count` bytes; raises InterruptedError once the block has failed."""
        if self._stopped.is_set():
            raise InterruptedError("stopped")
        with self._lock:
            self._done = min(self._done + count, self._total)
            if self._progress is not None:
                self._progress(self._done, self._total)

    def run(self, function: Callable[..., Any], *calls: tuple[Any, ...]) -> list[Any]:
        """Results of `function` on every tuple of arguments, in order."""
        futures: list[Future[Any]] = [self._pool.submit(function, *arguments) for arguments in calls]
        for future in futures:
            # A wait without a timeout is not ended by a signal that another thread receives or that came just before.
            while not future.done():
                wait([future], timeout=_WAKE_SECONDS)
        return [future.result() for future in futures]


def _write_shards(
    source: CheckpointSource, folds: FoldPlan, stage: Path, workers: _Workers
) -> tuple[FoldPlan, dict[str, WrittenShard]]:
    """Write the shards; returns the folds that were carried out, and shard name -> written shard."""
    operations = folds.operations()
    calls = [(source, shard, operations, stage / shard.name, workers.advance) for shard in source.shards]
    written = dict(zip((shard.name for shard in source.shards), workers.run(write_shard, *calls), strict=True))
    overflowing = {name for name, change in _changes(written).items() if change.infinities}
    reasons = {
        fold.norm: f"{min(fold.touched & overflowing)} would overflow {source.tensors[fold.weight].dtype}"
        for fold in folds.folds
        if fold.touched & overflowing
    }
    kept = folds.without(reasons)
    undone = frozenset(operations.keys() - kept.operations().keys())
    for shard in source.shards:
        path = stage / shard.name
        if undone and restore(source, shard, undone, path):
            written[shard.name] = replace(written[shard.name], result=_record(path))
    return kept, written


def _changes(shards: Mapping[str, WrittenShard]) -> dict[str, RangeChanges]:
    return {name: change for shard in shards.values() for name, change in shard.changes.items()}


def _record(path: Path, advance: Callable[[int], None] | None = None) -> FileRecord:
    return FileRecord(sha256(path, advance), path.stat().st_size)


def copy_side_files(source: CheckpointSource, stage: Path, note: Note) -> None:
    """Copy every file that belongs to the model and is no weight, and the shard index, to the folder `stage`."""
    copy_files(source, stage)
    if source.weights.index is not None:
        (stage / INDEX).write_bytes(source.weights.index)
    if source.left_out:
        note(f"Not copied, because they hold the unpatched weights or others: {', '.join(source.left_out)}.")
    if others := [name for name in source.side_files if any(fnmatchcase(name, pattern) for pattern in TENSORS)]:
        note(f"Copied as they are, weights that are not the model's own: {', '.join(others)}.")
    for name, target in _links_out(source):
        done = "links to folders are not followed" if target.is_dir() else "the content was read"
        note(f"'{name}' of the source is a link to '{target}', outside of it; {done}.")


def copy_files(source: CheckpointSource, stage: Path) -> None:
    """Copy every file beside the weights to the folder `stage`."""
    for name in source.side_files:
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.root / name, stage / name)


def keep_private(source: CheckpointSource, stage: Path, otherwise: Path | None = None) -> None:
    """Remove permissions of group and others from `stage` that the source's files and folders do not give. A file that
    the source lacks gets no more permissions than the file `otherwise`, by default its config.json."""
    origins = {shard.name: shard.origin for shard in source.shards}
    for path in (stage, *stage.rglob("*")):
        name = path.relative_to(stage).as_posix()
        origin = origins.get(name, source.root / name)
        restrict(path, origin if origin.exists() else otherwise or source.root / "config.json")


def _links_out(source: CheckpointSource) -> Iterator[tuple[str, Path]]:
    """(name, target) of the source's links that lead out of it; a snapshot in the hub's cache links to its blobs."""
    root = source.root.resolve()
    inside = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    files = [*source.side_files, "config.json", *(str(s.origin.relative_to(source.root)) for s in source.shards)]
    folders = [path.name for path in source.root.iterdir() if path.is_dir() and path.is_symlink()]
    for name in (*files, *folders):
        target = (source.root / name).resolve()
        if not any(target.is_relative_to(folder) for folder in inside):
            yield name, target


def _write_files(contents: Mapping[str, bytes], manifest: Manifest, stage: Path) -> Manifest:
    """Write files beside the weights to `stage`; returns the manifest with their digests."""
    for name, content in contents.items():
        (stage / name).write_bytes(content)
    records = {name: _record(stage / name) for name in contents}
    return replace(manifest, files=dict(sorted({**manifest.files, **records}.items())))


def _manifest(
    source: CheckpointSource,
    plan: Plan,
    folds: FoldPlan,
    shards: Mapping[str, WrittenShard],
    stage: Path,
    workers: _Workers,
    inputs: InputsRecord | None,
) -> Manifest:
    """The manifest, with digests of the files in `stage` and of the source's weights."""
    others = [*source.side_files, "config.json", *([INDEX] if source.weights.index is not None else [])]
    digests = workers.run(_record, *((stage / name, workers.advance) for name in others))
    records = dict(zip(others, digests, strict=True))
    files = {name: shard.result for name, shard in shards.items()} | records
    copied = {name: records[name] for name in source.side_files}
    read = {
        shard.origin.relative_to(source.root).as_posix(): shards[shard.name].source or _record(shard.origin)
        for shard in source.shards
    }
    changes = _changes(shards)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        memopt_version=memopt.__version__,
        source=SourceRecord(
            model=source.model,
            path=str(source.root),
            revision=source.revision,
            commit=source.commit,
            files=read,
            others=dict(sorted({**copied, "config.json": _record(source.root / "config.json")}.items())),
        ),
        recipe=plan.recipe,
        entries=plan.entries,
        folds=tuple(_fold_record(source, fold, changes) for fold in folds.folds),
        files=dict(sorted(files.items())),
        inputs=inputs,
        changed_outputs=plan.changed_outputs(),
    )


def _fold_record(source: CheckpointSource, fold: Fold, changes: Mapping[str, RangeChanges]) -> FoldRecord:
    dtype = source.tensors[fold.weight].dtype
    size = np.abs(read_floats(source, fold.weight) + fold.offset)
    touched = [changes[name] for name in sorted(fold.touched) if name in changes]
    return FoldRecord(
        fold=fold,
        dtype=dtype,
        smallest_scale=float(size.min()),
        near_zero=int((size < epsilon(dtype)).sum()),
        new_zeros=sum(change.zeros for change in touched),
        new_subnormals=sum(change.subnormals for change in touched),
    )
