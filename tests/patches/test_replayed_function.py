"""Pure functions of a model's code keep their arguments only, and compute the same bits."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import threading
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import memopt
from memopt.patches.functions import patch_functions
from memopt.patches.record import record_of
from memopt.patches.replayed_function.module import ReplayedFunctions
from memopt.patches.replayed_function.patch import ReplayedFunctionPatch
from memopt.pipeline import patch_checkpoint
from memopt.plan.recipe import load_recipe
from memopt.trace.account import account
from memopt.walk.models.plain import STANDS_FOR_KERNEL
from memopt.walk.observe import walk_model
from tests.zoo.build import saved_twin

WIDTH = 6


def scan(x: Tensor, *, decay: Tensor, chunks: int = 2, mode: str = "plain") -> tuple[Tensor, None, Tensor]:
    """A recurrence with more intermediates than arguments; its last output has no gradient."""
    state = torch.zeros_like(x[:, 0])
    outputs = []
    for part in x.unbind(1):
        state = torch.tanh(state * decay.exp()) + part.sin().exp()
        outputs.append(state)
    return torch.stack(outputs, 1), None, state.detach() > 0


def of_several(pair: tuple[Tensor, Tensor], scale: float) -> list[Tensor]:
    first, second = (each.exp().sin().exp() for each in pair)
    return [first * scale, (first * second).tanh()]


def drawing(x: Tensor) -> Tensor:
    return F.dropout(x.exp().sin().exp(), 0.5)


def writing(x: Tensor, state: Tensor) -> Tensor:
    """The second time, its state is another one."""
    state.add_(x.detach())
    return (x.exp().sin().exp() * state).tanh().exp()


def writing_into_long(x: Tensor, state: Tensor, length: int) -> Tensor:
    """What it changes depends on a number, whose value is no part of the form of a call."""
    return writing(x, state) if length > 4 else x.exp().sin().exp().tanh().exp()


def with_product(x: Tensor, weight: Tensor) -> Tensor:
    """Autocast computes its product in 16 bits."""
    return (x.exp().sin() @ weight).tanh().exp().sin().tanh()


def passing_on(x: Tensor) -> Tensor:
    x.exp().sin()
    return x.view(-1).view_as(x)


def of_a_module(x: Tensor, module: nn.Module) -> Tensor:
    return x.exp().sin().exp() * len(list(module.children()))


def reading_values(x: Tensor) -> Tensor:
    return x.exp().sin().exp() * (2 if x.sum().item() > 0 else 3)


class Rounding(Enum):
    DOWN = "down"
    UP = "up"


def by_name(x: Tensor, rounding: Rounding) -> Tensor:
    """The member of the enumeration decides what runs."""
    inside = x.exp().sin()
    return inside.exp().tanh() if rounding is Rounding.UP else inside.exp().sin().tanh()


PURE = ("scan", "of_several", "with_product", "by_name")
IMPURE = ("drawing", "writing", "passing_on", "of_a_module", "reading_values")


class Caller(nn.Module):
    """Calls one of the functions above by its name in this file, between two linears."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.decay = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.function == "scan":
            output, _, sign = scan(hidden, decay=self.decay)
            assert not sign.requires_grad
            return self._last(output)
        if self.function == "of_several":
            _, other = of_several((hidden, hidden * self.decay), 1.5)
            return self._last(other)
        if self.function == "with_product":
            return self._last(with_product(hidden, torch.outer(self.decay, self.decay)))
        if self.function == "by_name":
            up, down = (by_name(hidden, each) for each in (Rounding.UP, Rounding.DOWN))
            return self._last(up * self.decay + down)
        more: dict[str, Any] = {"writing": {"state": torch.zeros_like(x)}, "of_a_module": {"module": self}}
        return self._last(globals()[self.function](hidden, **more.get(self.function, {})) * self.decay)

    def _last(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.last(hidden)
        return output


def caller(function: str, *, patched: bool) -> Caller:
    torch.manual_seed(1)
    module = Caller(function)
    if patched:
        patch_functions(module, ReplayedFunctions([(__name__, function)]))
    return module


def run(module: nn.Module, call: Callable[..., Tensor] | None = None) -> tuple[list[Tensor], int]:
    """Output and gradients; bytes saved beside parameters."""
    x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = (call or module)(x)
    nbytes = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    gradients = torch.autograd.grad(y.square().sum(), [x, *module.parameters()], retain_graph=True)
    again = torch.autograd.grad(y.square().sum(), [x, *module.parameters()])
    assert all(map(torch.equal, gradients, again))
    return [y.detach(), *gradients], nbytes


@pytest.mark.parametrize("function", PURE)
def test_bits_are_the_same_and_only_arguments_are_saved(function: str) -> None:
    (expected, before), (found, after) = (run(caller(function, patched=patched)) for patched in (False, True))
    assert len(found) == len(expected) == 7
    assert all(map(torch.equal, expected, found))
    assert after < 0.6 * before


@pytest.mark.parametrize("function", IMPURE)
def test_what_is_not_pure_is_called_as_before(function: str) -> None:
    (expected, before), (found, after) = (run(caller(function, patched=patched)) for patched in (False, True))
    assert all(map(torch.equal, expected, found))
    assert after == before


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing_the_gradients_are_the_same(reentrant: bool) -> None:
    stock, patched = caller("scan", patched=False), caller("scan", patched=True)
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64, requires_grad=True)
    for module in (stock, patched):
        checkpoint(module, x, use_reentrant=reentrant).square().sum().backward()
    first, second = ([p.grad for p in module.parameters() if p.grad is not None] for module in (stock, patched))
    assert len(first) == 5
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("function", PURE)
def test_under_autocast_it_runs_again_as_it_ran(function: str) -> None:
    found = []
    for patched in (False, True):
        module = caller(function, patched=patched).float()
        x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(2))
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        y.float().square().sum().backward()
        found.append([y, *(parameter.grad for parameter in module.parameters())])
    assert all(map(torch.equal, *found))


def test_the_name_stands_for_the_function_again_when_the_module_has_run() -> None:
    module, inside, before = caller("scan", patched=True), list[bool](), scan
    module.first.register_forward_hook(lambda *_: inside.append(scan is before))
    run(module)
    assert inside == [False]
    assert scan is before
    module.last.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(module)
    assert scan is before


def test_another_thread_calls_the_function_itself() -> None:
    module, names = caller("scan", patched=True), list[str]()
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64, requires_grad=True)

    def elsewhere(*_: Any) -> None:
        thread = threading.Thread(target=lambda: names.append(type(scan(x, decay=x[0, 0])[0].grad_fn).__name__))
        thread.start()
        thread.join()
        names.append(type(scan(x, decay=x[0, 0])[0].grad_fn).__name__)

    module.first.register_forward_hook(elsewhere)
    module(x)
    assert names == ["StackBackward0", "ReplayedCallFunctionBackward"]


def test_copies_and_pickles_of_a_module_save_as_little() -> None:
    module = caller("scan", patched=True)
    _, expected = run(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert run(other)[1] == expected


def test_a_kernel_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = scan

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    setattr(kernel, STANDS_FOR_KERNEL, True)
    monkeypatch.setattr(sys.modules[__name__], "scan", kernel)
    (_, before), (_, after) = (run(caller("scan", patched=patched)) for patched in (False, True))
    assert after == before


def test_an_argument_that_is_changed_before_backward_is_an_error() -> None:
    module = caller("scan", patched=True)
    y = module(torch.randn(2, 9, WIDTH, dtype=torch.float64))
    with torch.no_grad():
        module.decay.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_function_that_changes_an_argument_in_some_calls_only_is_an_error_there() -> None:
    functions, x = ReplayedFunctions([]), torch.randn(3, WIDTH, requires_grad=True)
    state = torch.ones(3, WIDTH)
    functions.call(writing_into_long, (x, state, 3), {}).sum().backward()
    with pytest.raises(RuntimeError, match=r"changed its arguments.*functions.method=none"):
        functions.call(writing_into_long, (x, state, 9), {})


def test_a_second_derivative_is_refused() -> None:
    module = caller("scan", patched=True)
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


def test_several_gradients_at_once_are_those_of_the_stock_module() -> None:
    found: list[Tensor] = []
    for patched in (False, True):
        module = caller("scan", patched=patched)
        x = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
        y = module(x)
        each = torch.stack([torch.ones_like(y), y.detach()])
        found += torch.autograd.grad(y, x, each, is_grads_batched=True)
    assert torch.equal(*found)


def model_of(model_type: str) -> PreTrainedModel:
    own: dict[str, Any] = {
        "qwen3_5_text": {
            "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "intermediate_size": 96, "num_hidden_layers": 4,
        },
        "mamba2": {"num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
        "rwkv": {"num_hidden_layers": 2, "attention_hidden_size": 64, "intermediate_size": 96},
    }[model_type]  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, hidden_size=64, vocab_size=128, **own)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.train()
    return model


@pytest.mark.parametrize(
    ("model_type", "called", "share"),
    [
        ("qwen3_5_text", ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"), 0.5),
        ("mamba2", ("causal_conv1d_fn", "mamba2_chunk_scan"), 0.25),
        ("rwkv", ("rwkv_linear_attention",), 0.7),
    ],
)
def test_models_of_this_kind_keep_less_and_have_the_same_gradients(
    model_type: str, called: tuple[str, ...], share: float
) -> None:
    model = model_of(model_type)
    sites = walk_model(model).functions
    assert {tuple(name for _, name in site.functions) for site in sites} == {called}
    batch = {"input_ids": torch.arange(64).reshape(1, 64), "labels": torch.arange(64).reshape(1, 64)}
    kept: list[int] = []
    gradients: list[list[Tensor]] = []
    for overrides in (["functions.method=none"], []):
        patched = memopt.patch(copy.deepcopy(model), load_recipe("exact-unfolded", overrides))
        kept.append(account(patched, functools.partial(patched, **batch)).total)
        patched(**batch).loss.backward()
        gradients.append([parameter.grad for parameter in patched.parameters() if parameter.grad is not None])
    assert kept[1] < share * kept[0]
    assert len(gradients[0]) > 10
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.rotates(3)
def test_verify_allows_a_function_to_free_what_the_stock_model_saves(
    allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("qwen3_5_text")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    memopt.patch_checkpoint(tmp_path / "model", tmp_path / "out")
    if not allowed:
        monkeypatch.setattr(ReplayedFunctionPatch, "frees", lambda self, plan: ())
    checks = {check.id: check.status for check in memopt.verify(tmp_path / "out", level="memory").checks}
    assert checks.pop("memory.transient") == ("pass" if allowed else "fail")
    assert set(checks.values()) == {"pass"}


def test_a_module_that_is_one_activation_is_rewritten_once(tmp_path: Path) -> None:
    assert saved_twin("esm", tmp_path / "esm")  # its intermediate layer is a linear and a GELU in five operations
    patch_checkpoint(tmp_path / "esm", tmp_path / "patched", recipe="exact-levels")
    record = record_of(memopt.load(tmp_path / "patched"))
    assert record is not None
    assert "esm.encoder.layer.0.intermediate" in {each.name for each in record.plan.chosen("activation")}
    assert record.refused == ()
