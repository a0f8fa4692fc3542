"""Which gated MLPs may run as one operator: those whose forward is the formula and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt
from memopt.walk.probes.gated import with_form
from memopt.walk.sites import GatedMLPSite


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) with room for one change."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.act = nn.SiLU()

    def product(self, x):
        return self.act(self.gate(x)) * self.up(x)

    def forward(self, x):
        return self.down(self.product(x))


class Fused(nn.Module):
    def __init__(self, gate_first=True):
        super().__init__()
        self.gate_up, self.down = nn.Linear(16, 48), nn.Linear(24, 16)
        self.gate_first = gate_first

    def forward(self, x):
        first, second = self.gate_up(x).chunk(2, dim=-1)
        gate, up = (first, second) if self.gate_first else (second, first)
        return self.down(F.silu(gate) * up)


SEPARATE = GatedMLPSite("", "silu", "gate.weight", "up.weight", "down.weight")
FUSED = GatedMLPSite("", "silu", "gate_up.weight", "gate_up.weight", "down.weight")


def test_the_plain_formula_is_recognised():
    assert with_form(GatedMLP(), SEPARATE).form == "separate"


@pytest.mark.parametrize(("gate_first", "form"), [(True, "gate_up"), (False, "up_gate")])
def test_the_order_of_the_halves_of_a_fused_linear_is_found(gate_first, form):
    assert with_form(Fused(gate_first), FUSED).form == form


def test_a_model_on_the_meta_device_is_enough():
    assert with_form(GatedMLP().to("meta"), SEPARATE).form == "separate"


def test_another_activation_than_the_site_says_is_refused():
    mlp = GatedMLP()
    mlp.act = nn.GELU()
    assert with_form(mlp, SEPARATE).form is None


def changed(change):
    """A gated MLP whose forward is `change` of the parts."""

    class Changed(GatedMLP):
        def forward(self, x):
            return change(self, x)

    return Changed()


def test_a_dropout_on_the_product_is_found_and_named():
    mlp = changed(lambda m, x: m.down(m.drop(m.product(x))))
    mlp.drop = nn.Dropout(0.0)
    site = with_form(mlp, SEPARATE)
    assert (site.form, site.between) == ("separate", "drop")


REFUSED = {
    "a limit far out": lambda m, x: m.down(m.act(m.gate(x).clamp(max=20)) * m.up(x)),
    "a scale": lambda m, x: m.down(1.001 * m.product(x)),
    "a residual": lambda m, x: m.down(m.product(x)) + x,
    "the activation on up": lambda m, x: m.down(m.gate(x) * m.act(m.up(x))),
    "a shifted up": lambda m, x: m.down(m.act(m.gate(x)) * (m.up(x) + 1)),
    "noise in train mode": lambda m, x: m.down(F.dropout(m.product(x), 0.1, m.training)),
    "two outputs": lambda m, x: (m.down(m.product(x)), x),
    "a second input": lambda m, x, mask: m.down(m.product(x) * mask),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_forward_that_does_anything_else_is_refused(name):
    assert with_form(changed(REFUSED[name]), SEPARATE).form is None


@pytest.mark.parametrize("what", ["parameter", "buffer", "second dropout", "norm"])
def test_a_module_with_anything_beside_its_linears_is_refused(what):
    mlp = GatedMLP()
    if what == "parameter":
        mlp.scale = nn.Parameter(torch.ones(1))
    elif what == "buffer":
        mlp.register_buffer("scale", torch.ones(1))
    elif what == "norm":
        mlp.norm = nn.LayerNorm(24)
    else:
        mlp.drop, mlp.drop_too = nn.Dropout(0.1), nn.Dropout(0.1)
    assert with_form(mlp, SEPARATE).form is None


def test_a_dropout_somewhere_else_than_on_the_product_is_refused():
    mlp = changed(lambda m, x: m.down(m.product(m.drop(x))))
    mlp.drop = nn.Dropout(0.0)
    assert with_form(mlp, SEPARATE).form is None


def test_the_module_itself_is_not_run_and_not_changed():
    mlp = GatedMLP()
    before = {name: p.clone() for name, p in mlp.named_parameters()}
    calls = []
    mlp.gate.register_forward_hook(lambda *_: calls.append(1))
    mlp.register_forward_hook(lambda *_: calls.append(1))
    with_form(mlp, SEPARATE)
    assert not calls
    assert all(torch.equal(before[name], p) for name, p in mlp.named_parameters())
    assert isinstance(mlp.gate, nn.Linear)
    assert mlp.gate.weight.shape == (24, 16)


def test_a_limit_that_only_holds_in_16_bits_is_refused():
    def limited(m, x):
        h = m.product(x)
        return m.down(h.clamp(-10, 10) if h.dtype == torch.float16 else h)

    assert with_form(changed(limited), SEPARATE).form is None


class UpTwice(nn.Module):
    """Its up projection is its down projection too."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.up(F.silu(self.gate(x)) * self.up(x))


def test_a_linear_that_runs_twice_is_no_obstacle():
    model, x = nn.Sequential(UpTwice()), torch.randn(2, 3, 8)
    stock = copy.deepcopy(model)
    memopt.patch(model, inputs={"input": x})
    for each in (stock, model):
        each(x).square().sum().backward()
    torch.testing.assert_close(model[0].up.weight.grad, stock[0].up.weight.grad)
