"""Writing a result: as a whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from memopt.environment.files import check_output, check_output_folder, parse_json, write_output
from memopt.errors import OutputError


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left"):
        write_output(target, b"new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to("real.html")
    write_output(check_output(tmp_path / "link.html", "--html", force=True), b"new")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text() == "new"


def test_a_file_with_content_is_replaced_only_with_force(tmp_path: Path) -> None:
    file = tmp_path / "step.pickle"
    file.touch()  # as mktemp leaves it
    assert check_output(file, "--snapshot") == file
    file.write_text("measured")
    with pytest.raises(OutputError, match=r"--snapshot '.*step.pickle' exists already"):
        check_output(file, "--snapshot")
    assert check_output(file, "--snapshot", force=True) == file


def test_a_folder_for_files_is_checked_without_being_made(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text("mine")
    assert check_output_folder(tmp_path, ["recipe.yaml"]) == tmp_path
    with pytest.raises(OutputError, match=r"fsdp\.yaml' exists already"):
        check_output_folder(tmp_path, ["recipe.yaml", "fsdp.yaml"])
    assert check_output_folder(tmp_path, ["recipe.yaml", "fsdp.yaml"], force=True) == tmp_path
    with pytest.raises(OutputError, match=r"is no folder: '.*fsdp\.yaml' is a file"):
        check_output_folder(tmp_path / "fsdp.yaml" / "plan", ["recipe.yaml"])
    assert check_output_folder(tmp_path / "a" / "b", ["recipe.yaml"]).parent.exists() is False


def test_a_new_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    write_output(tmp_path / "new", b"")
    (tmp_path / "plain").touch()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("text", ['{"a": "b', '{"a": "b\n"}', '{"a": 1,\n}'], ids=["cut off", "line break", "comma"])
def test_the_line_of_a_fault_in_json_is_given_once(text: str) -> None:
    with pytest.raises(ValueError, match=r"^.*[^t] at line \d$"):
        parse_json(text.encode())
