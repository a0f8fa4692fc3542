"""The forward, gradient and memory levels: a right checkpoint passes, planted faults fail."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import memopt.kernels.norm.function as norm_kernel
import memopt.kernels.norm.ops as norm_steps
import memopt.patches.linear.module as linear_module
import memopt.patches.scope as scope_patch
from memopt.cli.main import main
from memopt.errors import ModelError
from memopt.patches.checks import Check
from memopt.pipeline import patch_checkpoint
from memopt.reporting.terminal import checks_summary
from memopt.reporting.text import as_text
from memopt.verification import gradient
from memopt.verification.run import verify
from tests.factories import tiny_model
from tests.mutation.acting import backward_replaced
from tests.zoo.build import saved_twin

LEVELS = ["weights", "forward", "gradient", "training", "memory"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Originals and patched checkpoints of a folded and an unfoldable model."""
    root = tmp_path_factory.mktemp("levels")
    for name in ("llama", "bert"):
        tiny_model(name, torch.bfloat16).save_pretrained(root / name)
        patch_checkpoint(root / name, root / f"{name}-patched")
    return root


@pytest.fixture
def patched(folders, tmp_path) -> Path:
    """A copy of the patched Llama that a test may damage."""
    return Path(shutil.copytree(folders / "llama-patched", tmp_path / "patched"))


def statuses(verdict) -> dict[str, str]:
    return {check.id: check.status for check in verdict.checks}


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_all_levels_pass_on_a_right_checkpoint(folders, name):
    verdict = verify(folders / f"{name}-patched")
    assert verdict.status == "pass", [check for check in verdict.checks if check.status != "pass"]
    assert [level for level in LEVELS if any(check.level == level for check in verdict.checks)] == LEVELS
    assert all(check.reference and check.n for check in verdict.checks if check.value is not None and check.threshold)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_grouped_attention_in_fp32_keeps_what_the_plan_says(name, tmp_path):
    tiny_model(name).save_pretrained(tmp_path / "original")
    patch_checkpoint(tmp_path / "original", tmp_path / "out")
    verdict = verify(tmp_path / "out", level="memory")
    assert verdict.status == "pass", [check for check in verdict.checks if check.status != "pass"]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.rotates(3)
def test_codes_of_what_other_modules_save_are_not_a_norms_own(name, tmp_path):
    tiny_model(name, torch.bfloat16).save_pretrained(tmp_path / "original")
    patch_checkpoint(tmp_path / "original", tmp_path / "out", "int8")
    verdict = verify(tmp_path / "out", level="memory")
    assert verdict.status == "pass", [check for check in verdict.checks if check.status != "pass"]


@pytest.mark.rotates(3)
def test_a_model_of_sounds_is_planned_for_the_sounds_that_are_measured(tmp_path):
    """They are far shorter than those of a step that `memopt report` traces."""
    config = transformers.Wav2Vec2Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        conv_dim=[16, 16], conv_stride=[5, 4], conv_kernel=[10, 8], num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
    )  # fmt: skip
    transformers.Wav2Vec2ForCTC(config).save_pretrained(tmp_path / "original")
    patch_checkpoint(tmp_path / "original", tmp_path / "out")
    found = {check.id: check for check in verify(tmp_path / "out", level="memory").checks}
    assert found["memory.plan"].status == "pass", found["memory.plan"]


def test_another_model_as_the_original_fails_in_a_sentence(folders):
    verdict = verify(folders / "bert-patched", against=str(folders / "llama"), level=["weights", "forward"])
    assert verdict.status == "fail"
    assert {check.level for check in verdict.checks if check.status == "fail"} == {"weights", "forward"}


def test_a_patched_folder_is_no_original(folders):
    with pytest.raises(ModelError, match="itself patched"):
        verify(folders / "llama-patched", against=str(folders / "llama-patched"))


def test_a_weight_that_is_off_by_two_percent_fails_forward(patched):
    file = patched / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] *= 1.02
    save_file(tensors, file, metadata={"format": "pt"})
    assert statuses(verify(patched, level="forward"))["forward.error_ratio"] == "fail"
    assert "fail" in statuses(verify(patched, level="weights")).values()


def test_a_lost_norm_weight_fails_forward(patched):
    file = patched / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.ones_like(tensors["model.norm.weight"])
    save_file(tensors, file, metadata={"format": "pt"})
    assert statuses(verify(patched, level="forward"))["forward.error_ratio"] == "fail"


def scale_norm_gradients(monkeypatch, dx=1.0, dweight=1.0):
    right = norm_steps.norm_backward

    def wrong(*arguments):
        of_x, of_weight, of_bias = right(*arguments)
        return None if of_x is None else of_x * dx, None if of_weight is None else of_weight * dweight, of_bias

    monkeypatch.setattr(norm_steps, "norm_backward", wrong)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_norm_backward_that_is_off_by_a_tenth_fails_gradient(folders, monkeypatch, factor):
    scale_norm_gradients(monkeypatch, dx=factor)
    assert verify(folders / "llama-patched", level="gradient").status == "fail"


def test_a_lost_gradient_of_a_norm_weight_fails_gradient(folders, monkeypatch):
    scale_norm_gradients(monkeypatch, dweight=0.0)
    assert statuses(verify(folders / "bert-patched", level="gradient"))["gradient.worst_error_ratio"] == "fail"


@pytest.mark.parametrize(
    ("error", "stock_too", "status"),
    [(NotImplementedError, False, "fail"), (NotImplementedError, True, "skip"), (AssertionError, True, "skip")],
)
def test_an_operation_that_this_machine_or_the_model_lacks_is_a_fault_where_stock_modules_run(
    folders, monkeypatch, error, stock_too, status
):
    """An operation may lack a kernel for the machine; a model (Reformer) may refuse gradients in evaluation mode."""

    def missing(*arguments, **keywords):
        raise error("no kernel for this device")

    if stock_too:
        monkeypatch.setattr(torch.Tensor, "backward", missing)
    else:
        monkeypatch.setattr(norm_steps, "norm_backward", missing)
    verdict = verify(folders / "llama-patched", level="gradient")
    assert statuses(verdict) == {"gradient.machine": status}
    assert "no kernel for this device" in verdict.checks[0].detail


def test_keeping_what_the_plan_gives_up_fails_memory(folders, monkeypatch):
    def without_a_scope(stock, rewrite, module, *args, **kwargs):
        return stock(module, *args, **kwargs)

    right = scope_patch.run_scoped
    calls = {"traced": 0}

    def scope_only_in_the_trace(stock, rewrite, module, *args, **kwargs):
        fake = any(type(argument).__name__ == "FakeTensor" for argument in args)
        calls["traced"] += fake
        return (right if fake else without_a_scope)(stock, rewrite, module, *args, **kwargs)

    monkeypatch.setattr(scope_patch, "run_scoped", scope_only_in_the_trace)
    verdict = verify(folders / "bert-patched", level="memory")
    assert calls["traced"] > 0
    assert statuses(verdict)["memory.plan"] == "fail"


def test_a_tensor_hidden_in_an_attribute_fails_memory(folders, monkeypatch):
    right = norm_kernel.NormFunction.forward

    def hiding(ctx, x, *arguments):
        ctx.hidden = x.detach().clone()
        return right(ctx, x, *arguments)

    monkeypatch.setattr(norm_kernel.NormFunction, "forward", staticmethod(hiding))
    found = {check.id: check for check in verify(folders / "bert-patched", level="memory").checks}
    assert found["memory.nothing_hidden"].status == "fail"
    assert found["memory.nothing_hidden"].subject.endswith("LayerNorm")


@pytest.mark.parametrize("saved", ["a copy", "its input"])
def test_a_norm_that_saves_one_tensor_more_fails_memory_by_name(folders, monkeypatch, saved):
    right = norm_kernel.NormFunction.forward

    def saving(ctx, x, *arguments):
        save = ctx.save_for_backward
        seen = {"save_for_backward": lambda *tensors: save(*tensors, x if saved == "its input" else x.clone())}
        return right(_Seen(ctx, seen), x, *arguments)

    backward = norm_kernel.NormFunction.backward
    monkeypatch.setattr(norm_kernel.NormFunction, "forward", staticmethod(saving))
    planted = backward_replaced(
        norm_kernel.NormFunction, lambda ctx, dy: backward(_Seen(ctx, {"saved_tensors": ctx.saved_tensors[:4]}), dy)
    )
    with planted:
        found = {check.id: check for check in verify(folders / "bert-patched", level="memory").checks}
    check = found["memory.module"]
    assert (check.status, check.subject) == ("fail", "bert.embeddings.LayerNorm")


def test_a_linear_that_saves_what_it_could_recompute_fails_memory_by_name(folders, monkeypatch):
    monkeypatch.setattr(linear_module, "reads_spec", lambda x, weight: None)
    monkeypatch.setattr(scope_patch, "_CLOSED", contextlib.nullcontext())
    monkeypatch.setattr(scope_patch.ScopeRewrite, "around", lambda *given, **named: contextlib.nullcontext())
    found = {check.id: check for check in verify(folders / "bert-patched", level="memory").checks}
    assert found["memory.recomputed"].status == "fail"
    assert found["memory.recomputed"].subject == "bert.encoder.layer.0.intermediate.intermediate_act_fn"


def test_rotated_queries_and_keys_that_are_saved_fail_memory_by_block(tmp_path, monkeypatch):
    # Attention saves them, and no linear: only a scope tells that they can be computed again from the norm's x_hat.
    tiny_model("qwen3", torch.float32).save_pretrained(tmp_path / "qwen3")
    patch_checkpoint(tmp_path / "qwen3", tmp_path / "patched")

    def failed() -> list[tuple[str, str]]:
        checks = verify(tmp_path / "patched", level="memory").checks
        return [(check.id, check.subject) for check in checks if check.status == "fail"]

    assert failed() == []
    monkeypatch.setattr(scope_patch, "run_in_scope", lambda scope, run, module, *args, **kw: run(module, *args, **kw))
    assert failed() == [("memory.recomputed", "model.layers.0")]


@pytest.mark.parametrize(
    ("model_type", "recipe"),
    [
        pytest.param("moonshine", "exact-unfolded", id="a group norm keeps copies of its parameters, and its result"),
        pytest.param("sam2_hiera_det_model", "exact-levels", id="windows are padded"),
        pytest.param("sam2_vision_model", "exact-unfolded", id="the model keeps its own table of positions"),
        pytest.param("esm", "exact-levels", id="an activation of five operations runs again"),
        pytest.param("pe_audio", "exact-unfolded", id="it reads tokens and sounds of one size"),
        pytest.param("videomt", "exact-levels", id="several results of one norm live at once"),
        pytest.param("levit", "exact", id="the first forward in eval mode fills a cache"),
        pytest.param("levit", "exact-levels", id="a linear's reader copies statistics of the batch norm before"),
        pytest.param("modernbert", "exact-levels", id="a view of queries, keys and values is copied"),
        pytest.param("muse_spark_text", "exact", id="a linear reads what experts return"),
        pytest.param("glm4v_moe", "exact", id="experts free what stock saves", marks=pytest.mark.slow),
        pytest.param("dab-detr", "exact-unfolded", id="PReLU keeps a copy of its parameter", marks=pytest.mark.slow),
    ],
)
@pytest.mark.rotates(3)
def test_memory_of_a_right_checkpoint_passes(tmp_path, model_type, recipe):
    assert saved_twin(model_type, tmp_path / "stock")
    patch_checkpoint(tmp_path / "stock", tmp_path / "patched", recipe=recipe)
    checks = verify(tmp_path / "patched", level="memory").checks
    assert [(check.id, check.subject) for check in checks if check.status != "pass"] == []


class _Seen:
    """An autograd context with other attributes."""

    def __init__(self, ctx, changed):
        self.__dict__.update(_ctx=ctx, _changed=changed)

    def __getattr__(self, name):
        return self._changed[name] if name in self._changed else getattr(self._ctx, name)

    def __setattr__(self, name, value):
        setattr(self._ctx, name, value)


def test_a_missing_original_is_inconclusive_and_against_names_another(folders, tmp_path):
    original = Path(shutil.copytree(folders / "llama", tmp_path / "llama"))
    patch_checkpoint(original, tmp_path / "out")
    shutil.rmtree(original)
    verdict = verify(tmp_path / "out", level=["weights", "forward"])
    assert verdict.status == "inconclusive"
    assert verdict.exit_code() == 3
    assert verdict.exit_code(allow_skips=True) == 0
    assert verify(tmp_path / "out", against=str(folders / "llama"), level=["weights", "forward"]).status == "pass"


def test_the_wrong_original_fails(folders, tmp_path):
    tiny_model("llama", torch.bfloat16, seed=1).save_pretrained(tmp_path / "other")
    verdict = verify(folders / "llama-patched", against=str(tmp_path / "other"), level="forward")
    assert verdict.status == "fail"


@pytest.mark.parametrize("folder", ["missing", "not-patched"])
def test_a_folder_that_memopt_did_not_write_is_an_error(folders, tmp_path, folder):
    path = tmp_path / "missing" if folder == "missing" else folders / "llama"
    with pytest.raises(ModelError, match="memopt patch"):
        verify(path)


def test_a_damaged_file_fails_every_level_in_a_sentence(patched):
    with open(patched / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    verdict = verify(patched)
    assert verdict.status == "fail"
    assert {check.level for check in verdict.checks if check.status == "fail"} >= {"weights", "forward"}


def test_the_command_prints_one_json_document(folders, capsys):
    assert main(["verify", str(folders / "llama-patched"), "--level", "weights", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == "pass"
    assert document["command"] == "verify"
    assert all(check["threshold_reason"] is not None for check in document["checks"])


def test_the_command_prints_a_line_for_each_level_and_every_check_if_asked(folders, capsys):
    arguments = ["verify", str(folders / "llama-patched"), "--level", "weights"]
    assert main(arguments) == 0
    short = capsys.readouterr().out.splitlines()
    assert len(short) <= 5
    assert "weights" in short[0]
    assert "(limit " in short[0]
    assert "--verbose prints all" in short[2]
    assert main([*arguments, "--verbose"]) == 0
    full = capsys.readouterr().out
    assert full.count("(limit ") > 5
    assert "against: source bytes" in full


def test_of_each_level_the_check_nearest_to_its_limit_is_printed_and_what_did_not_pass_in_full():
    checks = [
        Check("a", "weights", "files", "pass", "files that differ", 0.0, 0.0),
        Check("b", "forward", "logits", "pass", "ratio", 1.2, 1.25),
        Check("c", "forward", "logits", "pass", "another ratio", 1.0, 1.25),
        Check("d", "memory", "blocks", "warn", "difference", 0.05, 0.03, detail="planned 1, measured 2"),
        Check("e", "memory", "blocks", "pass", "share", 0.02, 1.0),
    ]
    lines = [line.rstrip() for line in as_text([checks_summary(checks)]).splitlines()]
    assert lines[:3] == [
        "  ok  weights  1 check   files that differ: 0 (limit 0)",
        "  ok  forward  2 checks  ratio: 1.2 (limit 1.25)",
        "warn  memory   2 checks  difference: 0.05 (limit 0.03)",
    ]
    assert any("planned 1, measured 2" in line for line in lines[3:])
    assert not any("ratio" in line or "share" in line for line in lines[3:])


def test_the_command_says_what_failed_and_exits_with_one(patched, capsys):
    (patched / "config.json").write_text((patched / "config.json").read_text() + "\n")
    assert main(["verify", str(patched), "--level", "weights"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out
    assert "NOT the same model" in out


def test_a_model_that_draws_a_mask_in_its_forward_passes(tmp_path):
    """ViT-MAE masks patches at random in evaluation mode too: each run has to draw the same mask."""
    assert saved_twin("vit_mae", tmp_path / "model")
    patch_checkpoint(tmp_path / "model", tmp_path / "patched", recipe="exact")
    verdict = verify(tmp_path / "patched", level=["forward", "gradient"])
    assert verdict.status == "pass", [check for check in verdict.checks if check.status != "pass"]


@pytest.mark.parametrize("runs", [True, None])
def test_an_error_of_patched_modules_is_not_taken_for_one_of_stock_modules(folders, monkeypatch, runs):
    """None: whether stock modules run is not known, since they do not fit into memory."""

    def wrong(*arguments, **keywords):
        raise RuntimeError("a fault of the patch")

    monkeypatch.setattr(norm_steps, "norm_backward", wrong)
    if runs is None:
        monkeypatch.setattr(gradient, "stock_runs", lambda trial: None)
    with pytest.raises(RuntimeError, match="a fault of the patch"):
        verify(folders / "llama-patched", level="gradient")
