"""Language models without transformers, which return their logits in the forms that people write.

Pair       (logits, loss), the loss computed inside, one row of logits without targets      as nanoGPT
Capped     padded vocabulary cut off, fp32, soft-capped; the loss alone, of any reduction    as nanochat
Bare       logits; the caller computes the loss                                              as torchtitan
Fields     a dataclass
Nested     logits inside tuples, lists and dicts, beside what is no logits
LossAlone  takes one row of tokens and targets, returns nothing but the loss                 as modded-nanogpt
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, PADDED, WIDTH, HEADS, TOKENS = 250, 256, 32, 2, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (part.view(batch, tokens, HEADS, -1).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.c_proj(y.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return projected


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class Body(nn.Module):
    """Two blocks between an embedding and a head; subclasses are models."""

    classes = VOCABULARY

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.wpe = nn.Embedding(self.classes, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.h = nn.ModuleList([Block(), Block()])
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, self.classes, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def hidden(self, idx: Tensor) -> Tensor:
        _, tokens = idx.size()
        assert tokens <= TOKENS, f"cannot forward a sequence of length {tokens}"
        x = self.wte(idx) + self.wpe(torch.arange(tokens, device=idx.device))
        for block in self.h:
            x = block(x)
        out: Tensor = self.ln_f(x)
        return out


class Pair(Body):
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.hidden(idx)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Capped(Body):
    classes = PADDED

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, kv_cache: Any = None, loss_reduction: str = "mean"
    ) -> Tensor:
        logits: Tensor = self.lm_head(self.hidden(idx))
        logits = logits[..., :VOCABULARY].float()
        logits = 15 * torch.tanh(logits / 15)
        if targets is None:
            return logits
        return F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1, reduction=loss_reduction
        )


class Bare(Body):
    def forward(self, tokens: Tensor, input_batch: Tensor | None = None) -> Tensor:
        logits: Tensor = self.lm_head(self.hidden(tokens))
        return logits


@dataclass
class Output:
    prediction: Tensor
    state: Tensor
    objective: Tensor | None = None


class Fields(Body):
    def forward(self, sequence: Tensor, answers: Tensor | None = None) -> Output:
        x = self.hidden(sequence)
        logits = self.lm_head(x)
        loss = None if answers is None else F.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=-1)
        return Output(logits, x, loss)


class Nested(Body):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return (hidden, [{"of": (self.lm_head(hidden).float(), None)}])


class LossAlone(Body):
    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        x = self.hidden(inputs[None]).view(-1, WIDTH)
        return F.cross_entropy(self.lm_head(x), target, ignore_index=-1)


def outside(pred: Tensor, labels: Tensor) -> Tensor:
    """The loss where the model has none, as torchtitan computes it."""
    return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1), ignore_index=-1)


#: Model -> its loss.
LOSSES: dict[type[Body], Callable[[Any, Tensor, Tensor], Tensor]] = {
    Pair: lambda model, ids, targets: model(ids, targets)[1],
    Capped: lambda model, ids, targets: model(ids, targets),
    Bare: lambda model, ids, targets: outside(model(ids), targets),
    Fields: lambda model, ids, targets: model(ids, answers=targets).objective,
    Nested: lambda model, ids, targets: outside(model(ids)[1][0]["of"][0], targets),
    LossAlone: lambda model, ids, targets: model(ids[0], targets[0]),
}


def batch() -> tuple[Tensor, Tensor]:
    """(2, 48) ids and targets, a few of which are ignored."""
    ids = torch.randint(0, VOCABULARY, (2, 49), generator=torch.Generator().manual_seed(1))
    targets = ids[:, 1:].clone()
    targets[:, :5] = -1
    return ids[:, :-1], targets
