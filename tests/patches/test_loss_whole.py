"""Heads that step aside: the logits of a training step are then whole, which a warning and the summary say."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import memopt
from tests.factories import tiny_inputs, tiny_model


def _hooked(head: nn.Module) -> None:
    head.register_forward_hook(lambda module, given, output: output)


def _replaced(head: nn.Module) -> None:
    head.forward = functools.partial(type(head).forward, head)


def _parametrized(head: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(head)


def _given_a_name(head: nn.Module) -> None:
    head.register_forward_pre_hook(lambda module, args, kwargs: ((), {"input": args[0]}), with_kwargs=True)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_hooked, "hooks"),
        (_replaced, "replaced"),
        (_parametrized, "replaced"),
        (_given_a_name, "something else than one tensor"),
    ],
)
def test_a_loss_that_is_whole_says_so_once_and_in_the_summary(change: Callable[[nn.Module], None], why: str) -> None:
    model, inputs = memopt.patch(tiny_model("llama").train()), tiny_inputs("llama", 2, 16)
    change(model.lm_head)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            model(**inputs)
        model.eval().generate(inputs["input_ids"][:1, :4], max_new_tokens=2)
    assert "whole" not in str(memopt.summary(model))
    with pytest.warns(UserWarning, match=f"computed whole, since .*{why}") as found:
        model.train()(**inputs).loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**inputs).loss.backward()
    assert sum("computed whole" in str(each.message) for each in found) == 1
    assert "logits of lm_head were computed whole, since" in str(memopt.summary(model))


def test_the_error_of_a_head_that_got_adapters_after_the_patch_says_to_patch_again() -> None:
    model = memopt.patch(tiny_model("llama").train())
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "lm_head"]))
    with pytest.warns(UserWarning, match=r"adapters were added to the head after the patch: patch again"):
        adapted(**tiny_inputs("llama", 2, 16)).loss.backward()


class Tagger(nn.Module):
    """Its own loss reads the scores of all tags at once, as a CRF does."""

    def __init__(self, tags: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, tags)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(ids))
        best = logits.cumsum(1).logsumexp(-1).mean()
        return {"loss": best - logits.gather(-1, labels[..., None]).mean(), "logits": logits}


@pytest.mark.parametrize(("tags", "warned"), [(5, 0), (40, 1)])
def test_a_head_with_fewer_classes_than_inputs_has_nothing_to_save(tags: int, warned: int) -> None:
    ids = torch.randint(0, 50, (2, 9))
    labels = ids % tags
    model = memopt.patch(Tagger(tags), inputs={"ids": ids, "labels": labels})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(ids, labels)["loss"].backward()
    assert sum("computed whole" in str(each.message) for each in found) == warned
