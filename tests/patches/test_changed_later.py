"""What is changed in a module after it was patched counts, in train mode as in the stock module.

For one module of each patched kind the changes are generated: every attribute, parameter, child and method of it, and
of what is inside it, is changed in each way that it can be.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from transformers import GemmaConfig, LlamaConfig, Phi3Config, T5Config
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense
from transformers.pytorch_utils import Conv1D

from memopt.patches.activation.module import patch_activation
from memopt.patches.convolution import module as convolutions
from memopt.patches.dropout.module import patch_dropout
from memopt.patches.gated_mlp.module import patch_gated_mlp
from memopt.patches.linear.adapted import AdaptedRewrite, as_adapted, run_adapted
from memopt.patches.linear.module import patch_linear
from memopt.patches.loss.module import patch_head
from memopt.patches.norm.module import patch_norm
from memopt.patches.replay import patch_replay
from memopt.patches.scope import ScopeRewrite
from memopt.patches.sum_norm import module as sum_norms
from memopt.patches.sum_norm import probe as sum_norm_probe
from memopt.patches.swap import is_as_patched, original_class, swap_forward, unswap
from memopt.walk.probes.elementwise import probe_activation
from memopt.walk.probes.gated import with_form
from memopt.walk.probes.probe import NormProbe, probe_norm
from memopt.walk.sites import ActivationSite, GatedMLPSite, NormSite, Sites

WIDTH = 12
INTERNAL = {*vars(nn.Module()), "_memopt", "_memopt_reads", "_is_hf_initialized"}
#: Roundings of fp32, to which many modules cast inside, along a sum of a few dozen terms.
ROUNDING = 64 * torch.finfo(torch.float32).eps


@dataclasses.dataclass
class Settings:
    eps: float = 1e-3
    scale: float = 1.0


class ConfiguredNorm(nn.Module):
    """Reads its class, its settings and a buffer."""

    power = 2

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.zeros(()))
        self.scales = [1.0]

    @property
    def eps(self) -> float:
        return self.settings.eps

    def root(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(self.power).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.root(x) * self.settings.scale * self.scales[0] + self.shift


class OwnMLP(nn.Module):
    """Holds its activation as a function, and limits that are out of reach."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.act, self.alpha, self.dropout, self.is_limited, self.limit = F.silu, 1.0, 0.0, False, 1.0

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        if self.is_limited:
            up = up.clamp(-self.limit, self.limit)
        return self.down(F.dropout(self.act(self.alpha * gate) * up, self.dropout, self.training))


class ScaledLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = nn.Parameter(torch.randn(8, WIDTH)), nn.Parameter(torch.randn(8)), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) * self.scale


class Snake(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.dropout, self.power = nn.Parameter(torch.rand(WIDTH) + 0.5), 0.0, 2

    def forward(self, x: Tensor) -> Tensor:
        y = x + (x * self.alpha).sin().pow(self.power) / self.alpha
        return F.dropout(y, self.dropout, self.training)


class GatedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.act, self.eps = nn.Parameter(torch.ones(WIDTH)), nn.LeakyReLU(0.1), 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.act(x)


class SumNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.between, self.norm = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), nn.LayerNorm(WIDTH, eps=1e-3)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.norm(self.between(self.dense(hidden)) + residual)


def norm_site(module: nn.Module) -> NormSite:
    probe = probe_norm(module)
    assert isinstance(probe, NormProbe)
    return NormSite(
        "", probe.kind, probe.hidden_size or WIDTH, probe.eps, probe.weight, probe.bias, probe.offset, probe.cast
    )


#: Patches a module.
Patch = Callable[[nn.Module], object]


def a_norm(module: nn.Module, folded: bool = False) -> Patch:
    site = norm_site(module)
    return lambda each: patch_norm(each, site, folded=folded)


def an_activation(module: nn.Module) -> Patch:
    probe = probe_activation(module)
    assert probe is not None
    site = ActivationSite("", probe.kind, True, probe.operations)
    return lambda each: patch_activation(each, site)


def an_mlp(
    module: nn.Module, kind: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Patch:
    site = with_form(module, GatedMLPSite("", kind, *(f"{name}.weight" for name in (gate, up, down))))
    assert site.form is not None
    return lambda each: patch_gated_mlp(each, site, ScopeRewrite(frozenset()))


def patch_an_adapted_linear(module: nn.Module) -> None:
    assert as_adapted(module)
    swap_forward(module, run_adapted, AdaptedRewrite())


def a_sum_norm(module: nn.Module) -> Patch:
    norm = norm_site(module.norm)
    sites = Sites("M", "m", norms=(dataclasses.replace(norm, name="a.norm"),))
    (site,) = sum_norm_probe.find(nn.ModuleDict({"a": module}), sites)

    def patch(each: nn.Module) -> None:
        patch_norm(each.norm, norm, folded=False)
        sum_norms.patch_sum_norm(each, site, None)

    return patch


def adapted() -> nn.Module:
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["0"], init_lora_weights=False)
    return get_peft_model(nn.Sequential(nn.Linear(WIDTH, 8)), config).base_model.model[0]


def mlp(name: str) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 20}
    if name == "t5":
        return T5DenseGatedActDense(T5Config(d_model=WIDTH, d_ff=20, dropout_rate=0.0, feed_forward_proj="gated-gelu"))
    if name == "llama":
        return LlamaMLP(LlamaConfig(num_attention_heads=2, **sizes))
    return Phi3MLP(Phi3Config(**sizes)) if name == "phi3" else GemmaMLP(GemmaConfig(**sizes))


#: How to make a module, and how to find the patch of all that are made so: that runs the module many times.
Kind = tuple[Callable[[], nn.Module], Callable[[nn.Module], Patch]]
KINDS: dict[str, Kind] = {
    "layer norm": (lambda: nn.LayerNorm(WIDTH, eps=1e-3), a_norm),
    "layer norm without bias": (lambda: nn.LayerNorm(WIDTH, eps=1e-3, bias=False), a_norm),
    "layer norm without affine": (lambda: nn.LayerNorm(WIDTH, eps=1e-3, elementwise_affine=False), a_norm),
    "rms norm": (lambda: nn.RMSNorm(WIDTH, eps=1e-3), a_norm),
    "rms norm of machine eps": (lambda: nn.RMSNorm(WIDTH), a_norm),
    "llama's norm": (lambda: LlamaRMSNorm(WIDTH, eps=1e-3), a_norm),
    "gemma's norm": (lambda: GemmaRMSNorm(WIDTH, eps=1e-3), a_norm),
    "configured norm": (ConfiguredNorm, a_norm),
    "folded norm": (lambda: nn.LayerNorm(WIDTH, eps=1e-3), lambda module: a_norm(module, folded=True)),
    "sum norm": (SumNorm, a_sum_norm),
    "llama's MLP": (lambda: mlp("llama"), lambda module: an_mlp(module, "silu")),
    "gemma's MLP": (lambda: mlp("gemma"), lambda module: an_mlp(module, "gelu_tanh")),
    "phi3's MLP": (lambda: mlp("phi3"), lambda module: an_mlp(module, "silu", "gate_up_proj", "gate_up_proj")),
    "t5's MLP": (lambda: mlp("t5"), lambda module: an_mlp(module, "gelu_tanh", "wi_0", "wi_1", "wo")),
    "own MLP": (OwnMLP, lambda module: an_mlp(module, "silu", "gate", "up", "down")),
    "gelu_new": (lambda: ACT2FN["gelu_new"], an_activation),
    "quick_gelu": (lambda: ACT2FN["quick_gelu"], an_activation),
    "gelu": (lambda: nn.GELU(approximate="tanh"), an_activation),
    "leaky relu": (lambda: nn.LeakyReLU(0.2), an_activation),
    "Conv1D": (lambda: Conv1D(8, WIDTH), lambda _: patch_linear),
    "scaled linear": (ScaledLinear, lambda _: patch_linear),
    "linear": (lambda: nn.Linear(WIDTH, 8), lambda _: patch_linear),
    "adapted linear": (adapted, lambda _: patch_an_adapted_linear),
    "snake": (Snake, lambda _: patch_replay),
    "gated norm": (GatedNorm, lambda _: patch_replay),
    "group norm": (lambda: nn.GroupNorm(1, 7, eps=1e-3), lambda _: patch_replay),
    "convolution": (lambda: nn.Conv1d(7, 6, 3, padding=1), lambda _: convolutions.patch_convolution),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small modules run as large ones do, and on the CPU as where there is a kernel."""
    monkeypatch.setattr(convolutions, "LARGE", 1)
    monkeypatch.setattr(convolutions, "recomputes", lambda _: True)
    monkeypatch.setattr(sum_norms, "runs_triton", lambda *_: True)


#: change(module) of a module or a child of it; its name says what it does.
Change = tuple[str, Callable[[nn.Module], None]]


def changes(module: nn.Module) -> Iterator[Change]:
    """Every change of `module` and what is inside it."""
    for name, inner in module.named_modules():
        for what, change in (*of_attributes(inner), *of_tensors(inner), *of_calls(inner)):
            if name and what.endswith("of one"):
                continue  # the sum of a bias's gradient in front of a norm is zero but for roundings
            yield f"{name}.{what}", functools.partial(_at, name, change)


def _at(name: str, change: Callable[[nn.Module], None], module: nn.Module) -> None:
    change(module.get_submodule(name))


def of_attributes(module: nn.Module) -> Iterator[Change]:
    for name, value in vars(module).items():
        if name in INTERNAL:
            continue
        for other in others(value):
            yield f"{name} = {other}", lambda m, name=name, other=other: setattr(m, name, other)
        if isinstance(value, list) and value:
            yield f"{name}[0] doubled", lambda m, name=name: getattr(m, name).__setitem__(0, getattr(m, name)[0] * 2)
        if isinstance(value, dict) and all(isinstance(each, float) for each in value.values()):
            yield (
                f"{name} doubled",
                lambda m, name=name: getattr(m, name).update({key: each * 2 for key, each in getattr(m, name).items()}),
            )
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                if not isinstance(getattr(value, field.name), float):
                    continue
                yield (
                    f"{name}.{field.name} doubled",
                    lambda m, name=name, field=field.name: setattr(
                        getattr(m, name), field, getattr(getattr(m, name), field) * 2
                    ),
                )
    for name, value in vars(original_class(module)).items():
        if original_class(module).__module__.startswith("torch."):
            break
        if name.startswith("__") or name == "forward" or isinstance(value, property):
            continue
        if isinstance(value, types.FunctionType):
            yield (
                f"{name} replaced",
                lambda m, name=name, value=value: m.__dict__.__setitem__(name, lambda *args: value(m, *args) * 2),
            )
        elif isinstance(value, (int, float)):
            yield f"{name} doubled", lambda m, name=name, value=value: setattr(m, name, value * 2)


def others(value: Any) -> Iterator[Any]:
    """Values of the kind of `value`."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield from (value * 2, 0.25 if value == 0 else value * 100)
    elif isinstance(value, str):
        yield from ("none", "tanh", "circular", "same")
    elif value is None:
        yield 0.5
    elif callable(value):
        yield torch.tanh


def of_tensors(module: nn.Module) -> Iterator[Change]:
    for name in [*module._parameters, *module._buffers]:
        if getattr(module, name) is None:
            yield f"{name} given", lambda m, name=name: setattr(m, name, nn.Parameter(torch.full((WIDTH,), 2.0)))
            continue
        yield f"{name} in place", lambda m, name=name: getattr(m, name).detach().add_(1)
        yield f"{name}.data", lambda m, name=name: setattr(getattr(m, name), "data", getattr(m, name).data + 1)
        yield f"{name} = None", lambda m, name=name: setattr(m, name, None)
        yield f"{name} as a buffer", functools.partial(_as_buffer, name)
        if name in module._parameters:
            yield f"{name} exchanged", lambda m, name=name: setattr(m, name, nn.Parameter(getattr(m, name).data + 1))
            yield f"{name} frozen", lambda m, name=name: getattr(m, name).requires_grad_(False)
            yield f"{name} of one", lambda m, name=name: setattr(m, name, nn.Parameter(torch.full((1,), 2.0)))
            yield f"{name} parametrised", lambda m, name=name: parametrize.register_parametrization(m, name, Doubled())
            yield f"{name} pruned", lambda m, name=name: prune.l1_unstructured(m, name, amount=0.3)
    for dtype in (torch.float64, torch.bfloat16):
        yield f"to {dtype}", lambda m, dtype=dtype: m.to(dtype)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def _as_buffer(name: str, module: nn.Module) -> None:
    value = getattr(module, name).detach() + 1
    delattr(module, name)
    module.register_buffer(name, value)


def of_calls(module: nn.Module) -> Iterator[Change]:
    yield "hooked", lambda m: m.register_forward_hook(lambda _, args, output: output * 2) and None
    yield "given pre-hook", lambda m: m.register_forward_pre_hook(lambda _, args: tuple(x * 2 for x in args)) and None
    yield "forward replaced", lambda m: setattr(m, "forward", lambda *args: original_class(m).forward(m, *args) * 2)
    yield "in eval mode", lambda m: m.eval() and None
    for name, child in module._modules.items():
        if child is not None:
            yield f"{name} = tanh", lambda m, name=name: setattr(m, name, nn.Tanh())
            yield f"{name} twice", lambda m, name=name: setattr(m, name, nn.Sequential(getattr(m, name), Doubled()))


def made(kind: str) -> nn.Module:
    make, _ = KINDS[kind]
    torch.manual_seed(0)
    module = make().train()
    if kind == "folded norm":  # an identity, which is not trained
        return module.requires_grad_(False)
    for parameter in module.parameters():
        parameter.data.add_(torch.randn_like(parameter) / 4)
    return module


def patch_a(kind: str, module: nn.Module) -> None:
    KINDS[kind][1](module)(module)


def results(module: nn.Module, change: Callable[[nn.Module], None]) -> list[Tensor] | str:
    """Output and all gradients after `change`, by the names of their leaves, or the error."""
    change(module)
    generator = torch.Generator().manual_seed(1)
    dtype = next((t.dtype for t in (*module.parameters(), *module.buffers())), torch.float32)
    count = 2 if hasattr(module, "between") else 1
    # So small that an eps shows.
    leaves = [(torch.randn(2, 7, WIDTH, generator=generator) / 16).to(dtype).requires_grad_() for _ in range(count)]
    torch.manual_seed(3)
    try:
        y = module(*(leaf * 1 for leaf in leaves))
        y.double().square().sum().backward()
    except Exception as error:
        return type(error).__name__
    named = sorted(module.named_parameters(), key=lambda each: each[0])
    return [y.detach(), *(p.grad for p in (*leaves, *(p for _, p in named)) if p.grad is not None)]


def off(ours: list[Tensor] | str, theirs: list[Tensor] | str) -> str | None:
    """In what the results differ, beyond roundings."""
    if isinstance(ours, str) or isinstance(theirs, str):
        return None if isinstance(ours, str) and isinstance(theirs, str) else f"{ours!s:.24} for {theirs!s:.24}"
    if [(t.shape, t.dtype) for t in ours] != [(t.shape, t.dtype) for t in theirs]:
        return "other shapes or dtypes"
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        limit = ROUNDING * max(1.0, torch.finfo(b.dtype).eps / torch.finfo(torch.float32).eps)
        difference = float((a.double() - b.double()).norm()) / (float(b.double().norm()) or 1.0)
        if not difference <= limit and not (a.isnan().any() and b.isnan().any()):
            return f"tensor {number} is off by {difference:.1e}"
    return None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.rotates(3)
def test_every_change_has_the_effect_that_it_has_on_the_stock_module(kind: str) -> None:
    _, find = KINDS[kind]
    patch = find(made(kind))
    untouched, effective, wrong = results(made(kind), lambda _: None), 0, []
    for what, change in changes(made(kind)):
        if kind == "folded norm" and what.endswith("pruned"):
            continue  # PyTorch prunes parameters, and its affine is none any more
        stock, patched = made(kind), made(kind)
        patch(patched)
        expected = results(stock, change)
        if isinstance(expected, str) and what.endswith(("tanh", "twice")):
            continue  # T5's stock forward looks for the weight of its child
        effective += off(expected, untouched) is not None
        if (difference := off(results(patched, change), expected)) is not None:
            wrong.append(f"{what}: {difference}")
    assert not wrong, "\n".join(wrong)
    assert effective >= 3


@pytest.mark.parametrize("kind", ["layer norm", "gemma's norm", "configured norm", "llama's MLP", "own MLP", "snake"])
def test_a_copy_and_a_moved_module_are_still_as_patched(kind: str) -> None:
    module = made(kind)
    patch_a(kind, module)
    module.new_attribute, module.training = 3, False
    copies = [module, copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    assert all(map(is_as_patched, [*copies, module.to(torch.float64), copy.deepcopy(module).to(torch.bfloat16)]))
    unswap(module)
    assert "_memopt_reads" not in vars(module)


@pytest.mark.parametrize("kind", ["gemma's norm", "configured norm", "llama's MLP", "linear", "adapted linear"])
def test_a_change_of_a_class_counts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched = made(kind), made(kind)
    patch_a(kind, patched)
    untouched = results(made(kind), lambda _: None)
    method, cls = {
        "gemma's norm": ("_norm", GemmaRMSNorm),
        "configured norm": ("root", ConfiguredNorm),
        "llama's MLP": ("forward", type(ACT2FN["silu"])),
    }.get(kind, ("forward", nn.Linear))
    own = getattr(cls, method)
    monkeypatch.setattr(cls, method, lambda self, x: own(self, x) * 2)
    expected = results(stock, lambda _: None)
    assert off(expected, untouched) is not None
    assert off(results(patched, lambda _: None), expected) is None


def test_down_of_an_mlp_is_called_where_all_linears_have_another_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, patched, own = made("llama's MLP"), made("llama's MLP"), nn.Linear.forward
    patch_a("llama's MLP", patched)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: own(self, x) * 2)
    assert off(results(patched, lambda _: None), results(stock, lambda _: None)) is None


def test_a_change_between_forward_and_backward_of_a_replayed_module_comes_too_late() -> None:
    stock, patched = made("gated norm"), made("gated norm")
    patch_a("gated norm", patched)
    gradients = []
    for module in (stock, patched):
        x = torch.full((2, WIDTH), 0.1).requires_grad_()
        y = module(x)
        module.eps = 10.0
        gradients.append(torch.autograd.grad(y.sum(), x)[0])
    assert torch.equal(*gradients)


class Held:
    __slots__ = ("eps",)

    def __init__(self) -> None:
        self.eps = 1e-3

    def __call__(self) -> float:
        return self.eps


class Eps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1e-3 * x.detach() ** 0


class RenamedConfig(LlamaConfig):
    attribute_map: ClassVar[dict[str, str]] = {"epsilon": "rms_norm_eps"}


#: What holds the eps of a norm -> how its forward reads it from there, and how somebody changes it in place.
HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any], Callable[[Any], object]]] = {
    "slots": (Held, lambda held, x: held.eps, lambda held: setattr(held, "eps", 0.5)),
    "callable": (Held, lambda held, x: held(), lambda held: setattr(held, "eps", 0.5)),
    "objects in a dict": (
        lambda: {"norm": [Held()]},
        lambda held, x: held["norm"][0].eps,
        lambda held: setattr(held["norm"][0], "eps", 0.5),
    ),
    "namespace": (
        lambda: types.SimpleNamespace(eps=1e-3),
        lambda held, x: held.eps,
        lambda held: setattr(held, "eps", 0.5),
    ),
    "deque": (lambda: deque([1e-3]), lambda held, x: held[0], lambda held: held.__setitem__(0, 0.5)),
    "array": (lambda: np.array([1e-3]), lambda held, x: float(held[0]), lambda held: held.fill(0.5)),
    "tensors": (lambda: [torch.tensor(1e-3)], lambda held, x: held[0], lambda held: held[0].fill_(0.5)),
    "another name": (
        lambda: RenamedConfig(rms_norm_eps=1e-3),
        lambda held, x: held.epsilon,
        lambda held: setattr(held, "rms_norm_eps", 0.5),
    ),
    "no attribute": (
        lambda: types.SimpleNamespace(),
        lambda held, x: getattr(held, "eps", 1e-3),
        lambda held: setattr(held, "eps", 0.5),
    ),
    "list of modules": (
        lambda: nn.ModuleList([Eps()]),
        lambda held, x: held[0](torch.ones(())),
        lambda held: held.__setitem__(0, nn.Sigmoid()),
    ),
}


class HoldingNorm(nn.Module):
    def __init__(self, held: Any, read: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.held, self.read = nn.Parameter(torch.ones(WIDTH)), held, read

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.read(self.held, x))


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_changed_inside_of_what_a_module_holds_counts(holder: str) -> None:
    make, read, change = HOLDERS[holder]
    untouched, stock, patched = (HoldingNorm(make(), read).train() for _ in range(3))
    a_norm(patched)(patched)
    expected = results(stock, lambda module: change(module.held))
    assert is_as_patched(patched)
    assert off(expected, results(untouched, lambda _: None)) is not None
    assert off(results(patched, lambda module: change(module.held)), expected) is None


@pytest.mark.parametrize(
    "takes_other",
    [
        lambda module, x: x.shape[1] > 5,
        lambda module, x: x.dim() > 2,
        lambda module, x: x.requires_grad,
        lambda module, x: torch.is_grad_enabled(),
        lambda module, x: not module.training,
    ],
)
def test_what_other_inputs_and_modes_read_counts(takes_other: Callable[[nn.Module, Tensor], bool]) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps, self.other = nn.Parameter(torch.ones(WIDTH)), 1e-3, 1e-3

        def forward(self, x: Tensor) -> Tensor:
            eps = self.other if takes_other(self, x) else self.eps
            return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def change(module: nn.Module) -> None:
        module.other = 0.5
        module.eval()

    untouched, stock, patched = (Branching().train() for _ in range(3))
    a_norm(patched)(patched)
    expected = results(stock, change)
    assert off(expected, results(untouched, lambda _: None)) is not None
    assert off(results(patched, change), expected) is None


def test_a_head_reads_its_attributes_at_each_call() -> None:
    found = []
    for patched in (False, True):
        head = made("scaled linear")
        if patched:
            patch_head(head, WIDTH, 8)
        head.scale = 3.0
        x = torch.ones(6, WIDTH, requires_grad=True)
        loss = F.cross_entropy(head(x), torch.arange(6))
        loss.backward()
        found.append([loss.detach(), x.grad, head.weight.grad])
    assert off(*found) is None


def test_a_changed_attribute_that_has_its_value_again_is_none() -> None:
    module = made("llama's norm")
    a_norm(module)(module)
    x = torch.randn(2, WIDTH, requires_grad=True)
    eps, module.variance_epsilon = module.variance_epsilon, 1.0
    stock = module(x).grad_fn.name()
    module.variance_epsilon = float(str(eps))
    assert module(x).grad_fn.name() != stock


class Thinning(nn.Module):
    """A dropout with a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.factor = 0.5, 1

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training) * self.factor


def test_a_dropout_reads_its_probability_and_steps_aside_for_any_other_change() -> None:
    module, x = Thinning(), torch.ones(100, 100, requires_grad=True)
    patch_dropout(module)
    module.p = 0.25
    y = module(x * 1)
    assert y.grad_fn.name() == "SeededDropoutFunctionBackward"
    # Six deviations of the share of 10,000 draws.
    assert abs(float((y == 0).float().mean()) - 0.25) < 6 * (0.25 * 0.75 / x.numel()) ** 0.5
    module.factor = 3
    assert set(module(x * 1).unique().tolist()) == {0.0, 4.0}
    inplace = nn.Dropout(0.5)
    patch_dropout(inplace)
    inplace.inplace = True
    given = x * 1
    assert inplace(given) is given
