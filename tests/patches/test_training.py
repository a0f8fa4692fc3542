"""A patched model trains as the stock model does: the drift of their losses is that of rounding."""

from __future__ import annotations

import functools
import pydoc_data.topics

import pytest
import torch

import memopt
from tests.factories import tiny_model

STEPS = 60
BATCH, LENGTH = 4, 24
#: The maximum of three perturbed runs is a noisy bound, hence the factor.
FACTOR = 3


def batches() -> list[torch.Tensor]:
    """Byte-level English text."""
    text = "".join(topic for _, topic in sorted(pydoc_data.topics.topics.items())).encode("ascii", "ignore")
    ids = torch.frombuffer(bytearray(text[: STEPS * BATCH * LENGTH]), dtype=torch.uint8).long()
    return list(ids.view(STEPS, BATCH, LENGTH))


def train(model: torch.nn.Module) -> torch.Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for ids in batches():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def perturbed_by_an_ulp(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            towards = torch.where(torch.rand(parameter.shape, generator=generator) < 0.5, -torch.inf, torch.inf)
            moved = torch.nextafter(parameter, towards)
            parameter.copy_(torch.where(torch.rand(parameter.shape, generator=generator) < 0.5, moved, parameter))
    return model


def make(name: str) -> torch.nn.Module:
    return tiny_model(name, vocab_size=256)


@functools.cache
def stock_and_envelope(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of the stock model, and how far those of perturbed ones are from them."""
    stock = train(make(name))
    return stock, max((train(perturbed_by_an_ulp(make(name), seed)) - stock).abs().max() for seed in range(3))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sixty_steps_drift_no_more_than_a_perturbation_by_one_ulp(name):
    stock, envelope = stock_and_envelope(name)
    assert stock[-5:].mean() < stock[:5].mean() - 0.5, "the run learns nothing, so it shows nothing"
    assert envelope > 0
    drift = (train(memopt.patch(make(name))) - stock).abs().max()
    assert drift <= FACTOR * envelope


def test_a_wrong_norm_gradient_would_be_seen(monkeypatch):
    import memopt.kernels.norm.ops as kernel

    right = kernel.norm_backward

    def without_the_projection(*given):
        dx, dweight, dbias = right(*given)
        return dx * 1.001, dweight, dbias

    stock, envelope = stock_and_envelope("llama")
    monkeypatch.setattr(kernel, "norm_backward", without_the_projection)
    drift = (train(memopt.patch(make("llama"))) - stock).abs().max()
    assert drift > FACTOR * envelope
