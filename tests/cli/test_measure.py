"""`memopt report --measure`, and options that a plan or a measurement leaves out of account."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.cli.main import main
from memopt.prediction import measure
from memopt.prediction.setup import Optimizer
from tests.trace.builders import named_config


@pytest.fixture
def optimizers(monkeypatch: pytest.MonkeyPatch) -> set[Optimizer]:
    """The optimizers of the real steps, which run in this process."""
    found: set[Optimizer] = set()

    def make_optimizer(trained: Any, setup: Any, **options: Any) -> Any:
        found.add(setup.optimizer)
        return make(trained, setup, **options)

    make = measure.make_optimizer
    monkeypatch.setattr(measure, "make_optimizer", make_optimizer)
    monkeypatch.setattr(measure, "_apart", measure._measured)
    return found


def test_measured_steps_have_the_optimizer_that_is_asked_for(
    optimizers: set[Optimizer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named_config("llama").save_pretrained(tmp_path)
    step = ["report", str(tmp_path), "--measure", "--optimizer", "sgd", "--seq", "16", "--precision", "fp32"]
    assert main([*step, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["training"].endswith("sgd")
    assert set(document["measured"]) == {"stock", "exact-unfolded"}
    for each in document["measured"].values():
        assert each["predicted"] == pytest.approx(each["measured"]["allocated"], rel=5e-3)
    assert optimizers == {"sgd"}


@pytest.mark.parametrize("option", ["--html=x", "--snapshot=x", "--gpu=t4", "-v", "--devices=2"])
def test_a_measurement_refuses_what_it_leaves_out(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "MODEL", "--measure", option]) == 2
    assert "error: --measure and --" in (error := capsys.readouterr().err)
    assert "cannot go together" in error


@pytest.mark.parametrize("mode", ["--budget=24GiB", "--frontier"])
@pytest.mark.parametrize("option", ["--measure", "-v", "--checkpointing=full"])
def test_a_plan_refuses_what_it_leaves_out(mode: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "MODEL", mode, option]) == 2
    assert f"error: {mode.partition('=')[0]} and --" in (error := capsys.readouterr().err)
    assert "cannot go together" in error


def test_an_optimizer_that_is_a_formula_is_refused_before_any_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "MODEL", "--measure", "--optimizer", "adamw8bit"]) == 2
    assert "predicted, not measured. Leave --measure out." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--release-gradients", "--budget", "24GiB", "--out", "x", "--emit", "trainer"], "cannot go together"),
        (["--devices", "2"], "With 2 devices sharding has to say what they share. Add it, e.g. fsdp."),
        (["--sharding", "fsdp"], "Sharding 'fsdp' needs more than one device. Add devices, e.g. 8."),
        (["--train", "lora", "--lora-targets", ","], "--lora-targets names no linear. Give names, or all-linear."),
    ],
)
def test_what_says_only_half_of_a_setup_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "MODEL", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("batch", "seq", "option"), [(10**14, 16, "--batch"), (5 * 10**6, 16, "--batch"), (1, 10**8, "--seq")]
)
def test_a_batch_that_cannot_be_made_is_named(
    batch: int, seq: int, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named_config("llama").save_pretrained(tmp_path)
    assert main(["report", str(tmp_path), "--batch", str(batch), "--seq", str(seq), "--gpu", "t4"]) == 2
    assert f"error: Batch {batch} x {seq} tokens is too large to trace here. Use a smaller {option}." in (
        capsys.readouterr().err
    )


@pytest.mark.rotates(4)
def test_a_script_that_measures_is_not_run_again(tmp_path: Path) -> None:
    """And an error of the other process is told in this one."""
    named_config("llama").save_pretrained(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        "import dataclasses\n"
        "from memopt.errors import ModelError\n"
        "from memopt.prediction.measure import measure\n"
        "from memopt.prediction.subject import step_of\n"
        "from memopt.trace.training import Request\n"
        f"of = step_of(Request({str(tmp_path)!r}, precision='fp32', seq=8)).stock\n"
        "print(measure(of).device)\n"
        "try:\n"
        "    measure(dataclasses.replace(of, training=None))\n"
        "except ModelError as error:\n"
        "    print(error.message)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    device, error = done.stdout.splitlines()
    assert device in ("cpu", torch.cuda.is_available() and torch.cuda.get_device_name())
    assert error.startswith("The steps could not be measured: AttributeError")
