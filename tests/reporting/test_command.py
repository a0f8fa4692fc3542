"""`memopt report`, from the command line to the table and the JSON document."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from memopt.cli import report as command
from memopt.cli.main import main
from memopt.errors import ModelError, UsageError
from memopt.pipeline import fit, patch_checkpoint, report, report_on
from memopt.plan.recipe import load_recipe
from memopt.prediction.alternatives import headline
from memopt.prediction.cards import find_card
from memopt.prediction.peak import predict
from memopt.prediction.planner.training import plan_training
from memopt.prediction.setup import Setup
from memopt.trace.training import Request, Step, Training
from tests.factories import tiny_model
from tests.trace.builders import named_config, sites_of
from tests.trace.test_estimate import LLAMA_8B


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the config of a tiny Llama and nothing else."""
    folder = tmp_path_factory.mktemp("report") / "tiny-llama"
    named_config("llama").save_pretrained(folder)
    return folder


_SEEN: dict[tuple[str, ...], tuple[int, dict[str, Any]]] = {}


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit code and document of `memopt report`; the same command is run once."""
    words = tuple(map(str, arguments))
    if words not in _SEEN:
        capsys.readouterr()
        code = main(["report", *words, "--json"])
        _SEEN[words] = code, json.loads(capsys.readouterr().out)
    return _SEEN[words]


def test_a_config_alone_gives_the_table(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(llama), "--batch", "2", "--seq", "32", "-v"]) == 0
    out = capsys.readouterr().out
    assert out.index("\npeak ") < out.index("2 blocks alike")
    assert "2 blocks alike, model.layers.0 to model.layers.1" in out
    assert "norm output (x_hat)" in out
    assert "saved for backward:" in out
    assert "peak of a step:" in out
    assert max(len(line) for line in out.splitlines()) <= 80


@pytest.mark.slow
def test_the_answer_for_a_card_comes_first_and_is_the_same_in_json(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest batch fits and one more does not, by a prediction of its own; an optimizer's states are in it."""
    code, data = run_json(capsys, llama, "--batch", 2, "--seq", 128, "--gpu", "572MiB")
    ways = {way["name"]: way for way in data["headline"]["ways"]}
    assert list(ways) == [
        "stock",
        "memopt",
        "stock + checkpointing",
        "memopt, levels",
        "memopt + checkpointing",
        "memopt, int8",
    ]
    assert ways["stock"]["extra_flops"] == 0 < ways["stock + checkpointing"]["extra_flops"] < 0.4
    assert [way["gradients"] for way in ways.values()] == ["exact"] * 5 + ["10% off"]
    assert [way["gradient_error"] for way in ways.values()] == [0.0] * 5 + [0.1]
    assert ways["memopt"]["parts"]["weights"] > 0
    most = ways["memopt"]["largest_batch"]
    config = AutoConfig.from_pretrained(llama)
    sites, rules, card = sites_of(config), load_recipe("exact-unfolded"), find_card("572MiB").memory
    for batch, fits in ((most, True), (most + 1, False)):
        found = predict(Step(config, Training(batch, 128), sites, rules))
        assert (found.total + found.margin <= card) == fits
    assert code == 0


def test_json_holds_what_the_table_shows(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run_json(capsys, llama, "--batch", 2, "--seq", 32)
    assert (code, data["command"], data["status"], data["schema_version"]) == (0, "report", "pass", 1)
    assert data["recipe"] == "exact-unfolded"
    assert data["training"]["seq"] == 32
    assert data["summary"]["after"] < 0.7 * data["summary"]["before"]
    assert data["summary"]["before"] == sum(part["before"] for part in data["parts"])
    for side in ("before", "after"):
        step = data["step"][side]
        assert step["peak"] > step["after_forward"] >= data["summary"][side]
        assert step["peak"] == sum(step["per_kind"].values()) == sum(step["per_module"].values())
    assert data["step"]["after"]["peak"] < data["step"]["before"]["peak"]


def test_the_default_row_is_as_long_as_the_config_allows(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, data = run_json(capsys, llama)
    assert data["training"]["seq"] == 128


def test_a_folding_recipe_keeps_as_little_as_sharing(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, shared = run_json(capsys, llama, "--batch", 2, "--seq", 32)
    _, folded = run_json(capsys, llama, "--batch", 2, "--seq", 32, "--recipe", "exact")
    assert folded["recipe"] == "exact"
    assert folded["summary"]["after"] <= shared["summary"]["after"]


def test_lora_and_checkpointing_change_what_is_kept(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, full = run_json(capsys, llama)
    _, lora = run_json(capsys, llama, "--train", "lora", "--lora-targets", "q,v")
    _, checkpointed = run_json(capsys, llama, "--checkpointing", "full")
    assert full["summary"]["before"] > lora["summary"]["before"] > checkpointed["summary"]["before"]


def test_a_patched_folder_is_reported_with_its_own_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stock, patched = tmp_path / "stock", tmp_path / "patched"
    tiny_model("llama").save_pretrained(stock)
    patch_checkpoint(stock, patched)
    code, data = run_json(capsys, patched, "--seq", 32)
    assert (code, data["recipe"]) == (0, "exact")
    _, unpatched = run_json(capsys, stock, "--seq", 32)
    assert data["before"] == unpatched["before"]
    copies_of_the_folded_weights = 4 * 64 * 2
    assert data["summary"]["after"] == unpatched["summary"]["after"] - copies_of_the_folded_weights


def test_a_model_without_tokens_has_no_row_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named_config("vit").save_pretrained(tmp_path)
    _, data = run_json(capsys, tmp_path, "--seq", 512)
    assert data["training"]["seq"] is None
    assert "The model reads no tokens, so --seq has no effect." in data["notes"]


@pytest.mark.slow
def test_an_8b_model_is_reported_in_seconds_and_little_memory(tmp_path: Path) -> None:
    config = {**LLAMA_8B, "model_type": "llama", "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = (
        "import resource, sys; from memopt.cli.main import main; main(sys.argv[1:]);"
        "used = resource.getrusage(resource.RUSAGE_SELF); print(used.ru_utime, used.ru_maxrss)"
    )
    arguments = [sys.executable, "-c", code, "report", str(tmp_path), "--seq", "4096", "-v"]
    printed = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    seconds, kilobytes = map(float, printed.split()[-2:])
    assert "saved for backward: 26.6 GiB -> 11.6 GiB (-56 %)" in printed
    assert seconds < 20
    assert kilobytes < 1.5 * 2**20


def test_a_missing_model_is_one_sentence_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, data = run_json(capsys, tmp_path / "nowhere")
    assert code == 2
    assert data["status"] == "error"
    assert "does not exist" in data["error"]["message"]


def test_a_wrong_precision_is_a_usage_error(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(llama), "--precision", "int3"]) == 2
    assert "bf16-mixed" in capsys.readouterr().err


def test_the_help_does_not_import_torch() -> None:
    code = "import sys, memopt.cli.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("ask", [report_on, headline, plan_training])
def test_without_peft_a_report_for_lora_builds_nothing(
    ask: Callable[..., object], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "peft" else find(name, *a))
    monkeypatch.setattr("memopt.prediction.subject.build_meta", lambda config: pytest.fail("a model was built"))
    with pytest.raises(ModelError, match="needs peft"):
        ask(Request(llama, train="lora"))


def test_a_request_has_the_arguments_of_the_function_and_the_options_of_the_command() -> None:
    arguments, options = (inspect.signature(each).parameters for each in (report, command.report))
    for each in dataclasses.fields(Request):
        default = inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default
        assert (arguments[each.name].annotation, arguments[each.name].default) == (each.type, default)
        assert each.name in options
    assert arguments.keys() - {each.name for each in dataclasses.fields(Request)} == {"note", "of_fit"}


def test_fit_has_the_arguments_of_a_request_and_of_a_setup() -> None:
    arguments = inspect.signature(fit).parameters
    asked, setup = (dataclasses.fields(each) for each in (Request, Setup))
    for each in asked:
        default = inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default
        assert (arguments[each.name].annotation, arguments[each.name].default) == (each.type, default)
    known = {each.name: each.default for each in setup}
    others = arguments.keys() - {each.name for each in asked} - {"gpu", "longest"}
    assert {name: arguments[name].default for name in others} == {name: known[name] for name in others}


def test_a_report_that_is_asked_whether_it_fits_names_fit() -> None:
    with pytest.raises(UsageError, match="does not take gpu=") as raised:
        report("MODEL", gpu="24GiB")
    assert raised.value.hint == "Whether a step fits is answered by memopt.fit(model, gpu=...)."


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"checkpointing": True}, "checkpointing is True, which is not one of its values. Give one of none, full"),
        ({"train": "LoRA"}, "Give one of full, lora, qlora"),
        ({"precision": "bfloat16"}, "precision is 'bfloat16'"),
        ({"attention": "flash"}, "attention is 'flash'"),
        ({"optimizer": "adam"}, "optimizer is 'adam'"),
        ({"sharding": "fsdp2", "devices": 2}, "sharding is 'fsdp2'"),
        ({"batch": 0}, "batch is 0, and has to be a whole number"),
        ({"seq": 2.0}, "seq is 2.0, and"),
        ({"lora_rank": None}, "lora_rank is None, and"),
        ({"train": "qlora", "lora_dtype": "base"}, "'base' has no effect"),
        ({"lora_dropout": "0.1"}, "lora_dropout is '0.1', and"),
        ({"train": "lora", "freeze": "visual"}, "freeze has no effect"),
        ({"modules_to_save": "lm_head"}, "modules_to_save has no effect"),
        ({"use_dora": True}, "use_dora has no effect"),
        ({"accumulation": 0}, "micro-batches (0) have to be whole and positive"),
        ({"devices": 2.0, "sharding": "zero3"}, "Devices (2.0) and micro-batches (1) have to be whole and positive"),
        ({"precision": 16, "release_gradients": True}, "precision is 16"),
        ({"precision": "fp16", "release_gradients": True}, "Gradients cannot be released with fp16"),
    ],
    ids=str,
)
def test_a_value_that_an_argument_cannot_have_is_named(arguments: dict[str, Any], words: str) -> None:
    """A command line refuses these itself."""
    with pytest.raises(UsageError) as raised:
        fit("MODEL", **arguments)
    assert words in str(raised.value)


def test_targets_and_overrides_may_be_one_text() -> None:
    """As PEFT's `target_modules`; and numbers may be NumPy's."""
    assert Request("MODEL", batch=np.int64(2)).batch == 2
    assert Request("MODEL", overrides="loss.method=none").overrides == ("loss.method=none",)
    assert Request("MODEL", lora_targets="q_proj, v_proj").lora_targets == ("q_proj", "v_proj")
    assert Request("MODEL", freeze="visual, layers.[0-7]").training.frozen == ("visual", "layers.[0-7]")


@pytest.mark.slow
def test_the_longest_sequence_is_all_of_an_odd_number_of_positions(tmp_path: Path) -> None:
    config = named_config("llama")
    config.max_position_embeddings = 77
    config.save_pretrained(tmp_path)
    found = headline(Request(tmp_path), gpu="1GiB")
    assert str(found.patched.seq) == "77 or more"
