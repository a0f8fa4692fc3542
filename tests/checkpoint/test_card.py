"""The model card of a patched folder: the source's card with lines more, and without them the source's again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from memopt.checkpoint.card import CARD, MAX_BYTES, patched_card, source_card
from memopt.checkpoint.manifest import Manifest
from memopt.checkpoint.sources.source import open_source, sha256
from memopt.checkpoint.unpatch import write_unpatched
from memopt.checkpoint.writer import write_checkpoint
from tests.checkpoint.builders import plan_of, rms_norm, rms_tensors, write_checkpoint_files

TEXT = "# A model\n\nIts own words.\n"
HEADS = {
    "tags in a block": "license: mit # of the weights\ntags:\n  - text\n  - x\nlanguage: en\n",
    "tags without indentation": "tags:\n- text\n",
    "no tags": "license: mit\nextra: |\n  text\n",
    "a base model": "base_model: org/first\ntags: []\n",
    "tags in brackets": "tags: [text, x]\n",
    "the tag": "tags:\n- memopt\n",
    "braces": "{license: mit}\n",
    "empty": "\n",
}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Of a hub model with one norm folded and one not."""
    root = tmp_path_factory.mktemp("card")
    source = write_checkpoint_files(root / "secret" / "name", rms_tensors())
    plan = plan_of([rms_norm(0), rms_norm(1)], "ignore=[model.layers.1.norm]")
    written = write_checkpoint(open_source(str(source)), plan, root / "out").manifest
    return dataclasses.replace(
        written, source=dataclasses.replace(written.source, model="org/model", commit="0123456789abcdef")
    )


def extend(folder: Path, manifest: Manifest, card: bytes) -> tuple[bytes | None, str]:
    (folder / CARD).write_bytes(card)
    return patched_card(folder, manifest)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("head", HEADS)
def test_nothing_of_a_card_is_lost_and_all_that_was_added_can_be_removed(
    tmp_path: Path, manifest: Manifest, head: str, end: str
) -> None:
    source = f"---\n{HEADS[head]}---\n{TEXT}".replace("\n", end).encode()
    written, note = extend(tmp_path, manifest, source)
    assert written is not None, note
    assert not note
    assert source_card(written) == source
    before, after = (ModelCard(each.decode()) for each in (source, written))
    assert after.text.startswith(before.text)
    had, has = before.data.to_dict(), after.data.to_dict()
    tags, tagged = had.pop("tags", None) or [], "memopt" in (has.get("tags") or [])
    assert [tag for tag in has.pop("tags", []) if tag != "memopt"] == [tag for tag in tags if tag != "memopt"]
    assert has == had | ({} if head == "braces" else {"base_model": had.get("base_model", "org/model")})
    assert tagged == (head not in ("a base model", "tags in brackets", "braces"))


@pytest.mark.parametrize(
    "source", [b"", b"# A model", TEXT.encode(), b"---\nno end", b"\n---\n\n---\n", b"# \xc3\xa9\r\n"]
)
def test_a_card_without_a_head_gets_one_and_loses_it_again(tmp_path: Path, manifest: Manifest, source: bytes) -> None:
    written, note = extend(tmp_path, manifest, source)
    assert written is not None, note
    assert not note
    assert source_card(written) == source
    data = ModelCard(written.decode()).data
    assert (data.base_model, data.tags) == ("org/model", ["memopt"])


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (b"# caf\xe9\n", "UTF-8"),
        (b"---\na: [\n---\n", "cannot be read"),
        (b"---\n- a\n---\n", "no mapping"),
        (b"---\na: &x [1]\nb: *x\n---\n", "aliases"),
        (b"---\na: 2024-99-99\n---\n", "month"),
        (b"---\na: " + b"[" * 5000 + b"\n---\n", "cannot be read"),
        (b"---\n" + b"a: 1\n" * 40_000 + b"---\n", "larger than 128 KiB"),
        ("\ufeff# A".encode(), "byte order mark"),
        (b"x" * (MAX_BYTES + 1), "at most 1 MiB"),
        (b"---\na: 1 # memopt\n---\n", "only memopt writes"),
    ],
    ids=range(10),
)
def test_a_card_that_cannot_be_extended_is_the_sources_and_a_note_says_why(
    tmp_path: Path, manifest: Manifest, source: bytes, why: str
) -> None:
    written, note = extend(tmp_path, manifest, source)
    assert written is None
    assert why in note
    assert source_card(source) == source or b"# memopt" in source


def test_a_card_that_was_written_is_not_extended_twice(tmp_path: Path, manifest: Manifest) -> None:
    once, _ = extend(tmp_path, manifest, TEXT.encode())
    assert once is not None
    assert extend(tmp_path, manifest, once)[0] is None


def test_without_a_card_one_is_written_that_names_the_model_and_no_path(tmp_path: Path, manifest: Manifest) -> None:
    written, _ = patched_card(tmp_path, manifest)
    assert written is not None
    assert source_card(written) is None
    assert source_card(written + b"A user's words.\n") == b"A user's words.\n"
    text = written.decode()
    for words in ("`org/model` at commit `0123", "recipe `exact`", "read them: 1.", "not folded: 1."):
        assert words in text
    data = ModelCard(text).data
    assert (data.base_model, data.tags) == ("org/model", ["memopt"])


@pytest.mark.parametrize("commit", [None, "abc"])
def test_a_local_folder_is_named_without_its_path(tmp_path: Path, manifest: Manifest, commit: str | None) -> None:
    source = dataclasses.replace(manifest.source, model=manifest.source.path, commit=commit)
    written, _ = patched_card(tmp_path, dataclasses.replace(manifest, source=source))
    assert written is not None
    assert b"Made from `name`" in written
    assert b"secret" not in written
    assert b"base_model" not in written


@pytest.mark.parametrize("card", [None, b"", TEXT.encode(), b"---\ntags:\n- a\n---\n", b"\xff"])
def test_unpatch_gives_the_sources_card_back(tmp_path: Path, card: bytes | None) -> None:
    folder = write_checkpoint_files(tmp_path / "model", rms_tensors(torch.float32))
    if card is not None:  # as in the hub's cache, where a snapshot consists of links
        (tmp_path / "blob").write_bytes(card)
        (folder / CARD).symlink_to(tmp_path / "blob")
    source, plan = open_source(str(folder)), plan_of([rms_norm(0)])
    notes: list[str] = []
    for _ in range(2):
        result = write_checkpoint(source, plan, tmp_path / "out", force=True, note=notes.append)
    assert result.manifest.files[CARD].sha256 == sha256(result.out / CARD)
    assert any(CARD in text and "UTF-8" in text for text in result.manifest.notes) == (card == b"\xff")
    assert card is None or (tmp_path / "blob").read_bytes() == card
    folds = tuple(record.fold for record in result.manifest.folds)
    write_unpatched(open_source(str(result.out)), source, folds, tmp_path / "back")
    back = tmp_path / "back" / CARD
    assert (back.read_bytes() if back.exists() else None) == card
