"""The tensors of a checkpoint that the folds of a plan change, and how. Pure data; `arithmetic` computes the values.

A norm is folded into all its consumers or into none. A fold is refused, with the reason, if a tensor is stored under
another name, or a weight is quantised or shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, prod

from memopt.checkpoint.sources.header import FLOAT_DTYPES, TensorInfo
from memopt.plan.plan import Plan
from memopt.walk.sites import Consumer, NormSite


@dataclass(frozen=True)
class FoldedConsumer:
    """One weight into which a norm's affine is folded; names are those of the files."""

    weight: str
    axis: int
    channels: tuple[int, ...] | None = None
    """Norm channel of each coordinate along `axis`; negative for coordinates that do not read this norm."""
    bias: str | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Fold:
    """One norm whose affine moves into its consumers; names are those of the files."""

    norm: str
    """Name of the norm module."""
    weight: str
    offset: int
    bias: str | None
    consumers: tuple[FoldedConsumer, ...]

    @property
    def own(self) -> tuple[str, ...]:
        """The norm's own tensors."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def touched(self) -> frozenset[str]:
        """Every tensor that the fold changes."""
        shifted = {c.bias for c in self.consumers if c.bias and self.bias}
        return frozenset(shifted | {*self.own} | {c.weight for c in self.consumers})


@dataclass(frozen=True)
class Fill:
    """The tensor is set to a constant: the identity affine of a folded norm."""

    value: float


@dataclass(frozen=True)
class ScalePart:
    gamma: str
    offset: int
    channels: tuple[int, ...] | None


@dataclass(frozen=True)
class Scale:
    """The tensor is multiplied along `axis` by one or more norms' scales, each over its own coordinates."""

    axis: int
    parts: tuple[ScalePart, ...]


@dataclass(frozen=True)
class ShiftPart:
    weight: str
    axis: int
    beta: str
    channels: tuple[int, ...] | None
    scale: float


@dataclass(frozen=True)
class Shift:
    """The tensor, a bias, plus products of original weights and norm biases."""

    parts: tuple[ShiftPart, ...]


Operation = Fill | Scale | Shift


@dataclass(frozen=True)
class FoldPlan:
    """The folds that the files allow, and the folds that are refused."""

    folds: tuple[Fold, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    """(norm, reason) of every fold of the plan that the files do not allow."""

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        tensors: Mapping[str, TensorInfo],
        aliases: Mapping[str, tuple[str, ...]] | None = None,
        renamed: Mapping[str, str] | None = None,
    ) -> FoldPlan:
        """Folds of `plan` on the files' `tensors`. `aliases`: tensor -> others that share its storage; `renamed`:
        parameter of the model -> its other name in the files."""
        norms = plan.folds()
        keys = map_names({name for norm in norms for name in parameters_of(norm)}, tensors) | dict(renamed or {})
        owners = Counter(norm.weight for norm in plan.sites.norms)
        folds, refused = [], []
        for norm in norms:
            reason = _obstacle(norm, keys, tensors, aliases or {}, owners)
            if reason is None:
                folds.append(_fold(norm, keys))
            else:
                refused.append((norm.name, reason))
        result = cls(tuple(folds), tuple(refused))
        return result.without(dict(_conflicts(result.folds)))

    def operations(self) -> dict[str, Operation]:
        """Tensor name -> the operation on it; every other tensor is unchanged."""
        operations: dict[str, Operation] = {}
        for fold in self.folds:
            operations[fold.weight] = Fill(1.0 - fold.offset)
            if fold.bias:
                operations[fold.bias] = Fill(0.0)
            for consumer in fold.consumers:
                part = ScalePart(fold.weight, fold.offset, consumer.channels)
                before = operations.get(consumer.weight)
                parts = (*before.parts, part) if isinstance(before, Scale) else (part,)
                operations[consumer.weight] = Scale(consumer.axis, parts)
                if fold.bias and consumer.bias:
                    term = ShiftPart(consumer.weight, consumer.axis, fold.bias, consumer.channels, consumer.scale)
                    shift = operations.get(consumer.bias)
                    terms = (*shift.parts, term) if isinstance(shift, Shift) else (term,)
                    operations[consumer.bias] = Shift(terms)
        return operations

    def misfits(self, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
        """Reasons why the folds of a manifest, which is untrusted, cannot be carried out on `tensors`."""
        bad = [text for fold in self.folds for text in _misfits(fold, tensors)]
        yield from bad or (f"{norm}: {why}" for norm, why in _conflicts(self.folds))

    def without(self, reasons: Mapping[str, str]) -> FoldPlan:
        """The plan without the norms in `reasons`, and without every norm that shares a tensor with one of them."""
        dropped = dict(reasons)
        changed = True
        while changed:
            changed = False
            tainted = {name: fold.norm for fold in self.folds if fold.norm in dropped for name in fold.touched}
            for fold in self.folds:
                shared = sorted(fold.touched & tainted.keys())
                if fold.norm not in dropped and shared:
                    dropped[fold.norm] = (
                        f"it changes {shared[0]} together with {tainted[shared[0]]}, which is not folded"
                    )
                    changed = True
        kept = tuple(fold for fold in self.folds if fold.norm not in dropped)
        refused = tuple((fold.norm, dropped[fold.norm]) for fold in self.folds if fold.norm in dropped)
        return FoldPlan(kept, self.refused + refused)


def map_names(names: Iterable[str], keys: Iterable[str]) -> dict[str, str]:
    """Parameter name -> name in the files, for the parameters that the files have. Names are equal, or differ by the
    base model's prefix, which checkpoints of a bare base model lack and checkpoints of a model with a head have."""
    names, keys = set(names), set(keys)
    found = {name: name for name in names & keys}
    missing = names - keys
    best: dict[str, str] = {}
    for prefix in sorted({name.split(".")[0] + "." for name in missing}):
        if not any(key.startswith(prefix) for key in keys):
            candidate = {name: name[len(prefix) :] for name in missing if name.startswith(prefix)}
            best = max(best, _present(candidate, keys - names), key=len)
    for prefix in sorted({key.split(".")[0] + "." for key in keys}):
        if not any(name.startswith(prefix) for name in names):
            best = max(best, _present({name: prefix + name for name in missing}, keys - names), key=len)
    return found | best


def _present(candidate: dict[str, str], keys: set[str]) -> dict[str, str]:
    return {name: key for name, key in candidate.items() if key in keys}


def _misfits(fold: Fold, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    if missing := sorted(fold.touched - tensors.keys()):
        yield f"{missing[0]} does not exist"
        return
    if coded := [name for name in sorted(fold.touched) if tensors[name].dtype not in FLOAT_DTYPES]:
        yield f"{coded[0]} is stored as {tensors[coded[0]].dtype}"
    size = prod(tensors[fold.weight].shape)
    if fold.offset not in (0, 1) or (fold.bias and prod(tensors[fold.bias].shape) != size):
        yield f"{fold.weight} and {fold.bias} are no scale and shift"
    for consumer in fold.consumers:
        shape, channels = tensors[consumer.weight].shape, consumer.channels
        along = shape[consumer.axis] if 0 <= consumer.axis < len(shape) else -1
        known = channels is None or all(-1 <= channel < size for channel in channels)
        if not known or along != (size if channels is None else len(channels)) or not isfinite(consumer.scale):
            yield f"{consumer.weight} has no such channels"
        reduced = (*shape[: consumer.axis], *shape[consumer.axis + 1 :])
        if fold.bias and consumer.bias and (bias := tensors[consumer.bias].shape) != reduced[: len(bias)]:
            yield f"{consumer.bias} has another shape"


def parameters_of(norm: NormSite) -> Iterator[str]:
    """The parameters that the fold of `norm` changes, and its own."""
    names = [norm.weight, norm.bias]
    for consumer in norm.consumers:
        names += [consumer.parameter, consumer.bias if norm.bias else None]
    return (name for name in names if name is not None)


def _fold(norm: NormSite, keys: Mapping[str, str]) -> Fold:
    assert norm.weight is not None  # the plan folds no norm without one
    consumers = dict.fromkeys(  # a weight that is read twice is folded once
        FoldedConsumer(
            weight=keys[c.parameter],
            axis=c.axis,
            channels=c.channels,
            bias=keys[c.bias] if norm.bias and c.bias else None,
            scale=c.scale,
        )
        for c in norm.consumers
    )
    return Fold(norm.name, keys[norm.weight], norm.offset, keys[norm.bias] if norm.bias else None, tuple(consumers))


def _obstacle(
    norm: NormSite,
    keys: Mapping[str, str],
    tensors: Mapping[str, TensorInfo],
    aliases: Mapping[str, tuple[str, ...]],
    owners: Counter[str | None],
) -> str | None:
    """Why the files do not allow the fold of `norm`; None if they do."""
    if not norm.consumers:
        return "no linear reads it"
    if owners[norm.weight] > 1:
        return "another norm has the same weight"
    for name in parameters_of(norm):
        if name not in keys:
            return f"{name} is not in the files under this name"
        info = tensors[keys[name]]
        if info.dtype not in FLOAT_DTYPES:
            return f"{info.name} is stored as {info.dtype}, which holds no plain weights"
        if others := aliases.get(info.name):
            return f"{info.name} is one tensor with {', '.join(others)}"
    for own in (norm.weight, norm.bias):
        if own is not None and prod(tensors[keys[own]].shape) != norm.hidden_size:
            return f"{own} has another shape in the files"
    return next((reason for c in norm.consumers if (reason := _consumer_obstacle(norm, c, keys, tensors))), None)


def _consumer_obstacle(
    norm: NormSite, consumer: Consumer, keys: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> str | None:
    shape = tensors[keys[consumer.parameter]].shape
    size = norm.hidden_size if consumer.channels is None else len(consumer.channels)
    if not 0 <= consumer.axis < len(shape) or shape[consumer.axis] != size:
        return f"{consumer.parameter} has another shape in the files"
    if norm.bias is None:
        return None
    if consumer.bias is None and consumer.accepts_bias and not consumer.needs_bias:
        return None
    if consumer.bias is None or not consumer.accepts_bias:
        return f"{consumer.parameter} cannot take the norm's bias"
    reduced = (*shape[: consumer.axis], *shape[consumer.axis + 1 :])
    bias = tensors[keys[consumer.bias]].shape
    return None if bias == reduced[: len(bias)] else f"{consumer.bias} has another shape in the files"


def _conflicts(folds: tuple[Fold, ...]) -> Iterator[tuple[str, str]]:
    """(norm, reason) of conflicting folds: one coordinate scaled twice, one tensor in two roles."""
    own = {name: fold.norm for fold in folds for name in (fold.weight, fold.bias) if name}
    weights = {consumer.weight for fold in folds for consumer in fold.consumers}
    users: dict[str, list[tuple[str, FoldedConsumer]]] = {}
    for fold in folds:
        for consumer in fold.consumers:
            users.setdefault(consumer.weight, []).append((fold.norm, consumer))
            for name in (consumer.weight, consumer.bias):
                if name is not None and name in own:
                    yield fold.norm, f"{name} is also a parameter of the norm {own[name]}"
            if consumer.bias in weights:
                yield fold.norm, f"{consumer.bias} is used both as a weight and as a bias"
    for weight, uses in users.items():
        for index, (norm, one) in enumerate(uses):
            if any(_overlap(one, other) for other_index, (_, other) in enumerate(uses) if other_index != index):
                yield norm, f"{weight} reads it, or it and another norm, at the same place twice"


def _overlap(one: FoldedConsumer, other: FoldedConsumer) -> bool:
    if one.axis != other.axis or one.channels is None or other.channels is None:
        return True
    return any(a >= 0 and b >= 0 for a, b in zip(one.channels, other.channels, strict=True))
