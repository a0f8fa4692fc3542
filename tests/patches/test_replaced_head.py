"""A head that another module replaced after the patch: a resized vocabulary, a new head."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_outputs import BaseModelOutput

import memopt
from tests.factories import tiny_inputs, tiny_model


class Doubled(nn.Linear):
    """No plain linear."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def resized(model: nn.Module) -> None:
    torch.manual_seed(1)
    model.resize_token_embeddings(model.config.vocab_size + 7, mean_resizing=False)  # type: ignore[operator, union-attr]


def new_head(model: nn.Module) -> None:
    torch.manual_seed(1)
    model.set_output_embeddings(nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False))  # type: ignore[operator, union-attr, arg-type]


def own_head(model: nn.Module) -> None:
    torch.manual_seed(1)
    model.lm_head = Doubled(model.config.hidden_size, model.config.vocab_size)  # type: ignore[union-attr, arg-type]


def saved_logits(model: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Whether a step saves a tensor of the size of the logits; leaves the gradients."""
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.numel())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    loss.backward()
    rows = batch["input_ids"].numel()
    classes = model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
    return any(number in (rows * classes, (rows - len(batch["input_ids"])) * classes) for number in seen)


@pytest.mark.parametrize(
    ("change", "adopted"), [(resized, True), (new_head, True), (own_head, False)], ids=["resized", "new", "own"]
)
def test_a_replaced_head_is_patched_at_the_next_step_or_named(
    change: Callable[[nn.Module], None], adopted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stock = tiny_model("llama", tie_word_embeddings=False)
    batch = {name: value % 40 for name, value in tiny_inputs("llama", 2, 8).items()}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    patched = memopt.patch(copy.deepcopy(stock), "exact-unfolded")
    for model in (stock, patched):
        change(model)
    assert "lm_head was replaced since the patch, so its logits are whole" in str(memopt.summary(patched))
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="memopt"):
        assert saved_logits(stock, batch)
        assert saved_logits(patched, batch) is not adopted
    said = [record.getMessage() for record in caplog.records]
    assert any("lm_head was replaced since the patch" in each for each in said) is not adopted
    assert ("lm_head was replaced" in str(memopt.summary(patched))) is not adopted
    for one, other in zip(stock.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6)
    memopt.unpatch(patched)
    assert type(patched.get_output_embeddings()) is type(stock.get_output_embeddings())


def test_a_head_that_is_replaced_between_two_steps_is_patched_at_the_second() -> None:
    model = memopt.patch(tiny_model("llama", tie_word_embeddings=False), "exact-unfolded")
    batch = tiny_inputs("llama", 2, 8)
    assert not saved_logits(model, batch)
    new_head(model)
    assert not saved_logits(model, batch)


CHUNKED = ("loss.method=chunked",)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [("int8", CHUNKED), ("mesa", CHUNKED), ("exact-levels", ()), ("exact-unfolded", ("ignore=['*layers.0*']",))],
    ids=["int8", "mesa", "levels", "first block ignored"],
)
def test_a_head_is_looked_at_under_every_recipe(recipe: str, settings: tuple[str, ...]) -> None:
    model = tiny_model("llama", tie_word_embeddings=False).train()
    memopt.patch(model, memopt.load_recipe(recipe, settings))
    new_head(model)
    model(**tiny_inputs("llama", 2, 8)).loss.backward()
    assert "lm_head was replaced" not in str(memopt.summary(model))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_head_is_looked_at_under_checkpointing_of_the_model_in_any_step(*, reentrant: bool) -> None:
    model = memopt.patch(tiny_model("llama", tie_word_embeddings=False).train(), "exact-unfolded")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})  # type: ignore[operator]
    for _ in range(2):
        new_head(model)
        model(**tiny_inputs("llama", 2, 8)).loss.backward()
        assert "lm_head was replaced" not in str(memopt.summary(model))


def test_a_head_is_looked_at_where_the_first_stack_of_blocks_does_not_run() -> None:
    model = memopt.patch(tiny_model("t5", tie_word_embeddings=False).train(), "exact-unfolded")
    new_head(model)
    encoded = BaseModelOutput(torch.randn(2, 8, model.config.d_model))  # type: ignore[union-attr, arg-type]
    model(encoder_outputs=encoded, labels=tiny_inputs("t5", 2, 8)["labels"]).loss.backward()
    assert "lm_head was replaced" not in str(memopt.summary(model))


class Distilled(nn.Module):
    """Calls the parts of its student, beside a teacher that is patched too."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("teacher", "student"):
            model = tiny_model("llama", tie_word_embeddings=False).train()
            self.add_module(name, memopt.patch(model, "exact-unfolded"))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.student.model(input_ids=input_ids).last_hidden_state  # type: ignore[union-attr, operator]
        logits = self.student.lm_head(hidden)  # type: ignore[union-attr, operator]
        return nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())


def test_a_head_of_the_student_is_looked_at_beside_a_patched_teacher() -> None:
    both = Distilled()
    new_head(both.student)  # type: ignore[arg-type]
    both(tiny_inputs("llama", 2, 8)["input_ids"]).backward()
    assert "lm_head was replaced" not in str(memopt.summary(both.student))  # type: ignore[arg-type]
