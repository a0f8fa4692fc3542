"""Publishing a folder: all of it or nothing, whatever happens."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from memopt.checkpoint import atomic, shards, target
from memopt.checkpoint.atomic import staged
from memopt.checkpoint.sources.source import open_source
from memopt.checkpoint.target import check_space, check_target
from memopt.checkpoint.writer import write_checkpoint
from memopt.errors import OutputError
from tests.checkpoint.builders import rms_plan, rms_tensors, write_checkpoint_files

ROOT = Path(__file__).parents[2]

#: Writes the checkpoint of argv[1] to argv[2], reports "ready" inside the second shard and waits there.
STUCK = """
    import signal, sys, threading, time
    from pathlib import Path
    from memopt.checkpoint import writer
    from memopt.checkpoint.sources.source import open_source
    from tests.checkpoint.builders import rms_plan

    original = writer.write_shard
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may ignore it

    def stuck(source, shard, operations, path, advance):
        if "00002" not in shard.name:
            return original(source, shard, operations, path, advance)
        path.write_bytes(b"half")
        print("ready", flush=True)
        if len(sys.argv) > 3:
            time.sleep(1)  # by then the main thread waits for this one
            signal.pthread_kill(threading.get_ident(), int(sys.argv[3]))
        while True:
            advance(0)
            time.sleep(0.01)

    writer.write_shard = stuck
    writer.write_checkpoint(open_source(sys.argv[1]), rms_plan(), Path(sys.argv[2]), force=True)
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def written_before(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A folder that an earlier run of memopt wrote."""
    write_checkpoint_files(folder, tensors)
    list_in_manifest(folder)
    return folder


def list_in_manifest(folder: Path) -> None:
    records = {
        name: {"sha256": hashlib.sha256(raw).hexdigest(), "size": len(raw)} for name, raw in contents(folder).items()
    }
    (folder / "memopt.json").write_text(json.dumps({"files": records}))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint_files(tmp_path / "model", rms_tensors(), shards=3)


@pytest.fixture
def stuck(tmp_path: Path, model: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of replacing tmp_path/out."""
    written_before(tmp_path / "out", rms_tensors())
    command = [sys.executable, "-c", textwrap.dedent(STUCK), str(model), str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.stderr and process.stderr.read()
    yield process
    process.kill()
    process.communicate()


def test_a_run_that_is_killed_leaves_the_old_folder_as_it_was(
    tmp_path: Path, model: Path, stuck: subprocess.Popen[str]
) -> None:
    before = contents(tmp_path / "out")
    stuck.kill()
    stuck.wait()
    assert contents(tmp_path / "out") == before
    (leftover,) = tmp_path.glob(".out.memopt-*")

    notes: list[str] = []
    write_checkpoint(open_source(str(model)), rms_plan(), tmp_path / "out", force=True, note=notes.append)
    assert not leftover.exists()
    assert any(leftover.name in text for text in notes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted_removes_what_it_wrote(
    tmp_path: Path, stuck: subprocess.Popen[str], number: signal.Signals
) -> None:
    before = contents(tmp_path / "out")
    stuck.send_signal(number)
    assert stuck.wait(timeout=30) != 0
    assert contents(tmp_path / "out") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_an_interrupt_that_another_thread_receives_ends_the_run(tmp_path: Path, model: Path) -> None:
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(STUCK),
        str(model),
        str(tmp_path / "out"),
        str(int(signal.SIGTERM)),
    ]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60).returncode == 128 + signal.SIGTERM
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_second_run_leaves_the_folder_of_a_living_one_alone(
    tmp_path: Path, model: Path, stuck: subprocess.Popen[str]
) -> None:
    write_checkpoint(open_source(str(model)), rms_plan(), tmp_path / "out", force=True)
    (living,) = tmp_path.glob(".out.memopt-*")
    assert (living / "new").is_dir()


@pytest.mark.timeout(20)
def test_what_has_the_name_of_a_temporary_folder_and_is_none_is_left_alone(tmp_path: Path) -> None:
    planted = {
        name: tmp_path / f".out.memopt-{name}" for name in ("photos11", "halfmark", "linkmark", "pipe1111", "aim")
    }
    for name in ("photos11", "halfmark", "linkmark"):
        planted[name].mkdir()
        (planted[name] / "new").mkdir()
        (planted[name] / "cat.jpg").touch()
    (planted["halfmark"] / ".memopt-stage").touch()
    (planted["linkmark"] / "cat.jpg").unlink()
    (planted["linkmark"] / ".memopt-stage").symlink_to(planted["photos11"] / "cat.jpg")
    os.mkfifo(planted["pipe1111"])
    planted["aim"].mkdir()
    (planted["aim"] / ".memopt-stage").touch()
    (tmp_path / ".out.memopt-link1111").symlink_to(planted["aim"])
    before = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    notes: list[str] = []
    with staged(tmp_path / "out", force=True, note=notes.append):
        pass
    assert before < {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert sum("left alone" in text for text in notes) == 3


def test_an_empty_leftover_and_one_that_was_being_removed_go(tmp_path: Path) -> None:
    for name, inside in (("aaaaaaaa", ""), ("bbbbbbbb", ".memopt-stage")):
        (tmp_path / f".out.memopt-{name}").mkdir()
        if inside:
            (tmp_path / f".out.memopt-{name}" / inside).touch()
    with staged(tmp_path / "out", force=True, note=lambda text: None):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_cannot_be_removed_is_named_and_nothing_else_is_claimed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(shards, "write_at", full)
    monkeypatch.setattr(atomic.shutil, "rmtree", refuse)
    notes: list[str] = []
    with pytest.raises(OutputError) as caught:
        write_checkpoint(open_source(str(model)), rms_plan(), tmp_path / "out", note=notes.append)
    assert "left behind" not in str(caught.value)
    assert any("was left behind" in text and ".out.memopt-" in text for text in notes)


def test_parents_that_were_made_for_nothing_are_removed(tmp_path: Path) -> None:
    with pytest.raises(KeyError), staged(tmp_path / "a" / "b" / "out", force=False, note=print):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_a_parent_that_cannot_be_listed_is_an_error_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(out: Path, note: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(out.parent))

    monkeypatch.setattr(atomic, "_clear_leftovers", refuse)
    with pytest.raises(OutputError, match="Permission denied"), staged(tmp_path / "out", force=True, note=print):
        pytest.fail("nothing can be written")


def test_a_full_disk_leaves_nothing_and_says_so(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards, "write_at", full)
    with pytest.raises(OutputError, match="full"):
        write_checkpoint(open_source(str(model)), rms_plan(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_too_little_space_is_said_before_anything_is_written(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 1 << 20))
    with pytest.raises(OutputError, match=r"needs .* and the disk has 1.0 MiB free"):
        write_checkpoint(open_source(str(model)), rms_plan(), tmp_path / "new" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_enough_space_passes(tmp_path: Path) -> None:
    check_space(tmp_path / "out", 1)


@pytest.mark.parametrize("swap", [True, False])
def test_force_replaces_the_whole_folder(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, swap: bool
) -> None:
    if not swap:
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    old = write_checkpoint_files(tmp_path / "out", {})
    (old / "stale.txt").write_text("x")
    list_in_manifest(old)
    write_checkpoint(open_source(str(model)), rms_plan(), old, force=True)
    assert not (old / "stale.txt").exists()
    assert (old / "memopt.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_rename_that_fails_brings_the_old_folder_back(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = written_before(tmp_path / "out", {})
    before = contents(old)
    rename = os.rename

    def fail_once(source: Path, target: Path) -> None:
        if Path(target) == old and Path(source).name == "new":
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    monkeypatch.setattr(os, "rename", fail_once)
    with pytest.raises(OutputError, match="Input/output error"):
        write_checkpoint(open_source(str(model)), rms_plan(), old, force=True)
    assert contents(old) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_folder_that_was_moved_aside_by_a_killed_run_comes_back(tmp_path: Path) -> None:
    aside = tmp_path / ".out.memopt-abcd1234"
    (aside / "old").mkdir(parents=True)
    (aside / ".memopt-stage").touch()
    (aside / "old" / "weights").write_text("precious")
    notes: list[str] = []
    with pytest.raises(OutputError, match="filled"), staged(tmp_path / "out", force=False, note=notes.append):
        pytest.fail("it is not replaced without force")
    assert (tmp_path / "out" / "weights").read_text() == "precious"
    assert any("Restored" in text for text in notes)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def add_checkpoint(folder: Path) -> None:
    (folder / "checkpoint-500").mkdir()
    (folder / "checkpoint-500" / "optimizer.pt").touch()


def add_state(folder: Path) -> None:
    (folder / "trainer_state.json").write_text("{}")


def edit_config(folder: Path) -> None:
    (folder / "config.json").write_bytes((folder / "config.json").read_bytes().replace(b"24", b"25"))


def edit_weights(folder: Path) -> None:
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")


def link_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "weights")
    (folder / "model.safetensors").symlink_to(folder.parent / "weights")


def link_folder(folder: Path) -> None:
    (folder / "runs").symlink_to(folder.parent)


def add_pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


CHANGES: dict[str, Callable[[Path], None]] = {
    "checkpoint-500/": add_checkpoint,
    "trainer_state.json": add_state,
    "config.json": edit_config,
    "model.safetensors": edit_weights,
    "model.safetensors.": link_weights,
    "runs": link_folder,
    "pipe": add_pipe,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", CHANGES)
def test_force_refuses_a_folder_in_which_something_is_not_memopts_and_names_it(
    tmp_path: Path, model: Path, name: str
) -> None:
    out = written_before(tmp_path / "out", rms_tensors())
    CHANGES[name](out)
    before = {str(path.relative_to(tmp_path)): path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(OutputError) as caught:
        write_checkpoint(open_source(str(model)), rms_plan(), out, force=True)
    assert name.rstrip(".") in caught.value.message
    assert {str(path.relative_to(tmp_path)): path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_weight_file_that_is_edited_is_found_where_only_its_digest_shows_it(tmp_path: Path) -> None:
    out = written_before(tmp_path / "out", {"w": torch.zeros(400_000)})
    edit_weights(out)
    target.files_to_replace(out, True, "is not empty", all_digests=False)
    with pytest.raises(OutputError, match=r"changed .* model\.safetensors"), staged(out, force=True, note=print):
        pytest.fail("it is found before anything is written")


@pytest.mark.parametrize("force", [True, False])
def test_what_appears_in_the_target_meanwhile_is_not_replaced(tmp_path: Path, model: Path, force: bool) -> None:
    out = tmp_path / "out"
    if force:
        written_before(out, rms_tensors())
    with pytest.raises(OutputError, match="changed while"), staged(out, force=force, note=print):
        write_checkpoint_files(out / "result", {})
    assert (out / "result" / "config.json").exists()
    assert not list(tmp_path.glob(".out*"))


def test_a_file_that_appears_while_the_old_folder_is_removed_is_kept(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = written_before(tmp_path / "out", rms_tensors())
    original = atomic.remove_files

    def late(folder: Path, files: target.Files) -> None:
        (folder / "late.txt").write_text("precious")
        original(folder, files)

    monkeypatch.setattr(atomic, "remove_files", late)
    notes: list[str] = []
    write_checkpoint(open_source(str(model)), rms_plan(), out, force=True, note=notes.append)
    (kept,) = tmp_path.glob(".out.memopt-*/new/late.txt")
    assert str(kept.parent) in " ".join(notes)
    write_checkpoint(open_source(str(model)), rms_plan(), out, force=True)
    assert kept.read_text() == "precious"


def test_exchange_swaps_two_folders_in_one_step(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert atomic._exchange(tmp_path / "a", tmp_path / "b")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["a"]


def test_an_empty_folder_is_filled(tmp_path: Path, model: Path) -> None:
    (tmp_path / "out").mkdir()
    write_checkpoint(open_source(str(model)), rms_plan(), tmp_path / "out")
    assert (tmp_path / "out" / "memopt.json").is_file()


def test_missing_parents_are_made(tmp_path: Path, model: Path) -> None:
    write_checkpoint(open_source(str(model)), rms_plan(), tmp_path / "a" / "b" / "out")
    assert (tmp_path / "a" / "b" / "out" / "memopt.json").is_file()


def test_a_folder_with_files_needs_force(tmp_path: Path, model: Path) -> None:
    out = written_before(tmp_path / "out", {})
    with pytest.raises(OutputError, match="--force"):
        check_target(out, model, force=False)
    assert check_target(out, model, force=True) == out


def test_force_replaces_only_what_memopt_wrote(tmp_path: Path, model: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    write_checkpoint_files(tmp_path / "original", {})
    for folder in ("photos", "original"):
        with pytest.raises(OutputError, match="not written by memopt"):
            check_target(tmp_path / folder, model, force=True)


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("out", ["model", "model/sub", "model/../model", "link", "."])
def test_the_source_is_never_the_target_nor_around_or_inside_it(
    tmp_path: Path, model: Path, out: str, force: bool
) -> None:
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OutputError, match="source"):
        check_target(tmp_path / out, model, force=force)


def test_the_hubs_cache_is_never_the_target(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "cache_folder", lambda: tmp_path / "hub")
    for out in ("hub", "hub/models--x/snapshots/abc", "."):
        with pytest.raises(OutputError, match=r"cache|contains"):
            check_target(tmp_path / out, model, force=True)


def test_the_current_folder_is_never_the_target(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(OutputError, match="current folder"):
        check_target(Path("."), model, force=False)


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path, model: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(OutputError, match="is a file"):
        check_target(tmp_path / "out", model, force=True)


def test_a_folder_below_a_file_cannot_be_made(tmp_path: Path, model: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError):
        write_checkpoint(open_source(str(model)), rms_plan(), tmp_path / "file" / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path, model: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(OutputError, match="locked"):
        write_checkpoint(open_source(str(model)), rms_plan(), tmp_path / "locked" / "out")
