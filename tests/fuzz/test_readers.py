"""The fuzzer: 20,000 hostile headers, indices, configs and manifests, in the whole run; some hundred in the quick one.

No traceback, no hang, no growth, nothing written, nothing read outside of the folder (`tests.fuzz.guard`).
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memopt.checkpoint.fold import FoldPlan
from memopt.checkpoint.manifest import add_config_key, read_manifest
from memopt.checkpoint.patched import is_patched, patched_folder
from memopt.checkpoint.sources.header import read_header
from memopt.checkpoint.sources.source import open_source
from memopt.checkpoint.writer import write_checkpoint
from memopt.errors import ModelError
from memopt.plan.recipe import load_recipe
from memopt.verification.weights import verify_weights
from memopt.walk.models.config import load_config, model_class
from tests.checkpoint.builders import rms_plan, rms_tensors, write_checkpoint_files
from tests.factories import tiny_config
from tests.fuzz.guard import GROWTH, Hung, answer, guarded, peak
from tests.fuzz.mutate import mutated, to_bytes

#: Share of the inputs: of 20,000.
QUICK, WHOLE = 0.02, 1.0
runs = pytest.mark.parametrize("share", [QUICK, pytest.param(WHOLE, marks=pytest.mark.slow)], ids=["quick", "whole"])
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def fuzz(strategy: st.SearchStrategy[Any], check: Callable[[Any], None], inputs: float) -> None:
    """Run `check` on so many inputs; the quick run has the same ones each time."""
    quick = inputs < 1_000
    options = settings(
        max_examples=int(inputs), deadline=None, database=None, derandomize=quick, print_blob=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    before = peak()
    options(given(strategy)(check))()
    assert peak() - before < GROWTH


@pytest.fixture
def folder() -> Iterator[Path]:
    """A valid checkpoint, beside files that nobody may read."""
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "x").write_text("a secret")
        yield write_checkpoint_files(Path(root) / "model", rms_tensors(layers=1))


@cache
def valid_header() -> tuple[Any, bytes]:
    with tempfile.TemporaryDirectory() as root:
        content = (write_checkpoint_files(Path(root), rms_tensors(layers=1, hidden=4)) / FILE).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """A weight file with a mutated header, length or size."""
    document, data = valid_header()
    text = to_bytes(draw, draw(mutated(document)))
    lengths = [len(text)] * 12 + [0, 1, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1]
    content = struct.pack("<Q", max(draw(st.sampled_from(lengths)), 0)) + text + data
    end = draw(st.sampled_from((None,) * 12 + (-1, 0, 4, 8, 9)))
    return content[:end]


@runs
def test_headers(folder: Path, share: float) -> None:
    def check(content: bytes) -> None:
        (folder / FILE).write_bytes(content)
        header = answer(folder, lambda: read_header(folder / FILE))
        source = answer(folder, lambda: open_source(str(folder)))
        if header is not None and source is not None:
            for name in source.tensors:
                answer(folder, lambda name=name: source.read(name))  # type: ignore[misc]
            with guarded(folder):
                FoldPlan.from_plan(rms_plan(1), source.tensors)

    fuzz(headers(), check, 7_000 * share)


@runs
def test_indices(share: float, tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a secret")
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors(layers=1), shards=3)
    document = json.loads((folder / INDEX).read_text())

    def check(content: bytes) -> None:
        (folder / INDEX).write_bytes(content)
        answer(folder, lambda: open_source(str(folder)))

    fuzz(contents(document), check, 4_000 * share)


@st.composite
def contents(draw: st.DrawFn, document: Any) -> bytes:
    """`document`, mutated, in bytes."""
    return to_bytes(draw, draw(mutated(document)))


@runs
def test_configs(folder: Path, share: float) -> None:
    document = tiny_config("llama", architectures=["LlamaForCausalLM"]).to_dict()
    document["text_config"] = {"num_hidden_layers": 2, "quantization_config": None}
    document["memopt"] = {"schema_version": 2, "recipe": {"name": "exact"}, "folded_norms": ["a"], "commit": None}

    def check(content: bytes) -> None:
        (folder / "config.json").write_bytes(content)
        answer(folder, lambda: is_patched(folder))
        answer(folder, lambda: patched_folder(folder))
        if answer(folder, lambda: open_source(str(folder))) is not None:
            json.loads(add_config_key(content.replace(b"memopt", b"other"), {"recipe": "exact"}))
        answer(folder, lambda: model_class(load_config(folder)))

    fuzz(contents(document), check, 4_000 * share)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("patched")
    model = write_checkpoint_files(root / "model", rms_tensors(layers=1))
    return write_checkpoint(open_source(str(model)), rms_plan(1), root / "out").out


@runs
def test_manifests(patched: Path, share: float) -> None:
    original = (patched / "memopt.json").read_text()
    document = json.loads(original)
    document["folds"][0]["fold"]["consumers"][0]["channels"] = [[0, 4], [-1, 20]]
    document["inputs"] = {"file": "x.pt", "arguments": {"input_ids": {"shape": [2, 7], "dtype": "int64"}}}

    def check(content: bytes) -> None:
        (patched / "memopt.json").write_bytes(content)
        manifest = answer(patched, lambda: read_manifest(patched))
        if manifest is not None:
            answer(patched, manifest.batch)
            manifest.to_json()
            against = str(patched.parent / "model")
            # The original lies beside it, and is read.
            answer(patched.parent, lambda: verify_weights(patched, against))

    try:
        fuzz(contents(document), check, 5_000 * share)
    finally:
        (patched / "memopt.json").write_text(original)


RECIPES = {
    "deep": "[" * 3_000, "deep mappings": "{a: " * 2_000, "itself": "norms: &a\n  fold: *a",
    "itself in a list": "&a [*a]", "often": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)),
    "date": "description: 2020-01-01", "no date": "description: 2020-13-45",
    "time": "name: 2001-12-14t21:59:43.10-05:00",
    "set": "targets: !!set {a, b}", "bytes": "description: !!binary aGVsbG8=", "no bytes": "description: !!binary é",
    "pairs": "targets: !!omap [a: 1]", "digits": "gradient_error: " + "9" * 5_000,
    "hex": "checkpointing: {n: 0x" + "f" * 4_000 + "}",
    "infinite": "gradient_error: .inf", "none": "gradient_error: .nan", "large": "gradient_error: 1e999",
    "twice": "norms: {fold: none}\nnorms: {fold: auto}", "twice inside": "norms: {fold: none, fold: auto}",
    "number as key": "1: 2", "null as key": "~: 2", "list as key": "? [a]\n: 1", "truth as key": "norms: {true: none}",
    "half a pair": 'name: "\ud800"', "control": "name: a\x00b", "object": "!!python/object/apply:os.system [ls]",
    "merged numbers": "<<: [1, 2]", "documents": "--- {}\n--- {}", "value": "=",
    "text for a group": "norms: fold", "list for a group": "norms: [1]", "long": "norms: " + "x" * 100_000, "empty": "",
}  # fmt: skip


@pytest.mark.parametrize("text", RECIPES.values(), ids=RECIPES)
def test_recipes_that_no_parser_likes(text: str, folder: Path) -> None:
    (folder / "r.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert answer(folder, lambda: load_recipe(folder / "r.yaml")) is None
    if len(text) < 3_000:
        answer(folder, lambda: load_recipe("exact", [f"norms.fold={text}"]))


@runs
def test_recipes(folder: Path, share: float) -> None:
    document = load_recipe("exact-levels").model_dump(mode="json")

    def check(content: bytes) -> None:
        (folder / "r.yaml").write_bytes(content)
        recipe = answer(folder, lambda: load_recipe(folder / "r.yaml"))
        if recipe is not None:
            json.dumps(recipe.model_dump(mode="json"), allow_nan=False)
            assert load_recipe(recipe) == recipe

    fuzz(contents(document), check, 1_000 * share)


def test_anchors_and_merges_of_recipes_are_read(folder: Path) -> None:
    merged = "linears: {<<: {recompute: none}, recompute: none}"
    text = f"name: x\ntargets: &a ['*.1']\nignore: *a\n{merged}"
    (folder / "r.yaml").write_text(text)
    recipe = load_recipe(folder / "r.yaml")
    assert (recipe.targets, recipe.ignore) == (("*.1",), ("*.1",))


@pytest.mark.parametrize("place", ["source.path", "files", "source.files"])
def test_paths_of_5000_characters(patched: Path, place: str) -> None:
    original = (patched / "memopt.json").read_text()
    document = json.loads(original)
    if place == "source.path":
        document["source"]["path"] = "/" + "x" * 5_000
    else:
        files = document["files"] if place == "files" else document["source"]["files"]
        files["x" * 5_000] = {"sha256": "0" * 64, "size": 1}
    (patched / "memopt.json").write_text(json.dumps(document))
    try:
        with guarded(patched.parent):
            verify_weights(patched)
            assert patched_folder(patched).origin()[0] in (None, document["source"]["path"])
    finally:
        (patched / "memopt.json").write_text(original)


# --- the fuzzer sees what it looks for


def test_a_traceback_is_seen(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        answer(folder, lambda: 1 // 0)


def test_a_hang_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.guard.SECONDS", 0.1)

    def hang() -> None:
        while True:
            pass

    with pytest.raises(Hung):
        answer(folder, hang)


def test_what_is_written_or_read_outside_is_seen(folder: Path) -> None:
    for offence in (lambda: (folder / "new").touch(), lambda: (folder.parent / "x").read_text()):
        with pytest.raises(AssertionError):
            answer(folder, offence)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "\ud800", "a\nb", "x" * 10_000])
def test_a_message_that_a_terminal_cannot_show_is_escaped_and_would_be_seen(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ModelError(text)

    answer(folder, refuse)
    monkeypatch.setattr("memopt.errors._printable", lambda text: text)
    with pytest.raises(AssertionError):
        answer(folder, refuse)
