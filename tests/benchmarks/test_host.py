"""The benchmark of host time: what it computes of its times, and that its stubs take the way of the kernels."""

import gc
import sys
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
import torch
from torch import nn

import memopt
from benchmarks import host
from memopt.kernels.base.device import runs_triton
from memopt.kernels.norm import forward_triton

STOCK, OURS = (
    host.Variant("llama", "stock"),
    host.Variant("llama", "memopt", "yes", limit=1.1),
)


def rounds(*ratios: float, baseline: float = 4e-6) -> list[host.Round]:
    """Rounds in which a patched block costs so many times the stock one, which differs from round to round."""
    stock = [baseline * (1 + number) for number in range(len(ratios))]
    return [
        {"stock": (base / 4, base * 3 / 4), "memopt": (base * ratio / 2, base * ratio / 2)}
        for base, ratio in zip(stock, ratios, strict=True)
    ]


def test_a_ratio_is_the_median_of_pairs_whatever_the_rounds_cost():
    """A median of each side's own times would be 0.62 here: the patched block's slow rounds are not stock's."""
    _, row = host.rows_of((STOCK, OURS), [rounds(1.0, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0)])
    assert row.ratio == 1.0
    assert row.quartiles == (0.75, 1.0)


def test_the_spread_is_that_of_the_processes_medians():
    processes = [rounds(1.0, 1.0, 1.0), rounds(1.2, 1.2, 3.0), rounds(1.1, 1.1, 1.1)]
    stock, row = host.rows_of((STOCK, OURS), processes)
    assert (stock.ratio, stock.spread) == (1.0, (1.0, 1.0))
    torch.testing.assert_close(row.ratio, 1.1)
    torch.testing.assert_close(row.spread, (1.0, 1.2))


def test_forward_and_backward_are_distinguished():
    stock, _ = host.rows_of((STOCK, OURS), [rounds(1.0, 1.0, 1.0)])
    torch.testing.assert_close((stock.forward, stock.backward), (2.0, 6.0))


def test_a_median_above_its_limit_is_missed_and_an_outlier_is_not():
    assert [row.passed for row in host.rows_of((STOCK, OURS), [rounds(1.1, 1.1, 9.0)])] == [True, True]
    assert [row.passed for row in host.rows_of((STOCK, OURS), [rounds(1.2, 1.2, 1.0)])] == [True, False]


def test_a_check_fails_on_the_median(monkeypatch, capsys):
    monkeypatch.setattr(host, "_process", lambda options: rounds(1.2, 1.2, 1.0))
    chosen = ["host", "--check", "--kinds", "llama", "--variants", "memopt"]
    monkeypatch.setattr("sys.argv", chosen)
    assert host.main() == 1
    assert "above its limit: llama, memopt: 1.20, limit 1.1" in capsys.readouterr().err


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

    measured = host.measure((STOCK, OURS), 3, lambda variant, layers: (Linear(layers), {"x": torch.ones(1, 4)}))
    assert [found.keys() for found in measured] == [{"stock", "memopt"}] * 3
    assert gc.isenabled()


def test_the_order_turns_around_and_a_block_costs_what_more_layers_cost_more(monkeypatch):
    order = []

    def run(model, batch, autocast):
        order.append((model.name, model.layers))
        return 1.0 + model.layers * 2e-6, 2.0 + model.layers * 3e-6

    monkeypatch.setattr(host, "_run", run)
    measured = host.measure(
        (STOCK, OURS), 2, lambda variant, layers: (SimpleNamespace(**vars(variant), layers=layers), {})
    )
    few, many = host.LAYERS
    one_way = [("stock", few), ("stock", many), ("memopt", few), ("memopt", many)]
    assert order[8:] == one_way[2:] + one_way[:2] + one_way
    torch.testing.assert_close(measured[0]["memopt"], (2e-6, 3e-6))


def test_stubbed_launches_give_the_shapes_of_the_stock_model_and_are_taken_back():
    stock = forward_triton.launch_forward
    variant = host.Variant("llama", "memopt", "yes")
    with host.launches_stubbed():
        assert runs_triton(torch.ones(2))
        model, batch = host.built(variant, 1)
        model(**batch).loss.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    assert forward_triton.launch_forward is stock


@pytest.mark.parametrize(("kind", "most"), [("llama", 210), ("bert", 236)])
def test_a_patched_block_calls_few_python_functions(kind, most):
    """Forward and backward of one more block. Calls are counted because their number does not depend on the machine's
    load. A change that needs more of them costs host time at every step, and raises the limit on purpose."""
    variant = host.Variant(kind, "memopt", "yes")
    with host.launches_stubbed():
        few, many = (calls_of_a_step(*host.built(variant, layers)) for layers in (1, 2))
    assert 0 < many - few <= most


def calls_of_a_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """How many functions of memopt a step calls, once its blocks know whether they need a scope."""
    own, calls = str(Path(memopt.__file__).parent), 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(own)

    for _ in range(2):
        host._run(model, batch, False)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        host._run(model, batch, False)
    finally:
        sys.setprofile(before)
    return calls
