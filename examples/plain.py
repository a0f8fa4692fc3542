"""A model of your own, without transformers: a small GPT that returns (logits, loss), on Python's language reference.

python examples/plain.py [--steps N]
"""

from __future__ import annotations

import torch
from data import pretrained, reference, show, steps
from torch import Tensor, nn
from transformers import AutoTokenizer

import memopt

TOKENS, WIDTH, HEADS = 64, 128, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y: Tensor = x + self.mlp(x)
        return y


class GPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.body, self.head = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH)), nn.Linear(WIDTH, vocabulary)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.head(self.body(self.tokens(idx) + self.positions.weight[: idx.shape[1]]))
        loss = None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def main(count: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pretrained("SmolLM2-135M-Instruct"))
    rows = torch.tensor([row["input_ids"] for row in reference(tokenizer, tokens=TOKENS + 1)])
    model = memopt.patch(GPT(len(tokenizer)))  # the one line; token ids are guessed from the signature
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in rows.split(8)[:count]:
        loss = model(batch[:, :-1], batch[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    show(losses, memopt.summary(model))


if __name__ == "__main__":
    main(steps(60))
