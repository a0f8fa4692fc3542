"""`memopt patch` on a real tiny Llama."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from memopt import pipeline
from memopt.checkpoint.sources.source import CheckpointSource
from memopt.verification.run import Verdict
from memopt.verification.weights import verify_weights
from memopt.walk.sites import Sites
from tests.checkpoint.builders import plan_of, rms_norm
from tests.cli.conftest import Run

Memopt = Callable[..., Run]
OUT = Path("tiny-llama-memopt")


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(1, 40)[None]).logits
    return result


def test_stock_transformers_loads_the_result_and_computes_the_same(memopt: Memopt, unwalked_llama: Path) -> None:
    llama = unwalked_llama
    run = memopt("patch", llama)
    assert run.code == 0, run.err
    before, after = load_file(llama / "model.safetensors"), load_file(OUT / "model.safetensors")
    assert before.keys() == after.keys()
    folded = [name for name in before if "layernorm" in name]
    assert len(folded) == 4
    assert all(torch.equal(after[name], torch.ones_like(after[name])) for name in folded)
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    # fp32 weights, each rounded once more: about 2^-24 relative, times a little for the sums.
    reference = logits(llama)
    assert (logits(OUT) - reference).norm() / reference.norm() < 1e-6
    assert Verdict(verify_weights(OUT)).status == "pass"


def test_the_result_says_what_was_done_and_what_comes_next(memopt: Memopt, llama: Path) -> None:
    run = memopt("patch", llama)
    counts = ("4 folded, 1 shared", "2 recomputed")
    counted = ("Saved for backward: ", "full fine-tuning")
    promise = ("loss at step 0 is the same", "exact-unfolded", "norms.fold=none")
    commands = (f"memopt verify {OUT}", f"memopt report {OUT}")
    for words in (*counts, *counted, *promise, *commands):
        assert words in run.out, words
    assert "error" not in run.err
    table = run.out.split("\n\n")[0]
    assert max(len(line) for line in table.splitlines()) <= 80


def test_without_folds_nothing_is_said_about_folding(memopt: Memopt, llama: Path) -> None:
    run = memopt("patch", llama, "--recipe", "exact-unfolded")
    assert run.code == 0
    assert "loss at step 0" not in run.out
    assert "so no weight changes" in run.err
    assert "unchanged" in run.out
    assert (OUT / "model.safetensors").read_bytes() == (llama / "model.safetensors").read_bytes()


def test_that_no_weight_changes_is_said_before_the_folder_is_written(llama: Path, tmp_path: Path) -> None:
    said: list[str] = []
    pipeline.patch_checkpoint(
        llama, tmp_path / "out", "exact-unfolded", note=said.append, progress=lambda *_: said.append("written")
    )
    assert "so no weight changes" in said[0]
    assert said[1:]
    assert set(said[1:]) == {"written"}


def test_json_is_one_document_with_every_site(memopt: Memopt, llama: Path) -> None:
    run = memopt("patch", llama, "--json", "--out", "there")
    document = json.loads(run.out)
    assert (document["command"], document["status"], document["error"]) == ("patch", "pass", None)
    assert document["output"] == "there"
    assert document["counts"]["norm"] == {"fold": 4, "share": 1}
    assert sum(sum(kind.values()) for kind in document["counts"].values()) == len(document["entries"])
    assert document["weights"]["bytes"] == (llama / "model.safetensors").stat().st_size
    assert len(document["folds"]) == 4


def test_a_dry_run_writes_nothing_and_shows_the_plan(memopt: Memopt, llama: Path) -> None:
    before = sorted(path.name for path in Path.cwd().iterdir())
    run = memopt("patch", llama, "--dry-run")
    assert run.code == 0
    assert "4 folded, 1 shared" in run.out
    assert "nothing was written" in run.out
    assert sorted(path.name for path in Path.cwd().iterdir()) == before
    assert json.loads(memopt("patch", llama, "--dry-run", "--json").out)["dry_run"] is True


def test_a_dry_run_needs_the_config_alone(memopt: Memopt, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    run = memopt("patch", tmp_path, "--dry-run")
    assert (run.code, "4 folded, 1 shared" in run.out) == (0, True)
    assert "There are no weights here yet" in run.out + run.err
    assert memopt("patch", tmp_path).code == 2


@pytest.mark.parametrize("command", [("patch", "--dry-run"), ("report",)])
def test_a_local_folder_has_no_revision(memopt: Memopt, llama: Path, command: tuple[str, ...]) -> None:
    run = memopt(*command, llama, "--revision", "main")
    assert (run.code, "--revision is for hub ids" in run.err) == (2, True)


def test_report_says_that_force_needs_a_file(memopt: Memopt, llama: Path) -> None:
    run = memopt("report", llama, "--seq", "8", "--batch", "1", "--force")
    assert (run.code, "--force has no effect: no file is to be written" in run.err) == (0, True)


def test_verbose_has_a_row_for_every_site(memopt: Memopt, llama: Path) -> None:
    run = memopt("patch", llama, "--dry-run", "--verbose")
    assert all(f"model.layers.{i}.input_layernorm" in run.out for i in range(2))


def test_set_changes_the_recipe(memopt: Memopt, llama: Path) -> None:
    document = json.loads(memopt("patch", llama, "--dry-run", "--json", "--set", "ignore=[input_layernorm]").out)
    assert document["recipe"]["ignore"] == ["input_layernorm"]
    assert document["counts"]["norm"] == {"fold": 2, "share": 1, "keep": 2}


def test_a_quantised_weight_is_refused_by_name(memopt: Memopt, llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    run = memopt("patch", llama)
    assert (run.code, run.err.count("\n")) == (2, 2)
    assert f"tensor '{name}' is stored as F8_E4M3" in run.err


def test_a_patched_folder_is_not_patched_again(memopt: Memopt, llama: Path) -> None:
    assert memopt("patch", llama).code == 0
    run = memopt("patch", OUT)
    assert (run.code, run.out) == (1, "")
    assert run.err.count("\n") == 1
    assert "already patched" in run.err
    document = json.loads(memopt("patch", OUT, "--json").out)
    assert document["status"] == "fail"


def test_nothing_to_rewrite_is_a_negative_verdict(memopt: Memopt, llama: Path) -> None:
    run = memopt("patch", llama, "--set", "targets=[]")
    assert (run.code, run.out) == (1, "")
    assert "Nothing in" in run.err
    assert not OUT.exists()


def test_an_existing_folder_is_replaced_with_force_only(memopt: Memopt, llama: Path) -> None:
    assert memopt("patch", llama).code == 0
    stamp = (OUT / "memopt.json").stat().st_mtime_ns
    refused = memopt("patch", llama)
    assert refused.code == 2
    assert "--force" in refused.err
    assert (OUT / "memopt.json").stat().st_mtime_ns == stamp
    assert memopt("patch", llama, "--force").code == 0
    assert (OUT / "memopt.json").stat().st_mtime_ns != stamp


BAD_MODELS = {
    "path": (lambda folder: None, "./nowhere"),
    "file": (lambda folder: None, "config"),
    "config": (lambda folder: (folder / "config.json").write_text("{"), None),
    "no config": (lambda folder: (folder / "config.json").unlink(), None),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), None),
    "truncated": (lambda folder: (folder / "model.safetensors").write_bytes(b"123"), None),
    "pickle": (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), None),
    "unknown id": (lambda folder: None, "nobody/nothing"),
    "bad id": (lambda folder: None, "a b c"),
}


@pytest.mark.parametrize(("damage", "name"), BAD_MODELS.values(), ids=BAD_MODELS.keys())
def test_a_bad_model_is_one_line_and_nothing_is_written(
    memopt: Memopt, llama: Path, damage: Callable[[Path], object], name: str | None
) -> None:
    damage(llama)
    target = {"config": llama / "config.json", None: llama}.get(name, name)
    run = memopt("patch", target)
    assert (run.code, run.out) == (2, "")
    assert len(run.err.splitlines()) == 1, run.err
    document = json.loads(memopt("patch", target, "--json").out)
    assert document["error"]["type"] == "ModelError"
    assert [path.name for path in Path.cwd().iterdir()] == ["tiny-llama"]


@pytest.mark.parametrize("out", ["tiny-llama", "tiny-llama/x", ".", "tiny-llama/config.json"])
def test_a_bad_output_is_one_line(memopt: Memopt, llama: Path, out: str) -> None:
    run = memopt("patch", llama, "--out", out, "--force")
    assert (run.code, run.out) == (2, "")
    assert len(run.err.splitlines()) == 1, run.err


def test_what_other_code_prints_does_not_reach_stdout(
    memopt: Memopt, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noisy(source: CheckpointSource, *rest: object) -> tuple[CheckpointSource, Sites, None]:
        print("hello from remote code")
        return source, plan_of([rms_norm(0)]).sites, None

    monkeypatch.setattr(pipeline, "walk_source", noisy)
    run = memopt("patch", llama, "--dry-run", "--json")
    assert json.loads(run.out)["status"] == "pass"
    assert "hello" in run.err


def test_control_c_after_writing_says_that_the_folder_is_complete(
    memopt: Memopt, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memopt.cli.patch._print", interrupt)
    run = memopt("patch", llama, "--out", tmp_path / "out")
    assert run.code == 130
    assert f"'{tmp_path / 'out'}' was written and is complete." in run.err
    assert (tmp_path / "out" / "memopt.json").is_file()


def test_control_c_while_writing_leaves_nothing(memopt: Memopt, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memopt.checkpoint import writer

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "copy_side_files", interrupt)
    run = memopt("patch", llama, "--json")
    assert run.code == 130
    assert json.loads(run.out)["error"]["type"] == "Interrupted"
    assert "was not written; nothing was left behind" in run.err
    assert [path.name for path in Path.cwd().iterdir()] == ["tiny-llama"]


def test_a_name_for_the_output_is_found_for_every_kind_of_model() -> None:
    assert pipeline.default_folder("org/Model-1.5B") == Path("Model-1.5B-memopt")
    assert pipeline.default_folder("gpt2") == Path("gpt2-memopt")
    assert pipeline.default_folder(".") == Path(f"{Path.cwd().name}-memopt")
