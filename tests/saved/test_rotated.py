"""Queries and keys that are rotated behind a norm are recomputed; repeated keys and values are kept once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memopt.kernels.norm.function import ms_norm
from memopt.kernels.norm.reference import NormSpec
from memopt.saved import RecomputeScope
from memopt.saved.handles import Handle
from memopt.torch_compat import FakeTensorMode
from memopt.trace.account import live_bytes
from tests.saved.builders import WritesIntoWhatItKept

BATCH, TOKENS, HEADS, GROUPS, HEAD_DIM = 2, 5, 4, 2, 8
ANGLES = torch.outer(torch.arange(TOKENS), torch.logspace(0, -2, HEAD_DIM // 2)).float()
COS, SIN = ANGLES.cos(), ANGLES.sin()
WHOLE_COS, WHOLE_SIN = (torch.cat((each, each), -1) for each in (COS, SIN))
TURNS = torch.polar(torch.ones_like(ANGLES), ANGLES)
Rotation = Callable[[Tensor], Tensor]


def _half(x: Tensor) -> Tensor:
    first, second = x[..., : x.size(-1) // 2], x[..., x.size(-1) // 2 :]
    return torch.cat((-second, first), dim=-1)


def _pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _halves_apart(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * COS - second * SIN, second * COS + first * SIN), -1)


def _partial(x: Tensor) -> Tensor:
    turned, passed = x.split((HEAD_DIM // 2, HEAD_DIM - HEAD_DIM // 2), -1)
    cos, sin = (torch.cat((each[:, :2],) * 2, -1) for each in (COS, SIN))
    return torch.cat((turned * cos + _half(turned) * sin, passed), -1)


def _complex(x: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * TURNS
    return torch.view_as_real(turned).flatten(-2).type_as(x)


def _unbound(x: Tensor) -> Tensor:
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([cos_minus_sin(first, second), second * COS + first * SIN], -1).flatten(-2)


def cos_minus_sin(first: Tensor, second: Tensor) -> Tensor:
    return COS * first - SIN * second


def _rolled(x: Tensor) -> Tensor:
    sign = torch.cat((-torch.ones(HEAD_DIM // 2), torch.ones(HEAD_DIM // 2)))
    return x * WHOLE_COS + x.roll(HEAD_DIM // 2, -1) * (sign * WHOLE_SIN)


def _sections(x: Tensor) -> Tensor:
    """Of several axes (time, height, width), as multimodal models have them."""
    cos, sin = (torch.cat([each[..., i : i + 2] for i in range(0, HEAD_DIM, 2)], -1) for each in (WHOLE_COS, WHOLE_SIN))
    return (x * cos[None, None]) + (_half(x) * sin[None, None])


ROTATIONS: dict[str, Rotation] = {
    "halves": lambda x: x * WHOLE_COS + _half(x) * WHOLE_SIN,
    "halves in fp32": lambda x: (x.float() * WHOLE_COS + _half(x.float()) * WHOLE_SIN).to(x.dtype),
    "interleaved": lambda x: x * COS.repeat_interleave(2, -1) + _pairs(x) * SIN.repeat_interleave(2, -1),
    "halves apart": _halves_apart,
    "a part": _partial,
    "complex": _complex,
    "unbound pairs": _unbound,
    "rolled": _rolled,
    "sections": _sections,
    "scaled": lambda x: (x * WHOLE_COS + _half(x) * WHOLE_SIN) * 0.5 / 3,
}
DTYPES = (torch.float32, torch.bfloat16)


class Attention(nn.Module):
    """With norms of queries and keys, and fewer keys and values than queries."""

    def __init__(self, rotate: Rotation, dtype: torch.dtype = torch.float32, norm: Any = ms_norm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rotate, self.norm = rotate, norm
        self.q, self.k = (nn.Linear(16, heads * HEAD_DIM, dtype=dtype) for heads in (HEADS, GROUPS))
        self.v = nn.Linear(16, GROUPS * HEAD_DIM, dtype=dtype)
        self.q_weight, self.k_weight = (nn.Parameter(torch.rand(HEAD_DIM, dtype=dtype) + 0.5) for _ in range(2))
        self.x = torch.randn(BATCH, TOKENS, 16, dtype=dtype)

    def turned(self, project: nn.Linear, weight: Tensor | None) -> Tensor:
        heads = project(self.x).unflatten(-1, (-1, HEAD_DIM))
        return self.rotate(self.norm(heads, weight, None, NormSpec("rms", 1e-6), heads.dtype).transpose(1, 2))

    def forward(self, repeats: int = 1) -> Tensor:
        q, k = self.turned(self.q, self.q_weight), self.turned(self.k, self.k_weight)
        v = self.v(self.x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        if repeats > 1:
            k, v = (_repeated(each, repeats) for each in (k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=repeats == 1).float().square().sum()


def _repeated(x: Tensor, repeats: int) -> Tensor:
    batch, heads, tokens, width = x.shape
    return x[:, :, None].expand(batch, heads, repeats, tokens, width).reshape(batch, -1, tokens, width)


def _gradients(model: nn.Module, *given: int, scoped: bool) -> list[Tensor]:
    with RecomputeScope() if scoped else nullcontext():
        loss = model(*given)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def _agree(model: nn.Module, *given: int) -> bool:
    one, other = (_gradients(model, *given, scoped=scoped) for scoped in (False, True))
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _kept(model: nn.Module, *given: int, scoped: bool) -> int:
    def run() -> Tensor:
        with RecomputeScope() if scoped else nullcontext():
            out: Tensor = model(*given)
            return out

    return live_bytes(run)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROTATIONS)
def test_what_is_rotated_is_not_kept_and_gradients_are_the_same_to_the_bit(name: str, dtype: torch.dtype) -> None:
    rotate = ROTATIONS[name]
    model = Attention(lambda x: rotate(x).to(dtype), dtype)
    assert _agree(model)
    rotated = BATCH * TOKENS * (HEADS + GROUPS) * HEAD_DIM * dtype.itemsize
    assert _kept(model, scoped=False) - _kept(model, scoped=True) >= rotated


@pytest.mark.parametrize("name", ROTATIONS)
def test_gradients_are_those_of_a_stock_norm_in_fp64(name: str) -> None:
    def stock(x: Tensor, weight: Tensor, bias: None, spec: NormSpec, dtype: torch.dtype) -> Tensor:
        return F.rms_norm(x, (HEAD_DIM,), weight, spec.eps)

    rotate = ROTATIONS[name]
    exact = Attention(lambda x: rotate(x).double(), torch.float64, stock)
    ours, rounded = Attention(rotate), Attention(rotate, norm=stock)
    for each in (ours, rounded):  # the same weights and inputs, rounded to fp32
        each.load_state_dict(exact.state_dict())
        each.x = exact.x.float()
    expected = _gradients(exact, scoped=False)
    stocks = [(a - b).norm() / b.norm() for a, b in zip(_gradients(rounded, scoped=False), expected, strict=True)]
    # Another norm rounds elsewhere: as often as stock does, and fp32's epsilon for what rounds to nothing.
    for ours_is, exact_is, stock_off in zip(_gradients(ours, scoped=True), expected, stocks, strict=True):
        off = (ours_is - exact_is).norm() / exact_is.norm()
        assert off <= 2 * max(stock_off, max(stocks)) + torch.finfo(torch.float32).eps


def test_a_norm_without_an_affine_keeps_its_output_and_nothing_else() -> None:
    class Bare(Attention):
        def forward(self) -> Tensor:
            q, k = self.turned(self.q, None), self.turned(self.k, None)
            return F.scaled_dot_product_attention(q, k, k, enable_gqa=True).square().sum() + 0 * self.v.weight.sum()

    model = Bare(ROTATIONS["halves"])
    del model.q_weight, model.k_weight, model.v.bias
    assert _agree(model)
    assert _kept(model, scoped=False) - _kept(model, scoped=True) == BATCH * TOKENS * (HEADS + GROUPS) * HEAD_DIM * 4


@pytest.mark.parametrize("rotated", [False, True])
def test_repeated_keys_and_values_are_never_kept_repeated(rotated: bool) -> None:
    model = Attention(ROTATIONS["halves"] if rotated else lambda x: x + 1)
    assert _agree(model, HEADS // GROUPS)
    whole, once = (BATCH * TOKENS * heads * HEAD_DIM * 4 for heads in (HEADS, GROUPS))
    # Rotated, nothing of queries and keys is kept; otherwise keys are kept once, as values are.
    expected = 3 * whole - once if rotated else 2 * (whole - once)
    stock, ours = (_kept(model, HEADS // GROUPS, scoped=scoped) for scoped in (False, True))
    assert stock - ours == expected


# --- what is another value -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["norm", "factor", "half"])
def test_a_change_behind_autograd_is_seen(where: str) -> None:
    def rotate(x: Tensor) -> Tensor:
        scaled, half = x * WHOLE_COS, _half(x)
        with torch.no_grad():
            {"norm": x, "factor": scaled, "half": half}[where].mul_(3)
        return scaled + half * WHOLE_SIN

    model = Attention(rotate)
    assert _agree(model)
    assert _kept(model, scoped=True) == _kept(model, scoped=False)


def test_a_norm_that_is_changed_from_the_second_call_on_is_seen() -> None:
    calls: list[bool] = []

    def rotate(x: Tensor) -> Tensor:
        if len(calls) > 1:
            with torch.no_grad():
                x.mul_(3)
        calls.append(True)
        return x * WHOLE_COS + _half(x) * WHOLE_SIN

    model, proofs = Attention(rotate), {}
    for _ in range(2):
        with RecomputeScope(proofs=proofs):
            loss = model()
        ours = torch.autograd.grad(loss, list(model.parameters()))
    assert all(proofs.values())
    assert all(torch.equal(a, b) for a, b in zip(ours, _gradients(model, scoped=False), strict=True))


def test_a_cosine_that_is_changed_after_the_forward_is_an_error_as_in_stock() -> None:
    cos = WHOLE_COS.clone()
    model = Attention(lambda x: x * cos + _half(x) * WHOLE_SIN)
    for scoped in (False, True):
        with RecomputeScope() if scoped else nullcontext():
            loss = model()
        cos.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("learned", ["leaf", "computed"])
def test_learned_angles_have_their_gradient(learned: str) -> None:
    class Learned(Attention):
        def __init__(self) -> None:
            super().__init__(self.turn)
            self.angles = nn.Parameter(torch.cat((ANGLES, ANGLES), -1))

        def turn(self, x: Tensor) -> Tensor:
            if learned == "leaf":
                return x * self.angles + _half(x) * WHOLE_SIN
            return x * self.angles.cos() + _half(x) * self.angles.sin()

    model = Learned()
    assert _agree(model)
    assert _kept(model, scoped=True) <= _kept(model, scoped=False)


def test_a_frozen_parameter_is_not_read_later() -> None:
    """Sharding may have freed it by then."""
    scale = nn.Parameter(torch.rand(HEAD_DIM) + 0.5, requires_grad=False)
    model = Attention(lambda x: x * scale)
    assert _agree(model)
    assert _kept(model, scoped=True) == _kept(model, scoped=False)


# --- how often, and how long -----------------------------------------------------------------------------------------


def test_a_module_compares_at_its_first_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Tensor] = []
    gives = Handle.gives
    monkeypatch.setattr(Handle, "gives", lambda self, base: compared.append(base) or gives(self, base))
    model, proofs = Attention(ROTATIONS["halves"]), {}
    for _ in range(3):
        with RecomputeScope(proofs=proofs):
            model()
    assert sorted(each.shape[1] for each in compared) == [GROUPS, HEADS]


def test_what_did_not_give_the_tensor_is_not_tried_again() -> None:
    def rotate(x: Tensor) -> Tensor:
        turned = x * WHOLE_COS
        with torch.no_grad():
            turned.mul_(factor)
        return turned + _half(x) * WHOLE_SIN

    model, proofs = Attention(rotate), {}
    for factor in (3.0, 1.0):  # noqa: B007 - read by `rotate`
        with RecomputeScope(proofs=proofs) as _:
            model()
        assert proofs
        assert not any(proofs.values())


@pytest.mark.parametrize("is_fake", [False, True])
@pytest.mark.parametrize(
    ("cast", "dtype", "keeps_input", "is_exact"),
    [
        ("after", torch.float32, False, True),
        ("before", torch.bfloat16, False, True),
        ("after", torch.bfloat16, False, False),
        ("after", torch.bfloat16, True, True),
    ],
)
def test_a_norm_that_rounds_after_its_weight_is_recomputed_for_rotations_in_16_bits_from_its_input_alone(
    cast: Any, dtype: torch.dtype, keeps_input: bool, is_exact: bool, is_fake: bool
) -> None:
    """Its x_hat, rounded, gives other bits back; not before the weights are trained, if all are 1."""
    spec, proofs = NormSpec("rms", 1e-6, cast=cast), {}

    def norm(x: Tensor, *given: Any) -> Tensor:
        return ms_norm(x, *given[:2], spec, dtype, keeps_input=keeps_input)

    with FakeTensorMode() if is_fake else nullcontext():
        model = Attention(lambda x: x * 0.7 + _half(x) * 0.3, dtype, norm)
        for scale in (1, 1.3):
            with torch.no_grad():
                model.q_weight.fill_(scale), model.k_weight.fill_(scale)
            with RecomputeScope(proofs=proofs):
                loss = model()
            assert set(proofs.values()) == {is_exact}
            ours, stock = torch.autograd.grad(loss, list(model.parameters())), _gradients(model, scoped=False)
            assert is_fake or all(map(torch.equal, ours, stock))


def test_views_of_one_rotated_tensor_are_computed_once_together() -> None:
    turned: list[Tensor] = []

    def run() -> Tensor:
        x = ms_norm(given, weight, None, NormSpec("rms", 1e-6), torch.float32)
        y = ROTATIONS["halves"](x)
        return sum((part * factor).sum() for part, factor in zip(y.unbind(0), factors, strict=True))  # type: ignore

    given, weight = torch.randn(6, TOKENS, HEAD_DIM, requires_grad=True), torch.ones(HEAD_DIM, requires_grad=True)
    factors = [torch.ones(HEAD_DIM, requires_grad=True) for _ in range(6)]
    leaves = [given, weight, *factors]
    expected = torch.autograd.grad(run(), leaves)
    with RecomputeScope():
        loss = run()
    make = Handle._make

    def counted(self: Handle) -> Tensor:
        turned.append(make(self))
        return turned[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handle, "_make", counted)
        ours = torch.autograd.grad(loss, leaves)
    assert len(turned) == 1
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def test_a_retained_graph_gives_the_same_gradients_again() -> None:
    model = Attention(ROTATIONS["halves"])
    with RecomputeScope():
        loss = model(2)
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    for parameter in parameters:  # and a part of it
        torch.autograd.grad(loss, parameter, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("partly", [False, True])
def test_the_graph_is_freed_when_it_is_dropped(partly: bool) -> None:
    model = Attention(ROTATIONS["halves"])
    norms: list[weakref.ref[Any]] = []

    def noted(*given: Any) -> Tensor:
        y = ms_norm(*given)
        norms.append(weakref.ref(y.grad_fn))
        return y

    model.norm = noted
    gc.collect()
    gc.disable()
    try:
        with RecomputeScope():
            loss = model()
        if partly:
            torch.autograd.grad(loss, model.v.weight, retain_graph=True)
        del loss
        assert [each() for each in norms] == [None, None]
    finally:
        gc.enable()


def test_autocast_around_forward_or_backward_changes_nothing() -> None:
    model = Attention(ROTATIONS["halves in fp32"])

    def gradients(*, scoped: bool) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            with RecomputeScope() if scoped else nullcontext():
                loss = model()
            return list(torch.autograd.grad(loss, list(model.parameters())))

    one, other = gradients(scoped=False), gradients(scoped=True)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("inside", ["norm", "rotation", "scope"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_each_of_its_tensors_back_once(inside: str, use_reentrant: bool) -> None:
    """Of a part of the block, or of the block with its scope."""

    def checkpointed(function: Callable[..., Tensor]) -> Callable[..., Any]:
        return lambda *given: checkpoint(function, *given, use_reentrant=use_reentrant)

    model = Attention(ROTATIONS["halves"])
    if inside == "norm":
        model.norm = checkpointed(ms_norm)
    elif inside == "rotation":
        model.rotate = checkpointed(ROTATIONS["halves"])

    def gradients(*, scoped: bool) -> list[Tensor]:
        def run(_: Tensor) -> Tensor:
            with RecomputeScope() if scoped else nullcontext():
                loss: Tensor = model(2)
                return loss

        model.zero_grad()
        start = torch.ones(1, requires_grad=True)
        (checkpointed(run) if inside == "scope" else run)(start).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    one, other = gradients(scoped=False), gradients(scoped=True)
    assert len(one) == len(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("rotation", [None, "halves"])
def test_a_function_that_writes_into_what_it_kept_changes_nothing_for_others(rotation: str, affine: bool) -> None:
    class Both(Attention):
        def forward(self) -> Tensor:
            q = self.turned(self.q, self.q_weight if affine else None)
            written = WritesIntoWhatItKept.apply(q[None].clone())
            unused = sum(p.sum() for p in self.parameters()) * 0
            return (q.sin() + q.cos() + written).sum() + unused

    assert _agree(Both(ROTATIONS[rotation] if rotation else lambda x: x))


# --- repeated --------------------------------------------------------------------------------------------------------


def _bytes_saved(run: Callable[[], Tensor]) -> int:
    def scoped() -> Tensor:
        with RecomputeScope():
            return run()

    return live_bytes(run) - live_bytes(scoped)


def test_a_repeated_tensor_that_was_changed_in_place_is_kept() -> None:
    x, factor = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 6, 4, requires_grad=True)

    def run() -> Tensor:
        repeated = (x * 1.0)[:, :, None].expand(2, 3, 2, 4).reshape(2, 6, 4)
        with torch.no_grad():
            repeated[0].mul_(torch.arange(6.0)[:, None])
        return (repeated * factor).sum()

    expected = torch.autograd.grad(run(), [x, factor])
    with RecomputeScope():
        loss = run()
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, [x, factor]), expected, strict=True))
    assert _bytes_saved(run) == 0


REPEATS = {
    "interleaved": lambda x: x.repeat_interleave(3, 1),
    "expanded": lambda x: x[None].expand(3, *x.shape).clone(),
    "repeated": lambda x: x.repeat(3, 1, 1),
    "repeated inside": lambda x: x.repeat(1, 1, 3, 1),
}


@pytest.mark.parametrize("repeat", REPEATS.values(), ids=REPEATS)
def test_one_of_the_repeats_is_kept(repeat: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    factor = torch.ones_like(repeat(x)).requires_grad_()

    def run() -> Tensor:
        return (repeat(x * 1.0) * factor).sum()

    with RecomputeScope():
        loss = run()
    assert torch.equal(torch.autograd.grad(loss, factor)[0], repeat(x))
    assert _bytes_saved(run) == 2 * x.nbytes


def test_a_part_of_the_repeats_is_kept_as_it_is() -> None:
    """Each of many readers of a part would keep one."""
    x, factor = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)

    def run() -> Tensor:
        repeated = (x * 1.0).repeat_interleave(2, 1)
        return sum((repeated[:, i] * factor).sum() for i in range(6))  # type: ignore[return-value]

    assert _bytes_saved(run) == 0
