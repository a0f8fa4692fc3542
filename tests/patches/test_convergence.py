"""Training with approximate activations follows the definition of the approximation, step by step.

The definition is written here once more, naively. Two runs of it, one of them with every weight moved by an ulp after
each step, say how far rounding alone drives trajectories apart; memopt's may be at most `MARGIN` times as far away. In
fp64 that is a sharp limit: each planted fault is beyond it by `DETECTED` times and more.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memopt
from memopt.kernels.derivative_codes import codes
from memopt.kernels.derivative_codes import function as coded
from memopt.kernels.derivative_codes.schemes import DerivativeCode
from memopt.kernels.quantize import quantize
from memopt.kernels.quantize.layout import Quantized
from memopt.kernels.quantize.quantize import dequantize
from memopt.patches.activation import module
from memopt.patches.compression import compressor as compression
from memopt.plan.recipe import Recipe, load_recipe
from memopt.trace.account import live_bytes

WIDTH, HEADS, HIDDEN, BATCH, TOKENS, STEPS = 16, 2, 32, 4, 8, 12
GROUP = 128
EPS = 1e-5
#: memopt rounds in another order inside of each step, the nudged run between two steps.
MARGIN = 2.0
DETECTED = 1e4
#: What training has to take away from the loss for a comparison to mean anything.
LEARNT = 0.3

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


# --- models ----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # No bias: that of the keys has no gradient but rounding, which Adam would blow up.
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.up(x)))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH, eps=EPS), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH, eps=EPS), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class MLPBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH, eps=EPS), MLP()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mlp(self.norm(x))
        return y


class Model(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def built(block: type[nn.Module], *, down_is_frozen: bool) -> Model:
    torch.manual_seed(0)
    model = Model(block).double()
    for layer in model.layers:
        nn.init.normal_(layer.mlp.up.weight, std=0.6)  # pre-activations of about 1, on both sides of all thresholds
        layer.mlp.down.requires_grad_(not down_is_frozen)
    return model


# --- the definition, naively -----------------------------------------------------------------------------------------

#: sum_i a_i [x > c_i]: ReGELU2 of arXiv 2406.16282.
REGELU2 = (
    (-0.04922261145617846, 1.0979632065417297, -0.048740595085551286),
    (-3.1858810036855245, -0.001178821281161997, 3.190832613414926),
)
Derivative = Callable[[Tensor], Tensor]


def published(z: Tensor) -> Tensor:
    total = torch.zeros_like(z)
    for slope, threshold in zip(*REGELU2, strict=True):
        total += slope * (z > threshold).double()
    return total


def steps_of(scheme: str) -> Derivative:
    code = codes.derivative_code("gelu_erf", scheme)

    def derivative(z: Tensor) -> Tensor:
        flat = [code.levels[sum(value > threshold for threshold in code.thresholds)] for value in z.flatten().tolist()]
        return torch.tensor(flat, dtype=z.dtype).view_as(z)

    return derivative


def nearest_of(scheme: str) -> Derivative:
    levels = torch.tensor(codes.derivative_code("gelu_erf", scheme).levels, dtype=torch.float64)

    def derivative(z: Tensor) -> Tensor:
        exact = 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        return levels[(exact.unsqueeze(-1) - levels).abs().argmin(-1)]

    return derivative


class NaiveActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, derivative: Derivative) -> Tensor:
        ctx.save_for_backward(z)
        ctx.derivative = derivative
        return F.gelu(z)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None]:
        return dh * ctx.derivative(ctx.saved_tensors[0]), None


class NaiveGELU(nn.Module):
    def __init__(self, derivative: Derivative) -> None:
        super().__init__()
        self.derivative = derivative

    def forward(self, z: Tensor) -> Tensor:
        h: Tensor = NaiveActivation.apply(z, self.derivative)
        return h


def kept_in_8_bits(tensor: Tensor) -> Tensor:
    """One group of 128 consecutive elements after another, rounded to the nearest."""
    flat = tensor.flatten()
    decoded = []
    for start in range(0, flat.numel(), GROUP):
        group = flat[start : start + GROUP]
        low, step = group.min(), (group.max() - group.min()) / 255
        decoded.append(low + torch.round((group - low) / step) * step)
    return torch.cat(decoded).view_as(tensor)


class NaiveBlock8Bit(torch.autograd.Function):
    """x + down(gelu(up(norm(x)))): x_hat and z are kept in 8 bits, and all else is made of these."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor
    ) -> Tensor:
        rstd = (x.var(-1, unbiased=False, keepdim=True) + EPS).rsqrt()
        x_hat = (x - x.mean(-1, keepdim=True)) * rstd
        z = (x_hat * gamma + beta) @ up.t() + up_bias
        ctx.save_for_backward(kept_in_8_bits(x_hat), rstd, kept_in_8_bits(z), gamma, beta, up, down)
        return x + F.gelu(z) @ down.t() + down_bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        x_hat, rstd, z, gamma, beta, up, down = ctx.saved_tensors
        slope = 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * torch.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        dz = (dy @ down) * slope
        dn = dz @ up
        d_hat = dn * gamma
        dx = rstd * (d_hat - d_hat.mean(-1, keepdim=True) - x_hat * (d_hat * x_hat).mean(-1, keepdim=True))
        rows = (0, 1)
        d_up = torch.einsum("bth,btw->hw", dz, x_hat * gamma + beta)
        d_down = torch.einsum("btw,bth->wh", dy, F.gelu(z))
        return dy + dx, (dn * x_hat).sum(rows), dn.sum(rows), d_up, dz.sum(rows), d_down, dy.sum(rows)


class Naive8BitModel(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embed, self.layers = model.embed, model.layers

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.layers:
            norm, mlp = block.norm, block.mlp
            x = NaiveBlock8Bit.apply(
                x, norm.weight, norm.bias, mlp.up.weight, mlp.up.bias, mlp.down.weight, mlp.down.bias
            )
        return x


# --- cases -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    recipe: Recipe
    block: type[nn.Module]
    naive: Callable[[Model], nn.Module]
    down_is_frozen: bool = False

    def models(self) -> tuple[Model, nn.Module]:
        """memopt's and the naive one, with the same weights."""
        stock = built(self.block, down_is_frozen=self.down_is_frozen)
        return memopt.patch(copy.deepcopy(stock), self.recipe, inputs={"x": _data()[0]}), self.naive(stock)


def _with(derivative: Derivative) -> Callable[[Model], nn.Module]:
    def exchanged(model: Model) -> nn.Module:
        for layer in model.layers:
            layer.mlp.act = NaiveGELU(derivative)
        return model

    return exchanged


EVERYWHERE = ("activations.where=all",)
CASES = {
    "published everywhere": Case(load_recipe("lowmemory-bp", EVERYWHERE), Block, _with(published)),
    "published where needed": Case(load_recipe("lowmemory-bp"), Block, _with(published), down_is_frozen=True),
    "2bit everywhere": Case(load_recipe("approx-2bit", EVERYWHERE), Block, _with(steps_of("2bit"))),
    "4bit everywhere": Case(load_recipe("approx-4bit", EVERYWHERE), Block, _with(nearest_of("4bit"))),
    "4bit where needed": Case(load_recipe("approx-4bit"), Block, _with(nearest_of("4bit")), down_is_frozen=True),
    "int8": Case(load_recipe("int8"), MLPBlock, Naive8BitModel),
}


@dataclasses.dataclass(frozen=True)
class Trajectory:
    losses: list[float]
    parameters: dict[str, Tensor]

    def distance(self, other: Trajectory) -> float:
        """Largest relative difference of a loss or of a final parameter tensor; NaN counts as infinite."""
        of_losses = [abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=True)]
        of_parameters = [
            float((mine - other.parameters[name]).norm() / other.parameters[name].norm())
            for name, mine in self.parameters.items()
        ]
        distances = [*of_losses, *of_parameters]
        return max(distances) if all(map(math.isfinite, distances)) else math.inf

    @property
    def learnt(self) -> float:
        return 1 - self.losses[-1] / self.losses[0]


def trained(model: nn.Module, optimizer: str, *, nudged: bool = False) -> Trajectory:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimize = OPTIMIZERS[optimizer](parameters)
    generator = torch.Generator().manual_seed(2)
    x, target = _data()
    losses = []
    for _ in range(STEPS):
        optimize.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimize.step()
        losses.append(float(loss.detach()))
        if nudged:
            _nudge(parameters, generator)
    return Trajectory(losses, {name: p.detach().clone() for name, p in model.named_parameters()})


def _nudge(parameters: list[nn.Parameter], generator: torch.Generator) -> None:
    """Move every weight by one ulp, up or down."""
    with torch.no_grad():
        for p in parameters:
            up = torch.rand(p.shape, generator=generator) < 0.5
            p.copy_(torch.nextafter(p, torch.where(up, math.inf, -math.inf).to(p.dtype)))


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    teacher = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
    return x, torch.tanh(x @ teacher) * 2


@functools.cache
def models(name: str) -> tuple[Model, nn.Module]:
    """memopt's and the naive one of a case, shared: copy them to train them."""
    return CASES[name].models()


@functools.cache
def defined(name: str, optimizer: str) -> tuple[Trajectory, float]:
    """The definition's trajectory, and the limit of the distance from it."""
    naive = models(name)[1]
    reference = trained(copy.deepcopy(naive), optimizer)
    return reference, MARGIN * trained(copy.deepcopy(naive), optimizer, nudged=True).distance(reference)


def compared(name: str, optimizer: str) -> tuple[Trajectory, float, float]:
    """memopt's trajectory, its distance from the definition, and the limit."""
    reference, limit = defined(name, optimizer)
    mine = trained(copy.deepcopy(models(name)[0]), optimizer)
    return mine, mine.distance(reference), limit


# --- tests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def to_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be drawn to round a quantised tensor is 1/2."""
    monkeypatch.setattr(quantize, "uniform", lambda index, seed: torch.full(index.shape, 0.5))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", CASES)
def test_training_follows_the_definition(name: str, optimizer: str) -> None:
    mine, distance, limit = compared(name, optimizer)
    assert limit < 1e-9  # rounding in fp64, grown over a few steps: a limit that means something
    assert distance <= limit
    assert mine.learnt >= LEARNT


@pytest.mark.parametrize("name", CASES)
def test_the_approximation_was_there(name: str) -> None:
    """Gradients are not the exact ones, and less is kept than stock modules keep."""
    case, (x, target) = CASES[name], _data()
    stock, (patched, _) = built(case.block, down_is_frozen=case.down_is_frozen), models(name)

    def gradient(model: nn.Module) -> Tensor:
        (found,) = torch.autograd.grad((model(x) - target).square().mean(), [model.embed.weight])
        return found

    exact, approximate = gradient(stock), gradient(patched)
    assert float((approximate - exact).norm() / exact.norm()) > 1e-4
    assert live_bytes(lambda: patched(x)) < live_bytes(lambda: stock(x))


Fault = Callable[[pytest.MonkeyPatch], None]


def _apply_with(changed: Callable[[DerivativeCode], DerivativeCode]) -> Fault:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(coded, "apply_code", lambda dh, packed, code: codes.apply_code(dh, packed, changed(code)))

    return plant


def _encode_with(changed: Callable[[DerivativeCode], DerivativeCode]) -> Fault:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for user in (coded, module):
            monkeypatch.setattr(user, "encode", lambda z, code: codes.encode(z, changed(code)))

    return plant


def _levels(change: Callable[[tuple[float, ...]], tuple[float, ...]]) -> Fault:
    return _apply_with(lambda code: dataclasses.replace(code, levels=change(code.levels)))


def _slope_of_relu(code: DerivativeCode) -> DerivativeCode:
    """The first level of a step code is 0, the last one 1."""
    return dataclasses.replace(code, thresholds=(0.0,) * len(code.thresholds), kind="relu")


CODE_FAULTS: dict[str, Fault] = {
    "derivative 0": _levels(lambda levels: (0.0,) * len(levels)),
    "derivative of ReLU": _encode_with(_slope_of_relu),
    "codes shifted by one": _levels(lambda levels: (*levels[1:], levels[0])),
    "scale off by 5 %": _levels(lambda levels: tuple(1.05 * level for level in levels)),
}


@pytest.mark.parametrize("fault", CODE_FAULTS)
@pytest.mark.parametrize("name", [name for name in CASES if name != "int8"])
def test_a_fault_in_the_codes_of_a_derivative_is_found(name: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    CODE_FAULTS[fault](monkeypatch)
    _, distance, limit = compared(name, "sgd")
    assert distance > DETECTED * limit


def _decoded_with(change: Callable[[Quantized], Quantized]) -> Callable[[Quantized], Tensor]:
    return lambda quantized: dequantize(change(quantized))


def _scales(factors: tuple[float, float]) -> Callable[[Quantized], Quantized]:
    """Of minimum and step."""
    return lambda q: dataclasses.replace(q, scales=q.scales * torch.tensor(factors, dtype=q.scales.dtype))


INT8_FAULTS: dict[str, Callable[[Quantized], Quantized]] = {
    "all is 0": _scales((0.0, 0.0)),
    "codes shifted by one": lambda q: dataclasses.replace(q, codes=q.codes + 1),
    "scale off by 5 %": _scales((1.0, 1.05)),
    "a group's minimum forgotten": _scales((0.0, 1.0)),
    "groups in another order": lambda q: dataclasses.replace(q, scales=q.scales.flip(0)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("fault", INT8_FAULTS)
def test_a_fault_in_what_is_kept_in_8_bits_is_found(
    fault: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "dequantize", _decoded_with(INT8_FAULTS[fault]))
    _, distance, limit = compared("int8", optimizer)
    assert distance > DETECTED * limit
