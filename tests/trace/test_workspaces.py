"""What operators allocate inside of themselves on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memopt.torch_compat import FakeTensorMode
from memopt.trace.emulate import CudaChoices
from memopt.trace.fake import make_fake
from memopt.trace.timeline import record

ROWS, WIDTH = 256, 64


class Attention(nn.Module):
    def __init__(self, function, shared: int = 1) -> None:
        super().__init__()
        self.function, self.heads, self.shared = function, 4, shared
        self.q = nn.Linear(WIDTH * 4, WIDTH * 4, bias=False)
        self.kv = nn.Linear(WIDTH * 4, 2 * WIDTH * 4 // shared, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(1, ROWS, self.heads, WIDTH).transpose(1, 2)
        k, v = (
            each.view(1, ROWS, self.heads // self.shared, WIDTH).transpose(1, 2) for each in self.kv(x).chunk(2, -1)
        )
        return self.function(q, k, v)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(q @ k.mT, dim=-1, dtype=torch.float32).to(q.dtype)
    return weights @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def born(
    module: nn.Module, dtype: torch.dtype, operation: str, *, cuda: bool = True
) -> list[tuple[tuple[int, ...], str]]:
    """Shape and dtype of what calls of an operator allocate in a step."""
    with torch.device("meta"):
        module = module.to(device="meta", dtype=dtype)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    make_fake(module, fake)
    with fake:
        x = torch.zeros(1, ROWS, WIDTH * 4, dtype=dtype, requires_grad=True)

        def run() -> dict[str, Tensor]:
            with CudaChoices():
                return {"loss": module(x).sum()}

        class Output(dict):
            loss = property(lambda self: self["loss"])

        found = record(module, lambda: Output(run()), during_backward=CudaChoices(), cuda=cuda)
    lives = [life for moment, life in enumerate(found.events) if life.born == moment]
    return [(life.birth.shape, life.birth.dtype) for life in lives if life.birth.operation == operation]


def test_softmax_of_fp16_in_fp32_is_one_operation_and_bf16_is_cast_first():
    square = (1, 4, ROWS, ROWS)
    assert born(Attention(eager), torch.float16, "_to_copy")[0] == (square, "float16")
    assert born(Attention(eager), torch.bfloat16, "_to_copy")[0] == (square, "float32")
    assert born(Attention(eager), torch.float16, "_softmax") == [(square, "float32")]


@pytest.mark.parametrize(("dtype", "gradient"), [(torch.float16, "float16"), (torch.float32, "float32")])
def test_the_backward_of_softmax_takes_a_product(dtype, gradient):
    square = (1, 4, ROWS, ROWS)
    found = born(Attention(eager), dtype, "_softmax_backward_data")
    assert found == [(square, gradient), (square, "float32")]
    assert born(Attention(eager), dtype, "_softmax_backward_data", cuda=False) == [(square, gradient)]


@pytest.mark.parametrize("shared", [1, 2])
def test_the_backward_of_flash_attention_sums_in_fp32_and_for_each_head_of_queries(shared):
    found = born(Attention(fused, shared), torch.bfloat16, "_scaled_dot_product_flash_attention_backward")
    of_queries, of_keys = (1, 4, ROWS, WIDTH), (1, 4 // shared, ROWS, WIDTH)
    own = [(of_queries, "bfloat16"), (of_keys, "bfloat16"), (of_keys, "bfloat16")]
    sums = [((1, 4, ROWS), "float32"), ((1, ROWS, 4, WIDTH), "float32")]
    expanded = [((1, ROWS, 4, WIDTH), "bfloat16")] * 2 if shared > 1 else []
    copy = [((1, 4, ROWS, WIDTH), "bfloat16")]  # of the gradient of a sum, which is one number
    assert found == [*own, *copy, *sums, *expanded]


def test_the_backward_of_efficient_attention_sums_in_fp32():
    found = born(Attention(fused), torch.float32, "_scaled_dot_product_efficient_attention_backward")
    whole = ((1, 4, ROWS, WIDTH), "float32")
    assert found[-3:] == [((1, 4, ROWS), "float32"), whole, whole]
