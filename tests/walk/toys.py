"""Small models that are hard to judge: each does one thing to a norm's output. Builders only, no tests."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8
BATCH, TOKENS = 2, 6


class Toy(nn.Module):
    """A LayerNorm (or an RMSNorm) and a linear that reads it; subclasses change what happens around them."""

    has_bias = True

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if self.has_bias else nn.RMSNorm(WIDTH, eps=1e-6)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.linear(self.norm(x))


class UsedByTwoLinears(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        return self.linear(y), self.other(y)


class CalledTwice(Toy):
    """One norm, run on two tensors, read by two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.norm(torch.tanh(self.linear(self.norm(x)))))


class Residual(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y + self.linear(y)


class Keys(Toy):
    """Attention whose keys have no bias: what a norm's bias adds to all of them changes no softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query, key, value = (f(y).unsqueeze(1) for f in (self.query, self.key, self.linear))
        return F.scaled_dot_product_attention(query, key, value)


class BiaslessBesideBias(Keys):
    """The same linears, used in another way: here the bias is missed. Only the proof can tell."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.query(y) * torch.tanh(self.key(y)) + self.linear(y)


class DeadKeys(Keys):
    """What the biasless linear makes is not used: that the bias is missing proves nothing."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        self.key(y)
        return self.query(y) + self.linear(y)


class Returned(Toy):
    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        return {"output": self.linear(y), "features": y}


class SharedLinear(Toy):
    """Two norms feed one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.other_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)) * self.linear(self.other_norm(x + 1))


class TiedAcrossLayers(Toy):
    """The linear's weight is also another layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)) + self.other(x)


class TiedToEmbedding(Toy):
    has_bias = False

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embedding(torch.arange(TOKENS, device=x.device))
        return self.linear(self.norm(x + rows))


class AlsoOnRawInput(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)) + self.linear(x)


class ZeroPaddedConvolution(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x).transpose(1, 2))


class UnpaddedConvolution(ZeroPaddedConvolution):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Conv1d(WIDTH, WIDTH, 3)


class PaddedByHand(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.pad(self.norm(x), (0, 0, 0, 2)))


class PaddedByHandWithoutBias(PaddedByHand):
    has_bias = False


class InPlaceAdd(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y += x
        return self.linear(y)


class ReadByNumpy(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.linear(y) + torch.from_numpy(y.detach().numpy()).mean()


class BranchOnValues(Toy):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.linear(y) if y[0, 0, 0] > 0 else -self.linear(y)


class _MatmulFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).t() @ x.flatten(0, 1)


class CustomFunction(Toy):
    has_bias = False

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _MatmulFunction.apply(self.norm(x), self.linear.weight)  # type: ignore[no-untyped-call]
        return result


class BareMatmul(Toy):
    """x @ W.T, with the bias added by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) @ self.linear.weight.T + self.linear.bias


class Einsum(Toy):
    has_bias = False

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bth,oh->bto", self.norm(x), self.linear.weight)


class Experts(Toy):
    """3-D expert weights, (experts, in, out), all applied to every token."""

    has_bias = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Identity()  # type: ignore[assignment]
        self.experts = nn.Parameter(torch.randn(3, WIDTH, 5))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        return torch.bmm(tokens.expand(3, -1, -1), self.experts).sum(0)


class TwoLayouts(Toy):
    """One weight, applied as W and as its transpose."""

    has_bias = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y @ self.linear.weight.T + y @ self.linear.weight


class FlippedChannels(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x).flip(-1))


class TiledChannels(Toy):
    """Two tokens side by side in one wider linear."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x).reshape(BATCH, TOKENS // 2, 2 * WIDTH))


class BesideRawInput(Toy):
    """The norm's output and the raw input side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.cat([self.norm(x), x], -1))


class MixedChannels(Toy):
    """A linear over tokens reads all channels with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(TOKENS, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x).transpose(1, 2))


class Scaled(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x) * 0.5)


class ScaledTwoWays(Toy):
    """One linear that reads the norm at two scales: the bias would have to be added twice over."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.linear(y) * self.linear(y * 0.5)


class Gated(Toy):
    """Multiplied with a gate: the scale can cross, the bias cannot."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x) * torch.sigmoid(x))


class GatedWithoutBias(Gated):
    has_bias = False


class MeanPooled(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x).mean(1))


class MaxPooled(Toy):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x).amax(1))


class NoBiasSlot(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)


class RoundedWeight(Toy):
    """A fake-quantised weight is not linear in its parameter."""

    has_bias = False

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), torch.round(self.linear.weight * 16) / 16)


class KeptForNextCall(Toy):
    """Leaves its output on the module; the next call reads it."""

    memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out = self.linear(y)
        if self.memory is not None:
            out = out + self.memory
        self.memory = y
        return out


class SharedBias(Toy):
    """Two linears with weights of their own and one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.bias = self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)) * self.other(x)


class DropoutBetween(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.dropout(self.norm(x)))


class DropoutBetweenWithoutBias(DropoutBetween):
    has_bias = False


class SharedNormWeight(Toy):
    has_bias = False

    def __init__(self) -> None:
        super().__init__()
        self.other_norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.other_norm.weight = self.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x)) + self.other_norm(x)


class BlockwiseWeight(Toy):
    """Half of the channels meets both halves of the weight, seen through a view."""

    has_bias = False

    def forward(self, x: Tensor) -> Tensor:
        blocks = self.linear.weight.view(WIDTH, 2, WIDTH // 2)
        return torch.einsum("btc,okc->btok", self.norm(x)[..., : WIDTH // 2], blocks)


#: Toy -> words of the obstacle that `norm` must have; None when the fold is legal.
VERDICTS: dict[type[Toy], str | None] = {
    Toy: None,
    UsedByTwoLinears: None,
    CalledTwice: None,
    Residual: "residual add",
    Returned: "returned as features by the model",
    SharedLinear: "shared by several norms",
    TiedAcrossLayers: "tied to other.weight",
    TiedToEmbedding: "is tied to",
    AlsoOnRawInput: "also reads something that this norm did not make",
    ZeroPaddedConvolution: "padding",
    UnpaddedConvolution: None,
    PaddedByHand: "padding",
    PaddedByHandWithoutBias: None,
    InPlaceAdd: "in-place add",
    ReadByNumpy: "read of its values in Python",
    BranchOnValues: "branch or comparison",
    CustomFunction: None,
    BareMatmul: None,
    Einsum: None,
    Experts: None,
    TwoLayouts: "two layouts",
    FlippedChannels: None,
    TiledChannels: None,
    BesideRawInput: None,
    MixedChannels: "several channels in one coordinate",
    Scaled: None,
    ScaledTwoWays: "at several scales",
    Gated: "mask or dropout",
    GatedWithoutBias: None,
    MeanPooled: None,
    MaxPooled: "branch or comparison",
    Keys: None,
    NoBiasSlot: "the norm has a bias and linear.weight has none",
    RoundedWeight: "matrix product",
    KeptForNextCall: "residual add",
    SharedBias: "linear.bias is also used by other.weight",
    DropoutBetween: "dropout",
    DropoutBetweenWithoutBias: None,
    SharedNormWeight: "its weight is shared with other_norm.weight",
    BlockwiseWeight: "layout is not understood",
}


def build(toy: type[Toy], seed: int = 0) -> tuple[Toy, Tensor]:
    """The toy in fp64 and eval mode, its norms randomised, and an input (2, 6, 8)."""
    torch.manual_seed(seed)
    model = toy().double().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data = torch.rand_like(parameter) + 0.5
    return model, torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)
