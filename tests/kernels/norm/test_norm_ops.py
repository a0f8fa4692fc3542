"""The norms as operators: what compilers, fake tensors, checkpointing and saved-tensor hooks see of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from memopt.kernels.base import pieces
from memopt.kernels.linear.function import linear
from memopt.kernels.norm import ops as norm_ops
from memopt.kernels.norm.function import NormSpec, ms_norm
from memopt.recompute.specs import Region
from memopt.saved import RecomputeScope
from tests.kernels.norm.test_norm import FAMILIES, leaves, make, terms

RMS, LAYER, BARE = FAMILIES[0], FAMILIES[1], FAMILIES[3]

LAYOUTS = {
    "contiguous": lambda base: base.view(8, 5, 6),
    "transposed heads": lambda base: base.view(2, 4, 5, 6).transpose(1, 2),
    "a slice": lambda base: base.view(4, 5, 12)[..., 3:9],
    "rows whose elements are not adjacent": lambda base: base.view(6, 40).t(),
    "expanded": lambda base: base[:30].view(5, 1, 6).expand(5, 3, 6),
    "one row": lambda base: base[:7],
    "empty": lambda base: base[:0].view(0, 6),
}


def drawn(layout: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return LAYOUTS[layout](torch.randn(240, generator=torch.Generator().manual_seed(0)).to(dtype))


def arguments(x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: NormSpec):
    """The operator for these parameters and what it is called with, except the dtypes."""
    return norm_ops.ms_norm, (x, weight, bias, spec.kind, spec.eps, spec.offset, spec.cast)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [RMS, LAYER, BARE], ids=str)
def test_the_fake_kernels_promise_what_the_real_ones_give(family, layout):
    x = drawn(layout).requires_grad_()
    _, weight, bias, spec = make(family, (1, x.size(-1)), torch.float32)
    operator, given = arguments(x, weight, bias, spec)
    dtypes = (x.dtype, x.dtype)
    torch.library.opcheck(operator, (*given, *dtypes), test_utils=("test_schema", "test_faketensor"))
    outputs = [output.detach() for output in operator(*given, *dtypes)]
    x_hat, rstd = outputs[-2:]
    promised = torch.empty_like(x) if spec.kind == "rms" else torch.empty(x.shape)
    assert all(output.stride() == promised.stride() for output in outputs[:-1])
    needs = [True, weight is not None, bias is not None]
    backward = (torch.randn(x.shape), x_hat, rstd, None if weight is None else weight.detach(), spec.kind, spec.offset)
    torch.library.opcheck(norm_ops.ms_norm_backward, (*backward, needs, x.dtype))


@pytest.mark.parametrize("family", [RMS, LAYER, BARE], ids=str)
def test_the_operators_pass_every_check_of_torch(family):
    x, weight, bias, spec = make(family, (4, 6), torch.float32)
    operator, given = arguments(x, weight, bias, spec)
    dtypes = (x.dtype, x.dtype)
    torch.library.opcheck(operator, (*given, *dtypes))


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_gradients_of_the_operators_are_right_in_fp64(family):
    x, weight, bias, spec = make(family, (3, 2, 7), torch.float64)
    operator, given = arguments(x, weight, bias, spec)
    dtypes = (x.dtype, x.dtype)
    assert gradcheck(lambda *_: operator(*given, *dtypes)[0], leaves(x, weight, bias))


@pytest.mark.parametrize(("family", "cast"), list(itertools.product([RMS, LAYER], ["before", "after"])), ids=str)
@pytest.mark.parametrize(("x_dtype", "dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_the_operators_compute_what_the_functions_compute(family, cast, x_dtype, dtype):
    x, weight, bias, spec = make(family, (5, 6), x_dtype, cast)
    operator, given = arguments(x, weight, bias, spec)
    ours, theirs = operator(*given, dtype, dtype)[0], ms_norm(x, weight, bias, spec, dtype)
    assert torch.equal(ours, theirs)
    dy = torch.randn(5, 6).to(dtype)
    inputs = leaves(x, weight, bias)
    for one, other in zip(torch.autograd.grad(ours, inputs, dy), torch.autograd.grad(theirs, inputs, dy), strict=True):
        assert torch.equal(one, other)


def test_the_operators_give_gradients_only_to_what_needs_them():
    x, weight, bias, spec = make(LAYER, (5, 6), torch.float32)
    operator, given = arguments(x.detach(), weight.detach(), bias, spec)
    y, x_hat, rstd = operator(*given, x.dtype, x.dtype)
    assert not x_hat.requires_grad
    assert not rstd.requires_grad
    y.sum().backward()
    assert torch.equal(bias.grad, torch.full((6,), 5.0))


@pytest.mark.parametrize("family", [RMS, LAYER, BARE], ids=str)
def test_the_operators_of_a_sum_pass_every_check_of_torch(family):
    a, b, weight, bias, spec = terms(family, (4, 6), torch.float32)
    operator, given = arguments(a, weight, bias, spec)
    dtypes = (a.dtype, a.dtype)
    torch.library.opcheck(operator, (*given, *dtypes, b))


@pytest.mark.parametrize("frozen", [None, 0, 1])
@pytest.mark.parametrize("family", [RMS, LAYER, BARE], ids=str)
def test_a_compiled_norm_of_a_sum_is_one_operator_with_the_same_gradients(family, frozen):
    torch._dynamo.reset()
    *pair, weight, bias, spec = terms(family, (5, 6), torch.float32)
    if frozen is not None:
        pair[frozen].requires_grad_(False)
    targets = []

    def function(a: Tensor, b: Tensor) -> Tensor:
        return ms_norm(a, weight, bias, spec, a.dtype, residual=b)

    def recorded(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(function, fullgraph=True, backend=recorded)(*pair)
    assert not any("add" in target for target in targets)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    inputs = [t for t in leaves(*pair, weight, bias) if t.requires_grad]
    dy = torch.randn(5, 6)
    for ours, theirs in zip(
        torch.autograd.grad(compiled(*pair), inputs, dy), torch.autograd.grad(function(*pair), inputs, dy), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_an_operator_without_parameters_gives_x_hat_once():
    bf16 = torch.bfloat16
    y, rstd = norm_ops.ms_norm(torch.ones(2, 3), None, None, "rms", 1e-5, 0, "after", bf16, torch.float32)
    assert (y.dtype, rstd.dtype) == (bf16, torch.float32)


class Layer(nn.Module):
    def __init__(self, family) -> None:
        super().__init__()
        _, weight, bias, self.spec = make(family, (6, 16), torch.float32)
        self.weight = None if weight is None else nn.Parameter(weight.detach())
        self.bias = None if bias is None else nn.Parameter(bias.detach())
        self.linear = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(ms_norm(x * 1.5, self.weight, self.bias, self.spec, x.dtype))


def gradients(run, layer: Layer, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = run(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("family", [RMS, LAYER, BARE], ids=str)
def test_a_compiled_norm_is_one_graph_with_the_same_gradients(family, dynamic):
    torch._dynamo.reset()
    layer = Layer(family)
    graphs = []

    def recorded(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=recorded)(torch.randn(6, 16))
    assert any("memopt.ms_norm" in target for target in graphs[0])
    for rows in (6, 9) if dynamic else (6,):
        x = torch.randn(rows, 16)
        for ours, theirs in zip(gradients(compiled, layer, x), gradients(layer, layer, x), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_inductor_compiles_a_norm():
    torch._dynamo.reset()
    layer, x = Layer(LAYER), torch.randn(6, 16)
    compiled = torch.compile(layer, fullgraph=True)
    for ours, theirs in zip(gradients(compiled, layer, x), gradients(layer, layer, x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_norm_can_be_exported():
    layer, x = Layer(LAYER).eval(), torch.randn(6, 16)
    program = torch.export.export(layer, (x,))
    assert torch.equal(program.module()(x), layer(x))


@pytest.mark.parametrize("family", [RMS, LAYER, BARE], ids=str)
def test_fake_and_meta_tensors_have_a_shape_and_a_gradient(family):
    layer = Layer(family)
    x = torch.randn(6, 16, requires_grad=True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        y = layer(fake)
        y.sum().backward()
        assert (y.shape, fake.grad.shape) == ((6, 3), (6, 16))
    meta = layer.to("meta")
    x = torch.empty(6, 16, device="meta", requires_grad=True)
    meta(x).sum().backward()
    assert x.grad.is_meta


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("family", [RMS, LAYER, BARE], ids=str)
def test_checkpointing_changes_no_gradient(family, use_reentrant):
    layer, x = Layer(family), torch.randn(6, 16)

    def run(checkpointed: bool) -> list[Tensor]:
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with RecomputeScope():
            y = checkpoint(layer, leaf, use_reentrant=use_reentrant) if checkpointed else layer(leaf)
        y.square().sum().backward()
        return [y, leaf.grad, *(parameter.grad.clone() for parameter in layer.parameters())]

    for ours, theirs in zip(run(True), run(False), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", [RMS, LAYER], ids=str)
def test_tensors_that_hooks_bring_back_serve_as_well(family):
    """Offloading gives back other tensors, and it may give them other strides."""
    layer, x = Layer(family), torch.randn(6, 16)
    expected = gradients(layer, layer, x)

    def pack(tensor: Tensor) -> Tensor:
        return tensor.detach().clone()

    def unpack(tensor: Tensor) -> Tensor:
        return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), RecomputeScope():
        ours = gradients(layer, layer, x)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("observes", "bias_dtype", "sizes"),
    [
        (False, torch.float32, [(2, 16)] * 2),
        (False, torch.float64, [(16,)] * 4),
        (True, torch.float32, [(2, 16)] * 2),
    ],
    ids=["foreign hooks", "two dtypes", "an observer"],
)
def test_weight_and_bias_are_saved_as_one_tensor(observes, bias_dtype, sizes):
    """By the norm and by the linear that recomputes its output; each tensor costs time."""
    x, weight, matrix = (torch.randn(*shape, requires_grad=True) for shape in ((6, 16), (16,), (4, 16)))
    bias = torch.randn(16, dtype=bias_dtype, requires_grad=True)
    saved: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    def gradients_of_both() -> tuple[Tensor, ...]:
        y = linear(ms_norm(x, weight, bias, NormSpec("layer", 1e-5), torch.float32), matrix, None)
        return torch.autograd.grad(y.square().sum(), (x, weight, bias, matrix))

    expected = gradients_of_both()
    pack.memopt_observer = observes
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), Region():
        ours = gradients_of_both()
    assert [size for size in saved if size in ((16,), (2, 16))] == sizes
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_autocast_does_not_change_what_a_norm_computes(family):
    """The dtype is an argument, so that autocast has nothing to say, in backward either."""
    x, weight, bias, spec = make(family, (32, 16), torch.float32)
    inputs = leaves(x, weight, bias)
    dy = torch.randn(32, 16)
    operator, given = arguments(x, weight, bias, spec)
    dtypes = (x.dtype, x.dtype)

    def both() -> list[Tensor]:
        outputs = [ms_norm(x, weight, bias, spec, x.dtype), operator(*given, *dtypes)[0]]
        return [t for y in outputs for t in (y, *torch.autograd.grad(y, inputs, dy))]

    expected = both()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for ours, theirs in zip(both(), expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def test_under_autocast_the_next_linear_shares_the_kept_tensor():
    x, _, _, spec = make(BARE, (32, 16), torch.float32)
    linear = nn.Linear(16, 4)
    kept: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bfloat16 and tensor.shape == (32, 16):
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor.detach()

    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        linear(ms_norm(x, None, None, spec, torch.bfloat16))
    assert len(kept) == 1


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_large_16_bit_tensor_goes_through_the_reference_in_parts(monkeypatch, family, residual):
    x, weight, bias, spec = make(family, (37, 6), torch.bfloat16)
    other, arguments = x.flip(0) if residual else None, spec.in_dtype(torch.bfloat16)
    dy = torch.randn(37, 6, generator=torch.Generator().manual_seed(3)).bfloat16()

    def run():
        y, x_hat, rstd = norm_ops.forward(x, weight, bias, arguments, other)
        return y, x_hat, rstd, *norm_ops.backward(dy, x_hat, rstd, weight, arguments, (True, True, True))

    with torch.no_grad():
        whole = run()
        monkeypatch.setattr(pieces, "LEAST", 1)
        by_parts = run()
    for a, b in zip(whole[:4], by_parts[:4], strict=True):
        assert (a is None and b is None) or (torch.equal(a, b) and b._version == 0)
    # Sums over rows in another order: 36 additions of terms of at most their largest size.
    for a, b, terms_of in zip(whole[4:], by_parts[4:], (whole[1].float() * dy, dy.float()), strict=True):
        assert (a - b).abs().max() <= 36 * 37 * torch.finfo(torch.float32).eps * terms_of.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_nothing_counts_as_changed_in_place(family, dtype):
    """... of what the reference returns: such a tensor would be saved instead of recomputed."""
    x, weight, bias, spec = make(family, (5, 6), dtype)
    with torch.no_grad():
        for kept in (dtype, torch.float32):
            y, x_hat, _ = norm_ops.forward(x, weight, bias, norm_ops.NormArguments(spec, dtype, kept, kept))
            assert x_hat._version == 0
            assert y is None or y._version == 0
