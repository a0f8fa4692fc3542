"""Patched folders that are made once and damaged often."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

import memopt
from memopt.checkpoint.sources.source import MANIFEST, sha256
from memopt.pipeline import patch_checkpoint
from tests.mutation.models import Checkpoint
from tests.mutation.stock_runs import StockRuns
from tests.support.walks import Walks, folder_of_sources, install

WEIGHTS = "model.safetensors"
_WALKS = Path(os.environ.get("MEMOPT_WALK_CACHE", Path(__file__).parents[2] / "build" / "walks"))
#: What a loader may find beside weights and config. Nothing here is read: verify compares bytes.
SIDE_FILES = {
    "tokenizer.json": '{"version": "1.0", "model": {"vocab": {"a": 0, "b": 1}}}',
    "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 128}',
    "special_tokens_map.json": '{"eos_token": "</s>"}',
    "generation_config.json": '{"eos_token_id": 2, "temperature": 0.7}',
    "chat_template.jinja": "{{ messages[0]['content'] }}",
    "preprocessor_config.json": '{"image_mean": [0.5, 0.5, 0.5], "size": 32}',
    "modeling_own.py": "SCALE = 1\n",
    "README.md": "# A model\n",
    "additional/notes.txt": "read by nobody\n",
}
#: Recipes that declare the error of pretrained models, which the small random ones here exceed.
_OVERRIDES = dict.fromkeys(("approx-2bit", "sampled"), ("gradient_error=1.0",))


@dataclass
class Workshop:
    """A folder of originals and of what `memopt patch` made of them, each once."""

    root: Path
    stock_runs: StockRuns = field(default_factory=StockRuns)
    _made: dict[tuple[Checkpoint, str, bool], Path] = field(default_factory=dict)

    def patched(self, checkpoint: Checkpoint, recipe: str = "exact", *, sides: bool = False) -> Path:
        """The patched folder of `checkpoint`; with `sides` the original has `SIDE_FILES` too."""
        key = (checkpoint, recipe, sides)
        if key not in self._made:
            original = self.root / f"{checkpoint}{'-sides' * sides}"
            if not original.exists():
                checkpoint.write(original)
                for name, text in SIDE_FILES.items() if sides else ():
                    (original / name).parent.mkdir(exist_ok=True)
                    (original / name).write_text(text)
            out = self.root / f"{original.name}-{recipe}"
            name, *settings = recipe.split()
            patch_checkpoint(original, out, name, overrides=(*_OVERRIDES.get(name, ()), *settings))
            self._made[key] = out
        return self._made[key]

    def forget(self) -> None:
        """Remove every folder."""
        for path in list(self.root.iterdir()):
            shutil.rmtree(path)
        self._made.clear()
        # Objects of a first run (classes, caches) stay alive. Frozen, they are skipped when verify collects garbage.
        gc.collect()
        gc.freeze()

    @contextlib.contextmanager
    def copy(self, folder: Path) -> Iterator[Copy]:
        """A copy of `folder` that may be damaged."""
        path = Path(shutil.copytree(folder, self.root / "damaged"))
        try:
            yield Copy(path)
        finally:
            shutil.rmtree(path)


@contextlib.contextmanager
def workshop() -> Iterator[Workshop]:
    """A new workshop, in which a model that was walked once is not walked again."""
    with tempfile.TemporaryDirectory(prefix="memopt-mutation-") as name:
        walks = Walks(folder_of_sources(_WALKS, Path(memopt.__file__).parent))
        uninstall = install(walks)
        walks.enabled = True
        # Verify collects garbage after each model; what the imports made is never garbage.
        gc.collect()
        gc.freeze()
        try:
            yield Workshop(Path(name))
        finally:
            walks.enabled = False
            uninstall()


@dataclass
class Copy:
    """A patched folder and what stands in it; `forge` writes changes back so that digests fit."""

    path: Path

    def __post_init__(self) -> None:
        self.tensors: dict[str, Tensor] = load_file(self.path / WEIGHTS)
        self.config: dict[str, Any] = json.loads((self.path / "config.json").read_text())
        self.manifest: dict[str, Any] = json.loads((self.path / MANIFEST).read_text())
        self.source: dict[str, Tensor] = load_file(Path(self.manifest["source"]["path"]) / WEIGHTS)

    @property
    def folds(self) -> list[dict[str, Any]]:
        """Folds of the manifest, each {norm, weight, bias, offset, consumers: [...]}."""
        return [record["fold"] for record in self.manifest["folds"]]

    def write_tensors(self) -> None:
        """Write `tensors`, and the digest of their file."""
        save_file(
            {name: tensor.contiguous() for name, tensor in self.tensors.items()}, self.path / WEIGHTS, {"format": "pt"}
        )
        self.forge(WEIGHTS)

    def write_config(self) -> None:
        """Write `config`, and the digest of its file."""
        (self.path / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        self.forge("config.json")

    def forge(self, name: str) -> None:
        """Let the manifest hold the digest that the file has now."""
        path = self.path / name
        self.manifest["files"][name] = {"sha256": sha256(path), "size": path.stat().st_size}
        self.write_manifest()

    def write_manifest(self) -> None:
        (self.path / MANIFEST).write_text(json.dumps(self.manifest, indent=1) + "\n")


def same_files(one: Path, other: Path) -> bool:
    """Whether two folders hold the same files."""
    left, right = ({path.relative_to(root) for path in root.rglob("*")} for root in (one, other))
    files = [name for name in left if (one / name).is_file()]
    return left == right and all((one / name).read_bytes() == (other / name).read_bytes() for name in files)
