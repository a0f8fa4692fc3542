"""A frozen linear and its adapter as one function: the values and gradients of PEFT's own forward, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import memopt
from memopt.kernels.linear import adapted as kernel
from memopt.kernels.linear.adapted import AdaptedLinearFunction
from memopt.patches.linear import adapted
from memopt.patches.linear.adapted import AdaptedRewrite, as_adapted, run_adapted
from memopt.patches.swap import is_swapped, swap_forward
from memopt.trace.account import account
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import gradients_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for every call of the function."""
    assert as_adapted(layer())  # which is proved once
    calls: list[str] = []
    apply = AdaptedLinearFunction.apply
    monkeypatch.setattr(AdaptedLinearFunction, "apply", lambda *given: calls.append("applied") or apply(*given))
    return calls


def layer(*, bias: bool = True, dtype: torch.dtype = FP32, fp32: bool = True, **settings: Any) -> nn.Module:
    """PEFT's layer around one linear, with none of its values zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 16, bias=bias)).to(dtype)
    config = LoraConfig(r=4, **{"lora_alpha": 6, "target_modules": ["0"], "init_lora_weights": False, **settings})
    return get_peft_model(model, config, autocast_adapter_dtype=fp32).base_model.model[0].train()


def patched(module: nn.Module) -> nn.Module:
    module = copy.deepcopy(module)
    assert as_adapted(module)
    swap_forward(module, run_adapted, AdaptedRewrite())
    return module


def results(
    module: nn.Module, dtype: torch.dtype, autocast: torch.dtype | None, *, readers: int = 2
) -> dict[str, Tensor]:
    """The output, and the gradient of every leaf; with two readers of the input, the other one's gradient is added."""
    torch.manual_seed(1)
    given = torch.randn(2, 5, 24, dtype=dtype, requires_grad=True)
    module.zero_grad()
    with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
        x = given * 3
        y = module(x)
    loss = y.float().square().sum()
    (loss + x.float().square().sum() if readers == 2 else loss).backward()
    leaves = {"x": given, **dict(module.named_parameters())}
    return {"y": y.detach(), **{name: each.grad for name, each in leaves.items() if each.grad is not None}}


DTYPES = [(FP32, None, True), (FP32, BF16, True), (FP32, FP16, True), (BF16, BF16, True), (BF16, BF16, False)]
DTYPES += [(BF16, None, True), (BF16, None, False), (FP16, BF16, True)]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("dtype", "autocast", "fp32"), DTYPES)
def test_value_and_gradients_are_those_of_the_stock_layer_to_the_bit(
    dtype: torch.dtype, autocast: torch.dtype | None, fp32: bool, bias: bool, applied: list[str]
) -> None:
    stock = layer(bias=bias, dtype=dtype, fp32=fp32)
    expected, found = results(stock, dtype, autocast), results(patched(stock), dtype, autocast)
    assert len(applied) == (0 if (dtype, autocast) == (FP16, BF16) else 1)
    assert found.keys() == expected.keys() == {"y", "x", "lora_A.default.weight", "lora_B.default.weight"}
    for name, each in expected.items():
        assert found[name].dtype == each.dtype
        assert torch.equal(found[name], each), name


@pytest.mark.parametrize(("dtype", "autocast", "fp32"), DTYPES[:-1])
def test_by_pieces_value_and_gradients_are_the_same(
    dtype: torch.dtype, autocast: torch.dtype | None, fp32: bool, applied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sum is cut by a piece. Products of other sizes may add up in another order, which fp32 shows."""
    monkeypatch.setattr(kernel, "piece_bytes", lambda: 0)
    monkeypatch.setattr(kernel, "TILE", 4)
    stock = layer(dtype=dtype, fp32=fp32)
    expected, found = (results(each, dtype, autocast, readers=1) for each in (stock, patched(stock)))
    assert len(applied) == 1
    for name, each in expected.items():
        assert found[name].dtype == each.dtype
        error = (found[name] - each).abs().max()
        assert error <= 24 * torch.finfo(FP32 if each.dtype is FP32 else each.dtype).eps * each.abs().max(), name


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.jagged, torch.strided], ids=str)
def test_an_input_without_one_storage_is_left_to_the_stock_forward(layout: torch.layout, applied: list[str]) -> None:
    rows = torch.randn(7, 24)
    x = (
        rows.to_sparse()
        if layout is torch.sparse_coo
        else torch.nested.nested_tensor([rows[:2], rows[2:]], layout=layout)
    )
    stock = layer()
    found, expected = patched(stock)(x), stock(x)
    assert not applied
    for mine, each in zip(found.unbind(), expected.unbind(), strict=True):
        assert torch.equal(mine, each)


def _hooked(inner: str) -> Callable[[nn.Module], object]:
    return lambda module: module.get_submodule(inner).register_forward_hook(lambda *call: None)


LEFT: dict[str, Callable[[nn.Module], object]] = {
    "disabled": lambda module: module.enable_adapters(False),
    "a hook on A": _hooked("lora_A.default"),
    "a hook on B": _hooked("lora_B.default"),
    "a hook on the linear": _hooked("base_layer"),
    "a hook on the dropout": _hooked("lora_dropout.default"),
    "a trained weight": lambda module: module.base_layer.weight.requires_grad_(),
    "a trained bias": lambda module: module.base_layer.bias.requires_grad_(),
    "two adapters": lambda module: setattr(module, "_active_adapter", ["default", "default"]),
    "no casts": lambda module: setattr(module, "cast_input_dtype_enabled", False),
    "merged": lambda module: module.merge(),
}


@pytest.mark.parametrize("what", LEFT)
def test_another_formula_and_watched_modules_are_left_to_the_stock_forward(what: str, applied: list[str]) -> None:
    stock = layer()
    ours = patched(stock)
    for module in (stock, ours):
        LEFT[what](module)
    expected, found = results(stock, FP32, BF16), results(ours, FP32, BF16)
    assert not applied
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}], ids=str)
def test_other_kinds_of_adapters_are_left_to_the_stock_forward(settings: dict[str, Any], applied: list[str]) -> None:
    stock = layer(**settings)
    expected, found = results(stock, FP32, BF16), results(patched(stock), FP32, BF16)
    assert not applied
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def loss(model: nn.Module, autocast: torch.dtype | None) -> Tensor:
    with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
        found: Tensor = model(**tiny_inputs("llama", 2, 72)).loss
    return found


@pytest.mark.parametrize("autocast", [None, BF16], ids=["no autocast", "autocast"])
def test_a_patched_model_runs_its_adapters_so_and_saves_no_copy(
    autocast: torch.dtype | None, applied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    ours = memopt.patch(get_peft_model(tiny_model("llama"), config).train())
    others, layers = copy.deepcopy(ours), [each for each in ours.modules() if as_adapted(each)]

    def saved(model: nn.Module) -> int:
        return account(model, lambda: loss(model, autocast)).total

    found, bytes_of_one = gradients_of(ours, loss(ours, autocast)), saved(ours)
    assert len(applied) == 2 * len(layers) > 0
    monkeypatch.setattr("memopt.patches.linear.adapted.adapted_linear", lambda *given: None)
    expected = gradients_of(others, loss(others, autocast))
    assert [name for name, each in expected.items() if not torch.equal(found[name], each)] == []
    assert bytes_of_one <= saved(others)
    memopt.unpatch(ours)
    assert not any(map(is_swapped, layers))


@pytest.mark.parametrize("reentrant", [False, True], ids=["checkpointed", "checkpointed, reentrant"])
@pytest.mark.parametrize("autocast", [None, BF16], ids=["no autocast", "autocast"])
def test_a_checkpointed_region_runs_twice_with_the_same_gradients(
    autocast: torch.dtype | None, reentrant: bool, applied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", init_lora_weights=False)
    model = memopt.patch(get_peft_model(tiny_model("llama"), config).train())
    model.enable_input_require_grads()
    expected = gradients_of(model, loss(model, autocast))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    sums: list[Tensor] = []
    add = kernel._sum
    monkeypatch.setattr(kernel, "_sum", lambda *given: sums.append(given[0]) or add(*given))
    count = len(applied)
    found = gradients_of(model, loss(model, autocast))
    assert len(applied) == (2 if reentrant else 3) * count  # reentrant: the first run has no gradients
    # The second run ends where the last tensor is saved, before the product of the last linear.
    assert len(sums) == (count if reentrant else 2 * count - len(model.base_model.model.model.layers))
    assert [name for name, each in expected.items() if not torch.equal(found[name], each)] == []


def test_a_release_that_computes_something_else_runs_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = type(layer())
    stock = kind.forward

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = stock(module, x) * 1.0001
        return y

    forward.__module__, forward.__qualname__ = stock.__module__, stock.__qualname__
    assert as_adapted(layer())
    monkeypatch.setattr(kind, "forward", forward)
    assert not as_adapted(layer())
    monkeypatch.setattr(kind, "forward", stock)
    assert as_adapted(layer())


def test_the_proof_runs_outside_of_the_modes_of_the_forward_that_needs_it() -> None:
    forward: Any = type(layer()).forward
    adapted._is_proved.cache_clear()
    before = torch.get_rng_state()
    with torch.device("meta"), torch.autocast("cpu", BF16), torch.no_grad():
        assert adapted._is_proved(forward, False)
    assert torch.equal(torch.get_rng_state(), before)


# --- around a quantised linear ----------------------------------------------------------------------------------------


class Quantised(nn.Linear):
    """A linear with a forward of its own, in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype).contiguous()


def on_4_bits(self: Any, x: Tensor) -> Tensor:
    """As PEFT computes it around bitsandbytes' linears: the adapter's term is rounded before it is added."""
    result = self.base_layer(x).clone()
    casts = not torch.is_autocast_enabled("cpu")
    x = self._cast_input_dtype(x, self.lora_A.default.weight.dtype) if casts else x
    output = self.lora_B.default(self.lora_A.default(x)) * self.scaling["default"]
    return result + (output.to(result.dtype) if casts else output)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for every call of the function."""
    calls: list[str] = []
    apply = kernel.AddedAdapterFunction.apply
    monkeypatch.setattr(kernel.AddedAdapterFunction, "apply", lambda *given: calls.append("applied") or apply(*given))
    return calls


def around_quantised(dtype: torch.dtype, fp32: bool) -> nn.Module:
    module = layer(dtype=dtype, fp32=fp32)
    base = module.base_layer
    base.__class__ = Quantised
    return module


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize(("dtype", "autocast", "fp32"), DTYPES[:-1])
def test_around_a_quantised_linear_value_and_gradients_are_the_stock_layers(
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    fp32: bool,
    rounds: bool,
    pieces: bool,
    added: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = around_quantised(dtype, fp32)
    if pieces:
        monkeypatch.setattr(kernel, "piece_bytes", lambda: 0)
        monkeypatch.setattr(kernel, "TILE", 4)
    ours = copy.deepcopy(stock)
    swap_forward(ours, run_adapted, AdaptedRewrite(rounds))
    if rounds:
        monkeypatch.setattr(type(stock), "forward", on_4_bits)
        monkeypatch.setattr(type(ours), "_memopt_known_forward", on_4_bits)
        ours.__class__ = stock.__class__
        del ours.__dict__["_memopt"]
        swap_forward(ours, run_adapted, AdaptedRewrite(rounds))
    expected, found = (results(each, dtype, autocast, readers=1) for each in (stock, ours))
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].dtype == each.dtype
        error = (found[name] - each).abs().max()
        eps = torch.finfo(FP32 if each.dtype is FP32 else each.dtype).eps
        # x gets the two gradients rounded to its dtype and added, as the stock layer adds them.
        assert error <= 24 * eps * each.abs().max(), name
    # A sum of two dtypes under autocast is computed as the stock layer does.
    assert len(added) == (autocast in (None, dtype))


def test_around_a_quantised_linear_no_cast_of_the_input_is_saved() -> None:
    module = around_quantised(BF16, fp32=True)
    x = torch.randn(4, 50, 24, dtype=BF16, requires_grad=True)
    ours = copy.deepcopy(module)
    swap_forward(ours, run_adapted, AdaptedRewrite())
    stock, mine = (account(each, lambda each=each: each(x * 2)).total for each in (module, ours))
    cast, given = x.numel() * 4, x.nbytes
    assert stock - mine >= cast - given


def test_a_layer_around_a_quantised_linear_is_adopted(added: list[str]) -> None:
    model = tiny_model("llama", BF16)
    for parent in list(model.modules()):
        for child in parent.children():
            if isinstance(child, nn.Linear) and child is not model.lm_head:
                child.__class__ = Quantised
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()
    model.enable_input_require_grads()
    memopt.patch(model)
    model(**tiny_inputs("llama")).loss.backward()
    assert len(added) == 2 * 7
