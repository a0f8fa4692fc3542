"""What single operations keep inside a scope, beside the activations of test_scope."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memopt.saved import RecomputeScope
from memopt.torch_compat import FakeTensorMode, storage_id


def kept_shapes(run) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of every storage that `run` keeps inside a scope, leaves not counted."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not tensor.is_leaf:
            kept[storage_id(tensor.untyped_storage())] = tensor.detach()
        return tensor.detach()

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    pack.memopt_observer = unpack.memopt_observer = True  # type: ignore[attr-defined]
    with saved_tensors_hooks(pack, unpack), RecomputeScope():
        run()
    return sorted(((tuple(t.shape), t.dtype) for t in kept.values()), key=str)


@pytest.mark.parametrize("dim", [-1, 1, 0])
def test_a_glu_is_recomputed(dim):
    torch.manual_seed(0)
    x, w = torch.randn(4, 6, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def run() -> Tensor:
        z = x @ w
        half = F.glu(z, dim)
        return (half @ torch.ones(half.shape[-1], 3, requires_grad=True)).square().sum()

    stock = torch.autograd.grad(run(), (x, w))
    with RecomputeScope():
        loss = run()
    assert all(map(torch.equal, stock, torch.autograd.grad(loss, (x, w))))
    halved = tuple(n // 2 if i == dim % 3 else n for i, n in enumerate((4, 6, 8)))
    assert (halved, torch.float32) not in kept_shapes(run)


@pytest.mark.parametrize("operation", [lambda z: z.softmax(-1), torch.sigmoid, torch.tanh, torch.relu, torch.exp])
def test_of_a_kept_result_and_its_cast_only_the_result_is_kept(operation):
    torch.manual_seed(0)
    x = torch.randn(4, 8, requires_grad=True)
    w = torch.randn(8, 5, dtype=torch.bfloat16, requires_grad=True)

    def run() -> Tensor:
        return (operation(x * 2).to(torch.bfloat16) @ w).float().square().sum()

    stock = torch.autograd.grad(run(), (x, w))
    with RecomputeScope():
        loss = run()
    assert all(map(torch.equal, stock, torch.autograd.grad(loss, (x, w))))
    assert [kept for kept in kept_shapes(run) if kept[0] == (4, 8)] == [((4, 8), torch.float32)]


def test_a_kept_result_read_without_a_cast_is_kept_once():
    x = torch.randn(4, 8, requires_grad=True)
    w = torch.randn(8, 5, requires_grad=True)
    kept = kept_shapes(lambda: (x * 2).softmax(-1) @ w)
    assert kept == [((4, 8), torch.float32)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_batch_norms_output_is_recomputed_by_the_statistics_of_the_forward(dtype, training):
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm2d(4, dtype=dtype).train(training)
    x = (1e-3 * torch.randn(3, 4, 5, 5, dtype=dtype)).requires_grad_()  # where eps is most of the variance
    w = torch.randn(2, 4, 3, 3, dtype=dtype, requires_grad=True)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)

    def run() -> Tensor:
        return F.conv2d(F.silu(norm(x * 2)), w).square().sum()

    leaves = (x, w, *norm.parameters())
    stock = torch.autograd.grad(run(), leaves)
    with RecomputeScope():
        loss = run()
    with torch.no_grad():
        norm.bias += 1  # no operation saves it
    norm(x.detach() + 1)  # in train mode that changes the running statistics, which eval mode alone reads
    ours = torch.autograd.grad(loss, leaves)
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(
            a, b, rtol=8 * torch.finfo(dtype).eps, atol=float(b.abs().max()) * 8 * torch.finfo(dtype).eps
        )
    assert kept_shapes(run).count(((3, 4, 5, 5), dtype)) == 1


@pytest.mark.parametrize("training", [True, False])
def test_a_trace_keeps_the_copies_of_a_batch_norms_output_that_a_real_forward_keeps(training):
    """In train mode they are recomputed with other roundings, and a copy is recomputed only if it is the same."""

    def kept() -> list[tuple[tuple[int, ...], torch.dtype]]:
        torch.manual_seed(0)
        norm, x = torch.nn.BatchNorm1d(48).train(training), torch.randn(2, 32, 8, requires_grad=True)

        def run() -> Tensor:
            y = norm((x @ torch.randn(8, 48, requires_grad=True)).flatten(0, 1)).view(2, 32, 2, 24)
            query, key, value = y.split(8, dim=3)
            scores = query.permute(0, 2, 1, 3) @ key.permute(0, 2, 3, 1)
            return (scores @ value.permute(0, 2, 1, 3)).square().sum()

        return kept_shapes(run)

    real = kept()
    with FakeTensorMode():
        assert kept() == real


def test_a_batch_norms_output_is_kept_where_its_bias_is_frozen_or_it_was_changed():
    norm = torch.nn.BatchNorm2d(4)
    x, w = torch.randn(3, 4, 5, 5, requires_grad=True), torch.randn(2, 4, 3, 3, requires_grad=True)
    norm.bias.requires_grad_(False)
    both = 2 * [((3, 4, 5, 5), torch.float32)]
    assert [kept for kept in kept_shapes(lambda: F.conv2d(norm(x * 2), w)) if kept[0] == (3, 4, 5, 5)] == both
    norm.bias.requires_grad_(True)
    assert len([kept for kept in kept_shapes(lambda: F.conv2d(norm(x * 2), w)) if kept[0] == (3, 4, 5, 5)]) == 1
    assert [kept for kept in kept_shapes(lambda: F.conv2d(norm(x * 2).mul_(2), w)) if kept[0] == (3, 4, 5, 5)] == both
