"""Probes tell what a module computes from its behaviour alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from memopt.walk.probes.elementwise import probe_activation
from memopt.walk.probes.isolate import Traces
from memopt.walk.probes.probe import NormProbe, probe_norm

WIDTH = 12


class HandWrittenRMS(nn.Module):
    """Upcasts inside, as decoders do; the attribute names say nothing."""

    def __init__(self, before: bool = True, offset: int = 0, eps: float = 3e-6) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(WIDTH) - offset)
        self.before, self.offset, self.tiny = before, offset, eps

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(torch.float32)
        z = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.tiny)
        if self.before:
            return (self.offset + self.alpha) * z.to(x.dtype)
        return ((self.offset + self.alpha.float()) * z).to(x.dtype)


class ShiftFirst(nn.Module):
    """A layer norm whose bias is registered before its scale, with a constant eps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(WIDTH))
        self.second = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), self.second, self.first, 2e-4)


class AlmostRMS(nn.Module):
    """Divides by the norm plus eps, which is no RMS normalisation at small inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)


class GatedRMS(HandWrittenRMS):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * F.silu(gate)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class AnyWidthRMS(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), eps=1e-6)


def probed(module: nn.Module) -> NormProbe:
    probe = probe_norm(module)
    assert isinstance(probe, NormProbe)
    return probe


@pytest.mark.parametrize("eps", [1e-3, 1e-5, 1e-6, 1e-12, 0.0])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layer_norm_is_recognised_with_its_eps(eps: float, device: str) -> None:
    assert probed(nn.LayerNorm(WIDTH, eps=eps, device=device)) == NormProbe(
        "", "layer", WIDTH, eps, "weight", "bias", 0, "after"
    )


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm_without_an_eps_has_that_of_the_dtype_it_computes_in(affine: bool) -> None:
    assert probed(nn.RMSNorm(WIDTH, elementwise_affine=affine)).eps is None
    assert probed(nn.RMSNorm(WIDTH, eps=torch.finfo(torch.float32).eps)).eps == torch.finfo(torch.float32).eps


def test_layer_norm_without_affine_is_found() -> None:
    probe = probed(nn.LayerNorm(WIDTH, elementwise_affine=False))
    assert (probe.kind, probe.hidden_size, probe.weight, probe.bias) == ("layer", WIDTH, None, None)


def test_norm_without_parameters_or_width_is_found() -> None:
    probe = probed(AnyWidthRMS())
    assert (probe.kind, probe.hidden_size, probe.eps) == ("rms", 0, 1e-6)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("offset", [0, 1])
def test_cast_order_and_offset_are_measured(before: bool, offset: int) -> None:
    probe = probed(HandWrittenRMS(before, offset))
    assert (probe.kind, probe.eps, probe.offset) == ("rms", 3e-6, offset)
    assert probe.cast == ("before" if before else "after")


def test_scale_and_shift_are_distinguished_by_their_values() -> None:
    probe = probed(ShiftFirst())
    assert (probe.weight, probe.bias, probe.eps) == ("second", "first", 2e-4)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Scale(), "normalises nothing"),
        (nn.BatchNorm2d(WIDTH), "normalises over the batch"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_only_looks_like_a_norm_has_a_reason(module: nn.Module, words: str) -> None:
    assert words in str(probe_norm(module))


@pytest.mark.parametrize(
    "module",
    [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), nn.Embedding(1, WIDTH), nn.GELU(), nn.Dropout(), nn.Identity()],
    ids=lambda module: type(module).__name__,
)
def test_other_modules_are_no_norms(module: nn.Module) -> None:
    assert probe_norm(module) is None


def test_probing_leaves_the_module_alone() -> None:
    module = nn.LayerNorm(WIDTH).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    probe_norm(module)
    assert module.training
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_the_cache_does_not_confuse_different_eps() -> None:
    cache: dict[object, object] = {}
    found = [probe_norm(nn.LayerNorm(WIDTH, eps=eps), cache=cache) for eps in (1e-5, 1e-6, 1e-5)]
    assert [probe.eps for probe in found if isinstance(probe, NormProbe)] == [1e-5, 1e-6, 1e-5]
    assert len(cache) == 2


@pytest.mark.parametrize(
    ("name", "kind", "operations"),
    [
        ("gelu", "gelu_erf", 1),
        ("gelu_python", "gelu_erf", 5),
        ("gelu_new", "gelu_tanh", 8),
        ("gelu_pytorch_tanh", "gelu_tanh", 1),
        ("quick_gelu", "quick_gelu", 3),
        ("silu", "silu", 1),
        ("relu", "relu", 1),
        ("relu2", "relu2", 2),
        ("mish", "mish", 1),
        ("tanh", "tanh", 1),
        ("sigmoid", "sigmoid", 1),
        ("gelu_10", "other", 2),
    ],
)
def test_activations_are_recognised_by_value(name: str, kind: str, operations: int) -> None:
    probe = probe_activation(ACT2FN[name])
    assert probe is not None
    assert (probe.kind, probe.operations) == (kind, operations)


@pytest.mark.parametrize(
    "module",
    [
        nn.Identity(),
        nn.Dropout(0.5),
        nn.Softmax(-1),
        nn.Flatten(),
        nn.Linear(4, 4),
        nn.AdaptiveAvgPool1d(1),
    ],
    ids=lambda module: type(module).__name__,
)
def test_other_modules_are_no_activations(module: nn.Module) -> None:
    assert probe_activation(module) is None


class OptionalGate(HandWrittenRMS):
    """A norm whose gate may be left out."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else x * F.silu(gate))


class ChannelsFirst(nn.Module):
    """The layer norm of a convolutional net, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        x_hat = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
        return self.weight[:, None, None] * x_hat + self.bias[:, None, None]


class NoisyGroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + torch.rand(()) if self.training else 1.0)


def test_a_gated_norm_is_known_by_its_affine() -> None:
    probe = probe_norm(GatedRMS(offset=1))
    assert isinstance(probe, NormProbe)
    assert (probe.kind, probe.weight, probe.bias, probe.offset, probe.hidden_size) == ("gated", "alpha", None, 1, WIDTH)
    assert probe.by_rows


class MixesLongRows(GatedRMS):
    """Rows of a long sequence depend on each other."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x if x.shape[-2] < 100 else x / x.abs().mean(), gate)


def test_a_gated_norm_whose_rows_depend_on_others_does_not_run_by_pieces() -> None:
    probe = probe_norm(MixesLongRows())
    assert isinstance(probe, NormProbe)
    assert (probe.kind, probe.by_rows) == ("gated", False)


def test_a_norm_with_a_formula_of_its_own_is_known_by_its_affine() -> None:
    probe = probe_norm(AlmostRMS())
    assert isinstance(probe, NormProbe)
    assert (probe.kind, probe.weight, probe.bias, probe.offset) == ("other", "weight", None, 0)


def test_a_gate_that_may_be_left_out_is_seen() -> None:
    probe = probe_norm(OptionalGate())
    assert isinstance(probe, NormProbe)
    assert probe.kind == "rms"
    assert probe.with_gate is not None
    assert probe.with_gate.kind == "gated"


def test_a_norm_with_channels_in_dimension_1_is_known_by_its_affine() -> None:
    probe = probe_norm(ChannelsFirst())
    assert isinstance(probe, NormProbe)
    assert (probe.kind, probe.weight, probe.bias) == ("channels", "weight", "bias")


class WithActivation(nn.GroupNorm):
    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__(2, WIDTH)
        self.activation = activation or nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.activation(super().forward(x))
        return result


@pytest.mark.parametrize(
    ("module", "intermediates"),
    [
        (nn.GroupNorm(3, WIDTH), False),
        (ChannelsFirst(), True),
        (WithActivation(), False),  # it saves its output, as its readers do
        (WithActivation(nn.SiLU()), True),
    ],
)
def test_whether_a_norm_keeps_more_than_its_input_is_seen(module: nn.Module, intermediates: bool) -> None:
    probe = probe_norm(module)
    assert isinstance(probe, NormProbe)
    assert (probe.kind, probe.intermediates) == ("channels", intermediates)


@pytest.mark.parametrize(
    "module",
    [
        nn.GroupNorm(2, 8, affine=False),
        nn.InstanceNorm2d(8),
        nn.InstanceNorm3d(8),
        nn.InstanceNorm3d(8, affine=True),
        WithActivation(),
    ],
)
def test_a_norm_of_channels_is_known_without_its_affine(module: nn.Module) -> None:
    probe = probe_norm(module)
    assert isinstance(probe, NormProbe)
    assert probe.kind == "channels"
    assert (probe.weight is None) == (not isinstance(module, nn.InstanceNorm3d) or not module.affine)


@pytest.mark.parametrize("module", [nn.Softmax(1), nn.AvgPool2d(1), nn.Softsign(), nn.LocalResponseNorm(2)])
def test_what_changes_with_the_scale_of_its_input_is_no_norm(module: nn.Module) -> None:
    assert probe_norm(module) is None


def test_a_norm_that_cannot_be_run_again_is_left() -> None:
    assert "cannot be run again" in str(probe_norm(NoisyGroupNorm(3, WIDTH)))


class RefusesTheSecondCall(nn.Module):
    """Raises an error in some calls, as random transforms of torchvision do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            raise TypeError("no image")
        return x.tanh()


def test_a_module_that_refuses_its_input_in_some_calls_is_no_activation() -> None:
    assert probe_activation(RefusesTheSecondCall()) is None


class ScaledTanh(nn.Module):
    """An activation with a scalar of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("beta", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.alpha) + self.beta * x


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_activation_may_have_scalars(device: str) -> None:
    probe = probe_activation(ScaledTanh().to(device))
    assert probe is not None
    assert (probe.kind, probe.replays, probe.parameters) == ("other", True, True)
    assert probe.operations > 1


class PerHead(nn.Module):
    """Chameleon's norm of queries and keys: statistics of each head, a scale for each channel of each head."""

    def __init__(self, *, normalises: bool = True) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, WIDTH)), nn.Parameter(torch.zeros(3, WIDTH))
        self.normalises = normalises

    def forward(self, x: Tensor) -> Tensor:
        return (F.layer_norm(x, (WIDTH,)) if self.normalises else x) * self.weight + self.bias


def test_a_scale_for_every_channel_of_every_head_is_seen() -> None:
    probe = probe_norm(PerHead())
    assert isinstance(probe, NormProbe)
    assert (probe.kind, probe.hidden_size, probe.weight, probe.bias) == ("heads", WIDTH, "weight", "bias")


@pytest.mark.parametrize("module", [PerHead(normalises=False), nn.Linear(8, 8, bias=False), nn.Embedding(8, 8)])
def test_scales_of_heads_and_matrices_are_no_norms(module: nn.Module) -> None:
    assert probe_norm(module) is None


class Snake(nn.Module):
    """The activation of audio codecs: a frequency for each channel."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)


class ScaledChannels(Snake):
    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * x


class MixedChannels(Snake):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.flip(1)


def test_an_activation_with_a_number_for_each_channel_is_seen() -> None:
    probe = probe_activation(Snake())
    assert probe is not None
    assert (probe.kind, probe.parameters, probe.replays) == ("other", True, True)
    assert probe.operations > 1


class SnakeBeta(nn.Module):
    """The activation of vocoders (BigVGAN): a frequency and a size for each channel, in vectors."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        alpha, beta = self.alpha.exp()[None, :, None], self.beta.exp()[None, :, None]
        return x + (1 / (beta + 1e-9)) * (x * alpha).sin().pow(2)


@pytest.mark.parametrize("channels", [3, 40])
def test_an_activation_with_vectors_of_channels_is_seen(channels: int) -> None:
    probe = probe_activation(SnakeBeta(channels))
    assert probe is not None
    assert (probe.kind, probe.parameters, probe.replays) == ("other", True, True)
    assert probe.operations > 1


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(40))

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * self.gamma


@pytest.mark.parametrize(
    "module",
    [
        LayerScale(),
        nn.LayerNorm(40),
        nn.RMSNorm(40),
        nn.GroupNorm(20, 40),
        nn.BatchNorm1d(40, track_running_stats=False),
        nn.InstanceNorm1d(40, affine=True),
    ],
)
def test_norms_and_scales_of_the_last_dimension_are_no_activations(module: nn.Module) -> None:
    assert probe_activation(module) is None


@pytest.mark.parametrize("module", [ScaledChannels(), MixedChannels(), nn.BatchNorm1d(3).eval()])
def test_scales_and_mixes_of_channels_are_no_activations(module: nn.Module) -> None:
    assert probe_activation(module) is None


_CHANGES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda seen: seen.add_(1),
    "through .data": lambda seen: seen.data.add_(1),
    "by another .data": lambda seen: setattr(seen, "data", seen + 1),
    "through NumPy": lambda seen: seen.numpy().__iadd__(1),
    "by a batch norm": lambda seen: F.batch_norm(torch.randn(4, WIDTH).double(), seen, seen.exp(), training=True),
}


@pytest.mark.parametrize(
    ("change", "dtype"),
    [*((change, torch.float64) for change in _CHANGES), *(("through .data", each) for each in (torch.bfloat16, int))],
)
def test_every_change_of_a_buffer_leaves_a_trace(change: str, dtype: Any) -> None:
    module = nn.Module()
    module.register_buffer("seen", torch.zeros(WIDTH, dtype=dtype))
    module.register_buffer("other", torch.full((), torch.nan))
    module.register_buffer("turns", torch.full((2,), 1j).conj())
    traces = Traces(module)
    assert not traces.found
    with torch.no_grad():
        _CHANGES[change](module.seen)
    assert traces.found


def test_a_norm_that_keeps_statistics_is_left() -> None:
    class Counts(HandWrittenRMS):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.largest.data = torch.maximum(self.largest, x.detach().abs().max().to(self.largest))
            return super().forward(x)

    assert isinstance(probe_norm(HandWrittenRMS()), NormProbe)
    assert not isinstance(probe_norm(Counts()), NormProbe)
