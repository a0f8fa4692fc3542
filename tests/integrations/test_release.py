"""Gradients that are released: the optimizer steps each parameter in backward, and training stays the same."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Adafactor

import memopt
from memopt.errors import ModelError
from tests.factories import tiny_inputs, tiny_model
from tests.integrations.test_trainer import losses, trainer

Make = Callable[[Iterable[Any]], Optimizer]

#: Name -> an optimizer of parameters.
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
    "adamw, fused": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "adamw, foreach": lambda params: torch.optim.AdamW(params, lr=1e-3, foreach=True, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    "adafactor": lambda params: Adafactor(params, lr=1e-3, relative_step=False, scale_parameter=False),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-3),
}


class Shared(Optimizer):
    """Divides every gradient by the norm of all."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        those = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in those) ** 0.5
        for p in those:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])


def trained(model: nn.Module, optimizer: Optimizer, steps: int) -> list[float]:
    """Losses of some steps with a rate that falls, each on a batch of its own."""
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        inputs = tiny_inputs("llama", 2, 8)
        inputs["input_ids"] = torch.randint(3, 60, inputs["input_ids"].shape)
        loss = model(**{**inputs, "labels": inputs["input_ids"]}).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def pair(recipe: str | None = None) -> list[nn.Module]:
    torch.manual_seed(0)
    models = [tiny_model("llama").train()]
    models.append(copy.deepcopy(models[0]))
    for model in models:
        if recipe:
            memopt.patch(model, recipe)
    return list(models)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("recipe", [None, "exact-levels"])
@pytest.mark.rotates(3)
def test_training_is_the_same_to_the_bit(name: str, recipe: str | None) -> None:
    usual, released = pair(recipe)
    first, second = (OPTIMIZERS[name](model.parameters()) for model in (usual, released))
    memopt.release_gradients(second)
    steps = 30 if name == "adamw" else 10
    assert trained(usual, first, steps) == trained(released, second, steps)
    assert all(map(torch.equal, usual.state_dict().values(), released.state_dict().values()))
    mine, its = (optimizer.state_dict()["state"] for optimizer in (first, second))
    assert mine.keys() == its.keys()
    for number, state in mine.items():
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(its[number][name]))
            for name, value in state.items()
            if value is not None
        )


def test_gradients_of_one_parameter_at_a_time_are_there() -> None:
    (model, _) = pair()
    most = [0]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda given: most.append(sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))
        )
    memopt.release_gradients(torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = tiny_inputs("llama", 2, 8)
    model(**{**inputs, "labels": inputs["input_ids"]}).loss.backward()
    assert max(most) == max(p.nbytes for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_each_group_keeps_its_settings() -> None:
    ends = []
    for releases in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        groups: Any = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        if releases:
            memopt.release_gradients(optimizer)
        for _ in range(3):
            model(torch.ones(3, 4)).square().sum().mul(0.01).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *ends))


def test_a_second_backward_before_the_step_is_an_error() -> None:
    model = nn.Linear(4, 2)
    memopt.release_gradients(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(3, 4)).sum().backward()
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="gradients are not accumulated and steps are not skipped"):
        model(torch.ones(3, 4)).sum().backward()
    assert torch.equal(model.weight, before)


def test_a_second_optimizer_takes_the_place_of_the_first() -> None:
    model = nn.Linear(4, 2)
    memopt.release_gradients(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = model.weight.detach().clone()
    memopt.release_gradients(optimizer)
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_training_goes_on_after_an_error_in_backward(tmp_path: Path) -> None:
    model, calls = tiny_model("llama"), []

    def fail_once(gradient: Tensor) -> None:
        calls.append(gradient)
        if len(calls) == 2:
            raise RuntimeError("CUDA out of memory.")

    model.model.layers[0].mlp.down_proj.weight.register_hook(fail_once)
    run = trainer(tmp_path, model, memopt.TrainerCallback(release_gradients=True), max_grad_norm=0.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        run.train()
    with pytest.warns(UserWarning, match=r"no optimizer.step\(\) followed has stepped \d+ of \d+ parameters"):
        assert len(losses(run)) > 1


def test_an_optimizer_that_accelerate_has_wrapped() -> None:
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    memopt.release_gradients(Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), lr=0.1)))
    model(torch.ones(3, 4)).sum().backward()
    assert not torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_removing_it_gives_the_usual_order_back() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memopt.release_gradients(optimizer).remove()
    before = model.weight.detach().clone()
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
    assert torch.equal(model.weight, before)
    optimizer.step()
    assert torch.equal(model.weight, before.add(torch.full_like(before, 6.0), alpha=-0.1))


def unreadable(params: Iterable[Tensor]) -> Optimizer:
    class Unreadable(torch.optim.SGD):
        def __init__(self, params: Any, secret: Any = None) -> None:
            super().__init__(params, lr=0.1)
            if secret is None:
                raise ValueError("there is no secret")

    return Unreadable(params, secret=1)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda params: Shared(params, lr=0.1), "depends on others"),
        (lambda params: torch.optim.LBFGS(params, lr=0.1), "could not be tried"),
        (unreadable, "could not be tried whether Unreadable steps parameters apart: there is no secret"),
    ],
)
def test_an_optimizer_that_cannot_step_apart_is_refused(make: Make, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        memopt.release_gradients(make(nn.Linear(4, 2).parameters()))


def test_gradients_that_are_there_are_refused() -> None:
    model = nn.Linear(4, 2)
    model(torch.ones(3, 4)).sum().backward()
    with pytest.raises(ModelError, match="There are gradients already"):
        memopt.release_gradients(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_trainer_takes_the_same_steps(tmp_path: Path) -> None:
    runs = []
    for releases in (False, True):
        torch.manual_seed(0)
        model = tiny_model("llama")
        run = trainer(tmp_path, model, memopt.TrainerCallback(release_gradients=releases), max_grad_norm=0.0)
        runs.append((losses(run), model.state_dict()))
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1].values(), runs[1][1].values()))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "max_grad_norm=1.0 (use max_grad_norm=0)"),
        ({"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps (use larger batches)"),
    ],
)
def test_a_trainer_that_needs_all_gradients_is_refused(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    run = trainer(tmp_path, tiny_model("llama"), memopt.TrainerCallback(release_gradients=True), **settings)
    with pytest.raises(ModelError, match=re.escape(f"release_gradients=True does not go together with {why}.")):
        run.train()


def test_scaling_of_losses_does_not_pass_in_silence() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memopt.release_gradients(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(3, 4)).sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)
