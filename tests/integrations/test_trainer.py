"""`memopt.TrainerCallback` under `transformers.Trainer`; TRL's trainers are in tests/train."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

import memopt
from memopt.errors import MemoptError, ModelError, NegativeVerdict
from memopt.integrations.once import Patching, run_of_axolotl
from memopt.patches.apply import is_patched
from memopt.prediction.setup import Run, Setup
from memopt.sampling import IndexedDataset
from tests.factories import tiny_inputs, tiny_model
from tests.support.processes import run_code

STEPS = 3


def samples(name: str) -> list[dict[str, Any]]:
    batch = tiny_inputs(name, 2 * STEPS, 12)
    return [{key: value[row] for key, value in batch.items()} for row in range(2 * STEPS)]


#: Arguments of a Trainer that logs every step and nothing else.
QUIET: dict[str, Any] = {
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "learning_rate": 1e-2,
}


def trainer(folder: Path, model: Any, *callbacks: Any, name: str = "llama", **settings: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        **{**QUIET, **settings},
        max_steps=STEPS,
        per_device_train_batch_size=2,
    )
    built = {"model": model} if isinstance(model, nn.Module) else {"model_init": model}
    data: Any = samples(name)
    return Trainer(args=arguments, train_dataset=data, eval_dataset=data[:2], callbacks=list(callbacks), **built)


def losses(run: Trainer) -> list[float]:
    run.train()
    return [row["loss"] for row in run.state.log_history if "loss" in row]


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"bf16": True}], ids=str)
def test_losses_are_those_of_patching_by_hand(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = tiny_model("llama")
    with_callback = losses(trainer(tmp_path, model, memopt.TrainerCallback(), **settings))
    assert is_patched(model)
    assert with_callback == losses(trainer(tmp_path, memopt.patch(tiny_model("llama")), **settings))
    stock = losses(trainer(tmp_path, tiny_model("llama"), **settings))
    assert with_callback == pytest.approx(stock, rel=1e-2 if "bf16" in settings else 1e-5)


class Generates(TrainerCallback):
    """Greedy tokens in the middle of training."""

    tokens: list[int]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.tokens = model.eval().generate(tiny_inputs("llama", 1, 6)["input_ids"], max_new_tokens=4)[0].tolist()
            model.train()


@pytest.mark.parametrize("recipe", [None, "exact-unfolded", "exact-levels"])
def test_a_run_that_evaluates_generates_and_is_resumed_has_the_losses_of_one_that_does_not(
    tmp_path: Path, recipe: str | None
) -> None:
    def run(folder: str, resume: str | None = None, *callbacks: Any, **settings: Any) -> list[float]:
        patching = [] if recipe is None else [memopt.TrainerCallback(recipe)]
        each = trainer(tmp_path / folder, tiny_model("llama"), *patching, *callbacks, **settings)
        each.train(resume_from_checkpoint=resume and str(tmp_path / resume))
        return [row["loss"] for row in each.state.log_history if "loss" in row]

    expected, generates = run("plain"), Generates()
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    assert run("whole", None, generates, **often) == expected
    assert run("resumed", "whole/checkpoint-2") == expected
    stock = Generates()
    trainer(tmp_path, tiny_model("llama"), stock).train()
    assert generates.tokens == stock.tokens


def test_early_stopping_gives_the_best_model_back_patched(tmp_path: Path) -> None:
    early = EarlyStoppingCallback(1, early_stopping_threshold=10.0)  # no step is so much better
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    run = trainer(tmp_path, tiny_model("llama"), memopt.TrainerCallback(), early, **settings, **best)
    run.train()
    assert run.state.global_step == 2
    assert is_patched(run.model)
    saved = load_file(f"{run.state.best_model_checkpoint}/model.safetensors")
    weights = dict(run.model.named_parameters())
    assert all(torch.equal(weights[name], each) for name, each in saved.items())
    assert run.evaluate()["eval_loss"] == pytest.approx(run.state.best_metric, rel=1e-6)


class Models:
    """A `model_init` that keeps what it built."""

    def __init__(self, wrap: Callable[..., Any] = lambda build: build) -> None:
        self.built: list[nn.Module] = []
        self.init = wrap(self._build)

    def _build(self) -> nn.Module:
        self.built.append(tiny_model("llama"))
        return self.built[-1]


def test_the_model_that_train_builds_by_model_init_is_patched_as_well(tmp_path: Path) -> None:
    models, callback = Models(), memopt.TrainerCallback()
    first = losses(trainer(tmp_path, models.init, callback))
    assert len(models.built) == 2
    assert all(map(is_patched, models.built))
    wrapped = Models(callback.model_init)
    assert losses(trainer(tmp_path, wrapped.init, callback)) == first
    assert all(map(is_patched, wrapped.built))
    assert first == losses(trainer(tmp_path, memopt.patch(tiny_model("llama"))))


def test_a_model_that_was_sharded_before_it_was_seen_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    class Sharding(TrainerCallback):
        def on_train_begin(self, *arguments: Any, model: nn.Module, **kwargs: Any) -> None:
            next(model.parameters()).ds_id = 0  # type: ignore[attr-defined]

    run = trainer(tmp_path, Models().init, Sharding(), memopt.TrainerCallback())
    with pytest.raises(ModelError, match=r"model_init=callback\.model_init"):
        run.train()


def test_a_model_that_is_patched_already_is_left_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = memopt.patch(tiny_model("llama"), "exact-levels")
    with caplog.at_level(logging.INFO, "memopt"):
        trainer(tmp_path, model, memopt.TrainerCallback())
    assert [record.getMessage() for record in caplog.records] == [
        "the model is already patched by recipe 'exact-levels'; it was not changed"
    ]
    assert memopt.summary(model).recipe == "exact-levels"


def test_a_model_in_which_nothing_can_be_patched_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    with pytest.raises(NegativeVerdict), pytest.warns(UserWarning, match="could observe little"):
        trainer(tmp_path, nn.Linear(4, 4), memopt.TrainerCallback())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"recipe": "exact-levls"}, "Did you mean 'exact-levels'"),
        ({"recipe": "exact"}, "folds norms into weights"),
        ({"budget": "24"}, "24"),
    ],
)
def test_what_no_model_can_change_is_an_error_before_there_is_a_trainer(given: dict[str, Any], said: str) -> None:
    with pytest.raises(MemoptError, match=said):
        memopt.TrainerCallback(**given)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [("exact-levels", "the recipe's choice of blocks holds"), ("exact-unfolded", "runs around memopt")],
)
def test_whose_checkpointing_applies_is_said_once(
    tmp_path: Path, recipe: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(tmp_path, tiny_model("llama"), memopt.TrainerCallback(recipe), gradient_checkpointing=True)
    with caplog.at_level(logging.WARNING, "memopt"):
        run.train()
        run.train()
    assert [said in record.getMessage() for record in caplog.records] == [True]


def test_a_plan_for_a_budget_takes_its_batch_from_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memopt.integrations import once

    given: dict[str, Any] = {}
    monkeypatch.setattr(once, "patch", lambda model, recipe, **kwargs: given.update(kwargs))
    trainer(tmp_path, tiny_model("llama"), memopt.TrainerCallback(budget="1GiB", seq=12))
    assert given == {"inputs": None, "budget": "1GiB", "batch": 2, "seq": 12, "run": Run()}


@pytest.mark.parametrize(
    ("settings", "run"),
    [
        ({"bf16": True}, Run(autocast="bf16")),
        ({"gradient_accumulation_steps": 4}, Run(Setup(accumulation=4))),
        ({"gradient_checkpointing": True}, Run(checkpointing=True)),
        ({"optim": "adafactor"}, Run(Setup("adafactor"))),
        ({"optim": "rmsprop"}, Run()),
    ],
)
def test_a_plan_for_a_budget_counts_the_arguments_of_the_trainer(
    tmp_path: Path,
    settings: dict[str, Any],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from memopt.integrations import once

    given: dict[str, Any] = {}
    monkeypatch.setattr(once, "patch", lambda model, recipe, **kwargs: given.update(kwargs))
    trainer(tmp_path, tiny_model("llama"), memopt.TrainerCallback(budget="1GiB", seq=12), **settings)
    assert given["run"] == run
    assert ("does not count optimizer rmsprop" in caplog.text) is ("rmsprop" in settings.values())


@pytest.mark.parametrize(
    ("settings", "sharding", "devices"),
    [({}, "none", 1), ({"world_size": 4}, "ddp", 4), ({"world_size": 4, "deepspeed": "zero3.json"}, "none", 1)],
)
def test_a_plan_counts_the_devices_of_axolotl(settings: dict[str, Any], sharding: str, devices: int) -> None:
    run = run_of_axolotl({"optimizer": "sgd", "gradient_accumulation_steps": 2, **settings})
    assert (run.setup.sharding, run.setup.devices, run.setup.accumulation) == (sharding, devices, 2)


def test_a_run_is_not_asked_for_where_nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Run:
        raise AssertionError

    Patching().patch_once(tiny_model("llama"), run=run)
    model = memopt.patch(tiny_model("llama"))
    Patching(budget="1GiB").patch_once(model, run=run)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_recipe_that_samples_remembers_gradients_of_numbered_samples(
    tmp_path: Path, indexed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    data: Any = samples("bert")
    with caplog.at_level(logging.INFO, "memopt"):
        callback = memopt.TrainerCallback("sampled", max_tokens=12)
        run = trainer(tmp_path, tiny_model("bert"), callback, name="bert")
        run.train_dataset = IndexedDataset(data) if indexed else data
        run.train()
    assert ("memory of gradients takes" in caplog.text) is indexed
    assert ("IndexedDataset(dataset)" in caplog.text) is not indexed


def test_liger_gets_no_module_that_memopt_patches_unless_it_was_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trainer(
        tmp_path,
        tiny_model("llama"),
        memopt.TrainerCallback(),
        use_liger_kernel=True,
        liger_kernel_config={"rope": False, "rms_norm": True},
    )
    config = run.args.liger_kernel_config
    assert config == {
        "rope": False,
        "rms_norm": True,
        **dict.fromkeys(("layer_norm", "swiglu", "geglu", "relu_squared"), False),
    }
    assert "left to Liger" in caplog.text


def test_importing_memopt_does_not_import_the_trainer() -> None:
    trainer, callback = "transformers.trainer", "transformers.trainer_callback"
    code = f"""
import sys
assert "transformers" in sys.modules and not {{{trainer!r}, {callback!r}}} & sys.modules.keys()
import memopt.sampling
assert {callback!r} not in sys.modules
memopt.patch, memopt.integrations
assert {trainer!r} not in sys.modules
"""
    ran = run_code(code)
    assert ran.code == 0, ran.err
