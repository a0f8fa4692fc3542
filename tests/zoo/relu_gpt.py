"""A GPT of the form of nanochat's: no norm has a weight, ReLUs are squared, q and k are normalised, logits are capped.

Its forward returns bare logits, or with targets a bare loss.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LAYERS, TOKENS, CAP = 512, 64, 4, 2, 64, 15.0


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


class Linear(nn.Linear):
    """Its weight is cast to the dtype of the input: master weights stay in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_q, self.c_k, self.c_v, self.c_proj = (Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.fc, self.out = Linear(WIDTH, 4 * WIDTH, bias=False), Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        heads = [linear(norm(x)).unflatten(-1, (HEADS, -1)) for linear in (self.c_q, self.c_k, self.c_v)]
        q, k = (1.2 * norm(rotated(each, *rotation)) for each in heads[:2])
        q, k, v = (each.transpose(1, 2) for each in (q, k, heads[2]))
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y: Tensor = x + self.out(F.relu(self.fc(norm(x))).square())
        return y


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)


class ReluGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(VOCABULARY + 64, WIDTH), Linear(WIDTH, VOCABULARY + 64, bias=False)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.resid_lambdas = nn.Parameter(torch.ones(LAYERS))
        angles = torch.outer(torch.arange(TOKENS), 1e5 ** -torch.linspace(0, 1, WIDTH // HEADS // 2))[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None, loss_reduction: str = "mean") -> Tensor:
        rotation = self.cos[: idx.size(1)], self.sin[: idx.size(1)]
        x = norm(self.wte(idx))
        for place, block in enumerate(self.h):
            x = block(self.resid_lambdas[place] * x, rotation)
        logits = self.lm_head(norm(x))[..., :VOCABULARY]
        logits = logits.float() if logits.dtype is torch.bfloat16 else logits
        logits = CAP * torch.tanh(logits / CAP)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=loss_reduction)
