"""Write a converted adapter: PEFT's two files, and memopt.json, which names the model that it fits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import memopt
from memopt.checkpoint.adapters.convert import Converted
from memopt.checkpoint.adapters.folder import KIND, WEIGHTS, Adapter, to_json
from memopt.checkpoint.atomic import Note, staged
from memopt.checkpoint.manifest import FileRecord
from memopt.checkpoint.sources.header import build_header
from memopt.checkpoint.sources.source import MANIFEST, sha256
from memopt.checkpoint.target import check_space, check_target
from memopt.checkpoint.writer import copy_files, keep_private
from memopt.environment.files import ADAPTER_CONFIG

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


def write_adapter(adapter: Adapter, converted: Converted, fit: Fit, out: Path, *, base: str, note: Note) -> None:
    """Write the adapter to the folder `out`; all of it or nothing.

    Args:
        base: the base model to name in the adapter's config.

    Raises:
        OutputError: `out` cannot be used or written.
        NegativeVerdict: a value has no form on the other side.
    """
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
