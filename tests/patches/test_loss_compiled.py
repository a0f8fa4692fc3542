"""Compiled functions that read the logits of a patched eager model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memopt
from tests.factories import tiny_inputs, tiny_model
from tests.support.plain_models import Bare, batch

READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": lambda y, t: F.cross_entropy(y[:, :-1].float().flatten(0, 1), t[:, 1:].flatten()),
    "entropy": lambda y, t: -(y.softmax(-1) * y.log_softmax(-1)).sum(-1).mean(),
    "log-probabilities": lambda y, t: -y.log_softmax(-1)[:, :-1].gather(-1, t[:, 1:, None]).mean(),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", READERS)
def test_a_compiled_loss_of_an_eager_model(name: str, backend: str) -> None:
    torch._dynamo.reset()
    read = torch.compile(READERS[name], backend=backend)
    ids = tiny_inputs("llama")["input_ids"]
    found = []
    for patches in (True, False):
        model = tiny_model("llama").train()
        if patches:
            memopt.patch(model)
        with warnings.catch_warnings():
            if name == "cross-entropy":
                warnings.filterwarnings(
                    "error", message=re.escape("memopt: the logits of this step are computed whole")
                )
            for _ in range(2):
                model.zero_grad()
                loss = read(model(input_ids=ids).logits, ids)
                loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm() + 1e-7


def test_a_trace_passes_its_check() -> None:
    # The check traces once more without gradients; names of Python variables are part of the graph.
    model = memopt.patch(Bare()).eval()
    torch.jit.trace(model, batch()[:1])
