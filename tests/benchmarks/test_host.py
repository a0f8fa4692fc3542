"""The benchmark of host time: what it computes of its times, and that its stubs take the way of the kernels."""

import torch
from torch import nn

from benchmarks import host
from memopt.kernels.base.device import runs_triton
from memopt.kernels.norm import forward_triton

STOCK, OURS = (
    host.Variant("llama", "stock"),
    host.Variant("llama", "memopt", "yes", limit=1.1),
)


def times(*, ours: float) -> host.Times:
    few, many = host.LAYERS
    return {
        ("stock", few): (1.0, 2.0), ("stock", many): (1.0 + 20e-6, 2.0 + 60e-6),
        ("memopt", few): (1.0, 2.0), ("memopt", many): (1.0 + 20e-6, 2.0 + ours),
    }  # fmt: skip


def test_a_block_costs_what_more_layers_cost_more():
    forward, backward = host.per_block(times(ours=0), "stock")
    assert abs(forward - 1) < 1e-3
    assert abs(backward - 3) < 1e-3


def test_a_ratio_above_its_limit_is_missed():
    assert [row.passed for row in host._rows((STOCK, OURS), times(ours=60e-6))] == [True, True]
    assert [row.passed for row in host._rows((STOCK, OURS), times(ours=80e-6))] == [True, False]


def test_a_chosen_variant_brings_its_baseline():
    chosen = host._chosen("bert", ["memopt + checkpointing"])
    assert [variant.name for variant in chosen] == ["checkpointing", "memopt + checkpointing"]


def test_every_variant_runs_at_every_depth():
    class Linear(nn.Module):
        def __init__(self, layers: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))

        def forward(self, x):
            return type("Output", (), {"loss": self.layers(x).sum()})

    measured = host.measure((STOCK, OURS), 1, lambda variant, layers: (Linear(layers), {"x": torch.ones(1, 4)}))
    assert measured.keys() == {(name, layers) for name in ("stock", "memopt") for layers in host.LAYERS}
    assert all(seconds > 0 for pair in measured.values() for seconds in pair)


def test_stubbed_launches_give_the_shapes_of_the_stock_model_and_are_taken_back():
    stock = forward_triton.launch_forward
    variant = host.Variant("llama", "memopt", "yes")
    with host.launches_stubbed():
        assert runs_triton(torch.ones(2))
        model, batch = host.built(variant, 1)
        model(**batch).loss.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    assert forward_triton.launch_forward is stock
