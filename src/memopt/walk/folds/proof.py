"""Proves folds with numbers: on a small fp64 model, all folds at once must change no output.

`folded` applies folds and undoes them, `prove` compares the outputs. `memopt.walk.folds.verdict` decides whether a
fold is legal by structure; a legal fold that fails here is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memopt.environment.generators import seed_cpu
from memopt.walk.aten.precision import Float64Mode, default_dtype
from memopt.walk.calls.inputs import Call
from memopt.walk.calls.outputs import output_tensors
from memopt.walk.sites import Consumer, NormSite

#: Largest relative difference of an output, in fp64, after a correct fold.
TOLERANCE = 1e-10
#: Smallest gradient, or change of an output, that counts: nothing is proved about a norm with a smaller effect.
_VISIBLE = 1e-7

_Outputs = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Proof:
    error: float
    """Largest relative difference of any output after all the proved folds together."""
    proved: tuple[str, ...]
    refused: dict[str, str]
    """Norm -> why its fold is wrong."""
    unseen: tuple[str, ...] = ()
    """Norms on which no output depends: nothing is proved about them."""


def prove(
    model: nn.Module, norms: Sequence[NormSite], calls: Sequence[Call], *, ignoring: Collection[str] = ()
) -> Proof:
    """Fold `norms` in `model` (fp64, eval), compare all outputs of two runs of every call, undo. `ignoring` names
    fields of the model's own output that the folds may change. If other fields differ, each fold is tried alone and the
    wrong folds are refused. If the remaining folds together still fail, all of them are refused."""
    if not norms:
        return Proof(0.0, (), {})
    before = _run(model, calls, ignoring=ignoring)
    visible = _visible(model, norms, calls, before, ignoring)
    unseen = tuple(norm.name for norm in norms if norm not in visible)
    accepted, refused = visible, {}
    error = fold_error(model, accepted, calls, before, ignoring)
    if error > TOLERANCE:
        for norm in accepted:
            alone = fold_error(model, [norm], calls, before, ignoring)
            if alone > TOLERANCE:
                refused[norm.name] = f"the fold changes an output by {alone:.1e}"
        accepted = [norm for norm in accepted if norm.name not in refused]
        error = fold_error(model, accepted, calls, before, ignoring)
    if error > TOLERANCE:
        refused |= {norm.name: f"the folds together change an output by {error:.1e}" for norm in accepted}
        accepted, error = [], 0.0
    return Proof(error, tuple(norm.name for norm in accepted), refused, unseen)


def fold_error(
    model: nn.Module,
    norms: Iterable[NormSite],
    calls: Sequence[Call],
    before: list[_Outputs] | None = None,
    ignoring: Collection[str] = (),
) -> float:
    """Largest relative difference of any floating output when `norms` are folded; the model is left as it was."""
    expected = before if before is not None else _run(model, calls, ignoring=ignoring)
    with folded(model, norms):
        return _difference(expected, _run(model, calls, ignoring=ignoring))


@contextlib.contextmanager
def folded(model: nn.Module, norms: Iterable[NormSite]) -> Iterator[None]:
    """Inside, every norm's affine is folded into its consumers, and the norm itself has scale 1 and bias 0."""
    with _restored(model) as parameters:
        for norm in norms:
            gamma, beta = _affine(parameters, norm)
            for consumer in norm.consumers:
                weight = parameters[consumer.parameter]
                if beta is not None and consumer.bias is not None:
                    bias = parameters[consumer.bias]
                    bias.data = fold_bias(bias.data, weight.data, beta, consumer)
                weight.data = fold_weight(weight.data, gamma, consumer)
            _neutralise(parameters, norm)
        yield


def fold_weight(weight: Tensor, gamma: Tensor, consumer: Consumer) -> Tensor:
    """`weight` with `gamma` (hidden_size,), the offset included, multiplied into the axis that reads the norm."""
    shape = [-1 if axis == consumer.axis else 1 for axis in range(weight.dim())]
    return weight * _along_axis(gamma, consumer, neutral=1.0).reshape(shape)


def fold_bias(bias: Tensor, weight: Tensor, beta: Tensor, consumer: Consumer) -> Tensor:
    """`bias` plus the unfolded `weight` times `beta` (hidden_size,), times the consumer's scale."""
    shift = weight.movedim(consumer.axis, -1) @ _along_axis(beta, consumer, neutral=0.0)
    if shift.dim() > bias.dim():  # a convolution sums over its window
        shift = shift.sum(dim=tuple(range(bias.dim(), shift.dim())))
    return bias + consumer.scale * shift


def _along_axis(values: Tensor, consumer: Consumer, neutral: float) -> Tensor:
    if consumer.channels is None:
        return values
    channels = torch.tensor(consumer.channels, device=values.device)
    return torch.where(channels >= 0, values[channels.clamp_min(0)], torch.full_like(values[:1], neutral))


def _affine(parameters: dict[str, nn.Parameter], norm: NormSite) -> tuple[Tensor, Tensor | None]:
    assert norm.weight is not None
    gamma = norm.offset + parameters[norm.weight].data.flatten()
    return gamma, parameters[norm.bias].data.flatten() if norm.bias else None


def _neutralise(parameters: dict[str, nn.Parameter], norm: NormSite) -> None:
    assert norm.weight is not None
    weight = parameters[norm.weight]
    weight.data = torch.full_like(weight.data, 1.0 - norm.offset)
    if norm.bias:
        parameters[norm.bias].data = torch.zeros_like(parameters[norm.bias].data)


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """The parameters of `model` by name; their values are restored on leaving."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    values = {name: parameter.data for name, parameter in parameters.items()}
    try:
        yield parameters
    finally:
        for name, parameter in parameters.items():
            parameter.data = values[name]


def _visible(
    model: nn.Module,
    norms: Sequence[NormSite],
    calls: Sequence[Call],
    before: list[_Outputs],
    ignoring: Collection[str],
) -> list[NormSite]:
    """Norms on which some output depends: nothing can be proved about the others. The gradient of the outputs decides.
    Where it is too small or cannot be computed, a reset of the norm alone must change an output."""
    sensitive = _sensitive(model, norms, calls, ignoring)
    return [
        norm
        for norm in norms
        if norm in sensitive or (not _without_bias(norm) and _shows_when_reset(model, norm, calls, before, ignoring))
    ]


def _without_bias(norm: NormSite) -> list[str]:
    """Weights that absorb the norm's scale but not its bias; a proof needs outputs that depend on these weights."""
    return [consumer.parameter for consumer in norm.consumers if norm.bias and not consumer.needs_bias]


def _sensitive(
    model: nn.Module, norms: Sequence[NormSite], calls: Sequence[Call], ignoring: Collection[str]
) -> list[NormSite]:
    """Norms whose weight has a gradient from a random combination of the outputs of some call."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    needed = [[parameters[name] for name in (norm.weight, *_without_bias(norm)) if name] for norm in norms]
    weights = list({id(weight): weight for each in needed for weight in each}.values())
    if not all(weight.requires_grad for weight in weights):
        return []
    size = {id(weight): 0.0 for weight in weights}
    for call in calls:
        if all(value > _VISIBLE for value in size.values()):
            break
        try:
            with torch.enable_grad(), _reproducible():
                outputs = [tensor for _, tensor in _outputs_of(model, call, ignoring)]
                floating = [t for t in outputs if t.is_floating_point() and t.requires_grad]
                loss = sum((torch.nan_to_num(t, 0.0, 0.0, 0.0) * torch.randn_like(t)).sum() for t in floating)
                if not isinstance(loss, Tensor):
                    return []
                gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        except (RuntimeError, NotImplementedError):  # some forward cannot be differentiated
            return []
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                size[id(weight)] = max(size[id(weight)], float(gradient.abs().max()))
    return [norm for norm, each in zip(norms, needed, strict=True) if all(size[id(w)] > _VISIBLE for w in each)]


def _shows_when_reset(
    model: nn.Module, norm: NormSite, calls: Sequence[Call], before: list[_Outputs], ignoring: Collection[str]
) -> bool:
    with _restored(model) as parameters:
        _neutralise(parameters, norm)
        after = (_run(model, [call], repeats=1, ignoring=ignoring) for call in calls)
        firsts = before[:: len(before) // len(calls)]
        return any(_difference([one], other) > _VISIBLE for one, other in zip(firsts, after, strict=True))


def _run(model: nn.Module, calls: Sequence[Call], repeats: int = 2, ignoring: Collection[str] = ()) -> list[_Outputs]:
    """Outputs of every call, by default twice in a row: a module may keep a tensor for its next call."""
    results = []
    with torch.no_grad():
        for call in (call for call in calls for _ in range(repeats)):
            with _reproducible():
                results.append([(key, tensor.clone()) for key, tensor in _outputs_of(model, call, ignoring)])
    return results


def _outputs_of(model: nn.Module, call: Call, ignoring: Collection[str]) -> _Outputs:
    """Outputs of one call, less the fields of the model's own output that may change."""
    output = output_tensors(call.copied().run(model))
    return [(key, tensor) for key, tensor in output if call.target or key not in ignoring]


@contextlib.contextmanager
def _reproducible() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), default_dtype(torch.float64), Float64Mode():
        seed_cpu(0)
        yield


def _difference(expected: list[_Outputs], actual: list[_Outputs]) -> float:
    worst = 0.0
    for one, other in zip(expected, actual, strict=True):
        if [(key, t.shape) for key, t in one] != [(key, t.shape) for key, t in other]:
            return float("inf")
        worst = max([worst, *(_relative(a, b) for (_, a), (_, b) in zip(one, other, strict=True))])
    return worst


def _relative(a: Tensor, b: Tensor) -> float:
    """Largest difference divided by the largest magnitude in `a`; infinite if only one of two elements is finite."""
    if not (a.is_floating_point() or a.is_complex()) or not a.numel():
        return 0.0
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return float("inf")
    if not finite.any():
        return 0.0
    a, b = a[finite], b[finite]
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-30))
