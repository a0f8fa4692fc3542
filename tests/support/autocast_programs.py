"""Random compositions of modules and functions, run under autocast: what `tests.patches.test_autocast` patches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, EXPERTS = 8, 4


class Halved(torch.autograd.Function):
    """A user's function, which saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * 0.5

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x * dy


class RMS(nn.Module):
    """As the models of transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH).uniform_(0.5, 1.5))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """Three linears read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


class Experts(nn.Module):
    """A router in the dtype of its input, experts whose outputs are added up in it."""

    def __init__(self, wide_router: bool) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.wide_router = wide_router
        self.chosen = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and not self.wide_router):
            logits = F.linear(rows, self.router.to(rows.dtype) if self.wide_router else self.router)
        weights, chosen = logits.softmax(-1).topk(2, -1)
        self.chosen = chosen.detach()
        total = torch.zeros_like(rows)
        for place in range(2):
            for number, expert in enumerate(self.experts):
                weight = (weights[:, place] * (chosen[:, place] == number)).unsqueeze(-1)
                total = total + (expert(rows) * weight).to(rows.dtype)
        return total.view(x.shape)


def _module(make: Callable[[], nn.Module]) -> Callable[[random.Random], nn.Module]:
    return lambda _: make()


#: Kinds of steps that are modules, and how such a module is made.
MODULES: dict[str, Callable[[random.Random], nn.Module]] = {
    "layer norm": _module(lambda: nn.LayerNorm(WIDTH)),
    "rms norm": _module(RMS),
    "torch's rms norm": _module(lambda: nn.RMSNorm(WIDTH, eps=1e-6)),
    "norm without affine": _module(lambda: nn.LayerNorm(WIDTH, elementwise_affine=False)),
    "linear": _module(lambda: nn.Linear(WIDTH, WIDTH)),
    "gelu": _module(nn.GELU),
    "dropout": _module(lambda: nn.Dropout(0.25)),
    "gated": _module(Gated),
    "attention": _module(Attention),
    "experts": lambda rng: Experts(rng.random() < 0.5),
    "convolution": _module(lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "embedding": _module(lambda: nn.Embedding(16, WIDTH)),
    "linear without autocast": _module(lambda: nn.Linear(WIDTH, WIDTH)),
    "norm without autocast": _module(lambda: nn.LayerNorm(WIDTH)),
    "linear in fp16": _module(lambda: nn.Linear(WIDTH, WIDTH)),
    "frozen linear": _module(lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False)),
}
FUNCTIONS = (
    "add", "cat", "parameter product", "einsum", "F.linear", "user's function", "cast", "view", "mean", "index_add",
    "no_grad", "inplace", "multiply",
)  # fmt: skip
NORMS = ("layer norm", "rms norm", "torch's rms norm", "norm without affine")


class Program(nn.Module):
    """A random graph: each step reads one or two earlier tensors of shape (rows, tokens, WIDTH)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.wide = torch.float32
        """What casts and buffers of fp32 are in: fp64 where the truth is computed."""
        self.dtype = rng.choice((torch.bfloat16, torch.bfloat16, torch.float16))
        self.cache = rng.random() < 0.7
        self.parts, self.weights = nn.ModuleDict(), nn.ParameterDict()
        self.steps: list[tuple[str, str, int, int]] = []
        for number in range(rng.randint(4, 10)):
            kind = rng.choice(NORMS) if number % 3 == 0 else rng.choice((*MODULES, *FUNCTIONS, "linear", "attention"))
            last = number  # steps mostly go on from the last tensor
            a = last if rng.random() < 0.75 else rng.randint(0, number)
            self.steps.append((kind, f"p{number}", a, rng.randint(0, number)))
            if kind in MODULES:
                self.parts[f"p{number}"] = MODULES[kind](rng)
            self.weights[f"p{number}"] = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.returned = sorted({len(self.steps), rng.randint(1, len(self.steps))})
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        tensors, self.seen = [x * 1.5], []
        for kind, name, a, b in self.steps:
            tensors.append(self._step(kind, name, tensors[a], tensors[b]))
            self.seen.append(tensors[-1].dtype)
        return tuple(tensors[number] for number in self.returned)

    def _step(self, kind: str, name: str, a: Tensor, b: Tensor) -> Tensor:
        if kind in MODULES:
            return self._module(kind, self.parts[name], a)
        return self._function(kind, self.weights[name], a, b)

    def _module(self, kind: str, module: nn.Module, a: Tensor) -> Tensor:
        on = torch.is_autocast_enabled("cpu")
        if kind == "convolution":
            return module(a.transpose(1, 2)).transpose(1, 2)
        if kind == "embedding":
            return a + module(torch.arange(a.shape[1]) % 16)
        if kind.endswith("without autocast"):
            with torch.autocast("cpu", enabled=False):
                return module(a)
        if kind == "linear in fp16" and on:
            with torch.autocast("cpu", torch.float16):
                return module(a)
        return module(a)

    def _function(self, kind: str, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if kind == "add":
            return a + b
        if kind == "multiply":
            return a * b
        if kind == "cat":
            return torch.cat([a[..., :3], b[..., 3:]], -1)
        if kind == "parameter product":
            return a @ weight
        if kind == "einsum":
            return torch.einsum("btd,de->bte", a, weight)
        if kind == "F.linear":
            return F.linear(a, weight) + F.linear(a, weight.t())
        if kind == "user's function":
            return Halved.apply(a)
        if kind == "cast":
            return a.to(self.dtype if self.wide is torch.float32 else self.wide)
        if kind == "view":
            return a.reshape(-1, 2, WIDTH // 2).transpose(1, 2).reshape(a.shape)
        if kind == "mean":
            return a - a.mean(-1, keepdim=True)
        if kind == "index_add":
            rows = torch.zeros(a.shape[0] * a.shape[1], WIDTH, dtype=self.wide)
            return rows.index_add(0, torch.arange(len(rows)).flip(0), a.reshape(-1, WIDTH)).view(a.shape)
        if kind == "no_grad":
            with torch.no_grad():
                scale = F.linear(a, weight).tanh()
            return a * scale
        assert kind == "inplace"
        return (a * 1).mul_(0.5)

    def choices(self) -> list[Tensor]:
        """Which experts were chosen in the last call."""
        return [part.chosen for part in self.parts.values() if isinstance(part, Experts)]


class OneBlock(nn.Module):
    """A model of one block, in which linears look for recompute specs."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, x: Tensor) -> Any:
        return self.blocks[0](x)
