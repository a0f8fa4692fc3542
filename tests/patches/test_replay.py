"""Norms without a formula of ours: patched, they compute the same and keep their inputs only."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt.kernels.replay import function as replay_function
from memopt.patches.replay import patch_replay
from memopt.patches.swap import is_swapped, unswap
from memopt.walk.sites import NormSite


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)
        self.act = nn.SiLU()

    def forward(self, x, scale=1.0, *, gate=None):
        z = x.float()
        z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (scale * self.weight * z * self.act(gate.float())).to(x.dtype)


def site(kind="gated", bias=None, by_rows=False):
    return NormSite("", kind, 8, 0.0, "weight", bias, 0, "after", by_rows=by_rows)


def pair(module, kind="gated", bias=None, folded=False):
    stock = copy.deepcopy(module)
    patch_replay(module, site(kind, bias), folded=folded)
    return stock, module


def gradients(module, *args, **kwargs):
    y = module(*args, **kwargs)
    inputs = [t for t in (*args, *kwargs.values(), *module.parameters()) if isinstance(t, torch.Tensor)]
    return y, torch.autograd.grad(y.square().sum(), inputs)


def test_a_gated_norm_computes_what_it_did_whatever_way_its_tensors_come():
    torch.manual_seed(0)
    stock, patched = pair(Gated())
    x, gate = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    (y, of_stock), (z, of_patched) = (gradients(m, x, 2.0, gate=gate) for m in (stock, patched))
    assert torch.equal(y, z)
    assert all(map(torch.equal, of_stock, of_patched))
    assert z.grad_fn.name() == "ReplayFunctionBackward"


class Holder:
    def __init__(self, gate):
        self.gate = gate


class Conditioned(Gated):
    """A norm that gets its gate inside another argument, as adaptive norms get (scale, shift)."""

    def forward(self, x, condition):
        while not isinstance(condition, torch.Tensor):
            is_sequence = isinstance(condition, (tuple, list))
            condition = condition[0] if is_sequence else getattr(condition, "gate", None) or condition["gate"]
        return super().forward(x, gate=condition)


INSIDE = {
    "a tuple": lambda gate: (gate, 1),
    "a list": lambda gate: [gate],
    "a dictionary": lambda gate: {"gate": (gate,)},
    "tuples": lambda gate: ((gate,),),
    "an object": lambda gate: Holder([gate]),
}


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("where", INSIDE)
def test_a_tensor_inside_an_argument_gets_its_gradient(where, by_name):
    torch.manual_seed(0)
    stock, patched = pair(Conditioned())
    x, gate = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    given = INSIDE[where](gate)
    found = []
    for module in (stock, patched):
        y = module(x, condition=given) if by_name else module(x, given)
        found.append((y, *torch.autograd.grad(y.square().sum(), (x, gate, *module.parameters()))))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("shape", [(50, 8), (1, 50, 8), (5, 10, 8), (2, 25, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_large_inputs_run_by_pieces(shape, dtype, monkeypatch):
    """Values may differ by a rounding: the ends of vectors are computed by other instructions."""
    monkeypatch.setattr(replay_function, "LEAST", 100)
    sizes = []

    class Counted(Gated):
        def forward(self, x, gate):
            sizes.append(x.numel())
            return super().forward(x, gate=gate)

    torch.manual_seed(0)
    module = Counted().to(dtype)
    stock, patched = copy.deepcopy(module), module
    patch_replay(patched, site(by_rows=True))
    both = torch.randn(*shape[:-1], 16, dtype=dtype, requires_grad=True)
    x, gate = both.chunk(2, -1)  # not contiguous, as parts of one projection are
    (y, of_stock), (z, of_patched) = (gradients(each, x, gate) for each in (stock, patched))
    assert z._version == 0  # a reader may recompute it
    assert sizes[0] == x.numel() > 2 * max(sizes[1:])
    assert sum(sizes) == 3 * x.numel()
    eps = 4 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # the module computes in fp32
    for one, other in zip((y, *of_stock), (z, *of_patched), strict=True):
        assert (one - other).abs().max() <= eps * one.abs().max()


def test_pieces_are_for_inputs_of_one_shape_and_single_gradients(monkeypatch):
    monkeypatch.setattr(replay_function, "LEAST", 100)
    torch.manual_seed(0)
    stock = Gated()
    patched = copy.deepcopy(stock)
    patch_replay(patched, site(by_rows=True))
    x, gate, wide = (torch.randn(50, width, requires_grad=True) for width in (8, 8, 1))
    (y, of_stock), (z, of_patched) = (gradients(each, x, gate=wide) for each in (stock, patched))
    assert torch.equal(y, z)
    assert all(map(torch.equal, of_stock, of_patched))
    several = torch.randn(3, 50, 8)
    found = [
        torch.autograd.grad(each(x, gate=gate), (x, gate), several, is_grads_batched=True) for each in (stock, patched)
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_channels_in_dimension_1():
    torch.manual_seed(0)
    stock, patched = pair(nn.GroupNorm(2, 8), "channels", "bias")
    x = torch.randn(3, 8, 5, requires_grad=True)
    (y, of_stock), (z, of_patched) = gradients(stock, x), gradients(patched, x)
    assert torch.equal(y, z)
    assert all(map(torch.equal, of_stock, of_patched))


def test_nothing_of_the_graph_is_held_by_what_runs_again():
    _, patched = pair(Gated())
    x, gate = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    node = patched(x * 1, gate=gate * 1).grad_fn
    run, *more = node.recomputed.function.args
    held = [*run.args, *run.keywords.values(), *more]
    flat = [item for value in held for item in (value if isinstance(value, (list, tuple, dict)) else [value])]
    assert not any(isinstance(item, torch.Tensor) for item in flat)


def test_it_steps_aside_where_a_child_is_watched_and_without_gradients():
    _, patched = pair(Gated())
    x, gate = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    with torch.no_grad():
        assert patched(x, gate=gate).grad_fn is None
    patched.act.register_forward_hook(lambda *_: None)
    assert patched(x, gate=gate).grad_fn.name() != "ReplayFunctionBackward"


@pytest.mark.parametrize("identity", [True, False])
def test_the_affine_of_a_folded_norm_becomes_a_buffer_if_it_is_the_identity(identity):
    module = Gated()
    if identity:
        nn.init.ones_(module.weight)
    stock, patched = pair(module, folded=True)
    assert ("weight" in dict(patched.named_buffers())) == identity
    assert list(patched.state_dict()) == list(stock.state_dict())
    x, gate = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    assert torch.equal(stock(x, gate=gate), patched(x, gate=gate))
    unswap(patched)
    assert not is_swapped(patched)
    assert isinstance(patched.weight, nn.Parameter)


def test_a_module_that_cannot_be_patched_is_left_as_it_was():
    module = Gated()
    nn.init.ones_(module.weight)
    module.forward = F.silu
    with pytest.raises(ValueError, match="replaced on the instance"):
        patch_replay(module, site(), folded=True)
    assert isinstance(module.weight, nn.Parameter)


TRAINED = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))


def trained_scan(x: Tensor) -> Tensor:
    return ((x * TRAINED).exp().sin().exp() * TRAINED).tanh()


class ReadsTrained(nn.Module):
    """Reads a trained tensor that is none of its parameters, directly or in a function of its own code."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.closure = place, lambda: TRAINED

    def forward(self, x: Tensor) -> Tensor:
        if self.place == "activation":
            return torch.tanh(torch.exp(x * 0.1) * TRAINED.to(x.dtype))
        if self.place == "closure":
            return torch.tanh(torch.exp(x * 0.1) * self.closure().to(x.dtype))
        if self.place == "norm":
            return F.rms_norm(x, x.shape[-1:]) * TRAINED.to(x.dtype)
        return trained_scan(x)


@pytest.mark.parametrize("recipe", ["exact-unfolded", "exact-levels"])
@pytest.mark.parametrize("place", ["activation", "closure", "norm", "function"])
def test_a_trained_tensor_that_is_no_parameter_of_the_module_gets_its_gradient(place: str, recipe: str) -> None:
    blocks = [
        nn.Sequential(nn.Linear(8, 8), ReadsTrained(place), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        for _ in range(3)
    ]
    model = nn.Sequential(*blocks).double().train()
    x, found = torch.randn(2, 5, 8, dtype=torch.float64), []
    for patches in (False, True):
        if patches:
            memopt.patch(model, recipe=recipe, inputs={"input": x})
        TRAINED.grad = None
        model(x).sin().sum().backward()
        found.append(TRAINED.grad)
    torch.testing.assert_close(found[1], found[0])
