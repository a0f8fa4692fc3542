"""The place of the original: a folder below one named `snapshots` is a folder, and an unreadable original a skip."""

from __future__ import annotations

from pathlib import Path

import pytest

import memopt
from memopt.cli.main import main
from memopt.pipeline import patch_checkpoint, unpatch_checkpoint
from memopt.verification.run import verify
from tests.factories import tiny_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("place", [f"models--org--tiny/snapshots/{COMMIT}", "runs/snapshots/step-100"])
def test_a_folder_below_snapshots_is_verified_and_unpatched_by_its_path(tmp_path: Path, place: str) -> None:
    original, patched, trained = tmp_path / place, tmp_path / "patched", tmp_path / "trained"
    tiny_model("llama").save_pretrained(original)
    patch_checkpoint(original, patched)
    assert verify(patched, level=["weights", "forward"]).status == "pass"
    unpatch_checkpoint(patched, out=tmp_path / "stock")
    memopt.load(patched).save_pretrained(trained)
    unpatch_checkpoint(trained, original, tmp_path / "trained-stock")


def test_an_original_that_cannot_be_opened_is_a_skip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "original")
    patch_checkpoint(tmp_path / "original", tmp_path / "patched")
    (tmp_path / "original" / "model.safetensors").write_bytes(b"cut off")
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["verify", str(tmp_path / "patched"), "--level", "forward"]) == 3
    printed = capsys.readouterr().out
    assert "it cannot be opened" in printed
    assert "NOT the same model" not in printed
