"""Derives the consumers of each norm, and its fold obstacles in words for the user, from recorded uses.

It reads the records of `memopt.walk.flow.shadow` and runs nothing. It decides which folds are legal by structure;
`memopt.walk.folds.proof` checks legal folds with numbers. An obstacle is final: the fold would change the function of
the model, or cannot be made. A caution names a hidden state that a correct fold changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor, nn

from memopt.walk.aten.rules import FOREIGN, ZERO
from memopt.walk.flow.records import NormRecord
from memopt.walk.flow.shadow import ShadowMode
from memopt.walk.sites import Consumer, NormSite, Reach, parent

#: A coordinate that no contraction of the walk read.
_UNREAD = -3
_NO_ARTICLE = ("another", "attention", "non-zero", "read of", "scatter into")


def norm_sites(mode: ShadowMode, loss_head: str | None) -> tuple[NormSite, ...]:
    """Sites of the observed norms, with a verdict on each that ran; modules that a call rejects as a norm are left out.
    `loss_head` is the weight that computes the logits, if there is one."""
    readers: dict[str, list[_Weight]] = {}
    for parameter in mode.model.parameters():
        if any(use.kind == "contract" for use in mode.uses.get(id(parameter), ())):
            weight = _Weight(mode, parameter)
            for owner in weight.owners:
                readers.setdefault(owner.name, []).append(weight)
    return tuple(
        _judged(mode, record, readers.get(record.name, []), loss_head)
        for record in mode.norms.values()
        if not record.rejected
    )


def _judged(mode: ShadowMode, record: NormRecord, readers: list[_Weight], loss_head: str | None) -> NormSite:
    probe = record.probe

    def full(attribute: str | None) -> str | None:
        return None if attribute is None else f"{record.name}.{attribute}" if record.name else attribute

    own = {field.name: getattr(probe, field.name) for field in fields(NormSite)}
    own |= {"name": record.name, "hidden_size": probe.hidden_size or record.width}
    site = NormSite(**own | {"weight": full(probe.weight), "bias": full(probe.bias)})
    if not record.calls:
        return replace(site, executed=False, fold_obstacles=("no forward of the walk ran it",))
    return replace(
        site,
        consumers=tuple(weight.consumer(record, readers) for weight in readers),
        reaches=tuple(record.reaches),
        input_changes=record.input_changes,
        output_changes=record.output_changes,
        fold_obstacles=tuple(dict.fromkeys(_obstacles(mode, record, readers))),
        cautions=tuple(_cautions(record, readers, loss_head)),
    )


class _Weight:
    """One weight that reads norms, and its recorded uses."""

    def __init__(self, mode: ShadowMode, parameter: nn.Parameter) -> None:
        self.mode, self.parameter = mode, parameter
        self.uses = mode.uses[id(parameter)]
        self.contractions = [(use, use.reading) for use in self.uses if use.kind == "contract" and use.reading]
        self.readings = [reading for _, reading in self.contractions]
        self.biases = {use.bias for use, _ in self.contractions}
        self.name = mode.parameters.name(parameter, self.contractions[0][0].module)
        self.axis = self.readings[0].axis
        self.clash: str | None = None
        self.channels = self._merge()
        self.owners = list(mode.owners(torch.cat([reading.channels for reading in self.readings])))

    def _merge(self) -> Tensor:
        merged = torch.full((self.parameter.shape[self.axis],), _UNREAD)
        for reading in self.readings:
            if reading.axis != self.axis:
                self.clash = f"{self.name} is applied in two layouts"
                continue
            before, now = merged[reading.coordinates], reading.channels
            if bool(((before != now) & (before > ZERO) & (now > ZERO)).any()):
                self.clash = f"{self.name} is shared by several norms"
            elif bool((((before == FOREIGN) & (now > ZERO)) | ((now == FOREIGN) & (before > ZERO))).any()):
                self.clash = f"{self.name} also reads something else"
            merged[reading.coordinates] = torch.where(now == ZERO, torch.where(before == _UNREAD, now, before), now)
        return merged

    def consumer(self, record: NormRecord, readers: list[_Weight]) -> Consumer:
        """This weight as one of the readers of a norm."""
        own = [each for each in self.contractions if any(o is record for o in self.mode.owners(each[1].channels))]
        uses, readings = [use for use, _ in own], [reading for _, reading in own]
        local = torch.where(
            (self.channels >= record.base) & (self.channels < record.base + record.width),
            self.channels - record.base,
            torch.full_like(self.channels, -1),
        )
        in_order = torch.equal(local, torch.arange(record.width))
        return Consumer(
            parameter=self.name,
            module=uses[0].module,
            axis=self.axis,
            channels=None if in_order else tuple(local.tolist()),
            bias=uses[0].bias,
            scale=readings[0].scale,
            accepts_bias=all(reading.shift for reading in readings),
            needs_bias=not self._may_drop_bias(readers),
            same_storage=all(use.same_storage for use in uses),
        )

    def obstacles(self) -> Iterator[str]:
        """Why no norm can be folded into this weight."""
        if self.clash:
            yield self.clash
        if id(self.parameter) in self.mode.parameters.overlapping:
            yield f"{self.name} shares its memory with another parameter"
        tied = [name for name in self.mode.parameters.names[id(self.parameter)] if name != self.name]
        if tied:
            yield f"{self.name} is tied to {', '.join(tied)}"
        for use in self.uses:
            if use.kind == "raw":
                yield f"{self.name} also reads something that this norm did not make{_inside(use.module)}"
            elif use.kind == "mixed":
                yield f"{self.name} also reads several channels in one coordinate{_inside(use.module)}"
            elif use.kind != "contract" and not tied:
                yield f"{self.name} is also used by {use.operation}{_inside(use.module)}"

    def _may_drop_bias(self, readers: list[_Weight]) -> bool:
        """Whether the norm's bias may be dropped from this product, which has no bias to absorb it: true of attention's
        keys, since one vector added to all keys changes no softmax. Proposed if another projection of the module has a
        bias; the proof decides."""
        return self.biases == {None} and any(
            None not in reader.biases and parent(parent(reader.name)) == parent(parent(self.name)) for reader in readers
        )

    def bias_obstacles(self, readers: list[_Weight]) -> Iterator[str]:
        """Why a norm's bias cannot move into this weight's bias."""
        if not all(reading.shift for reading in self.readings):
            yield f"the norm has a bias, which padding, a mask or dropout before {self.name} keeps from being folded"
        if len({reading.scale for reading in self.readings}) > 1:
            yield f"the norm has a bias and {self.name} reads it at several scales"
        name = next(iter(self.biases))
        if len(self.biases) > 1:
            yield f"the norm has a bias and {self.name} is not always followed by the same one"
        elif name is not None:
            yield from self._slot_obstacles(name)
        elif not self._may_drop_bias(readers):
            yield f"the norm has a bias and {self.name} has none"

    def _slot_obstacles(self, name: str) -> Iterator[str]:
        bias = self.mode.parameters.by_name[name]
        rest = [size for axis, size in enumerate(self.parameter.shape) if axis != self.axis]
        if list(bias.shape) not in (rest, rest[:1]):
            yield f"{name} does not have the shape of what {self.name} adds up to"
        for use in self.mode.uses.get(id(bias), ()):
            if use.kind != "bias" or use.weight != self.name:
                yield f"{name} is also used by {use.weight or use.operation}{_inside(use.module)}"
        if len(self.mode.parameters.names[id(bias)]) > 1:
            yield f"{name} is shared by several modules"


def _obstacles(mode: ShadowMode, record: NormRecord, readers: list[_Weight]) -> Iterator[str]:
    """Why a fold cannot be made or would change the model's function."""
    probe = record.probe
    if probe.weight is None:
        yield "it has no weight to fold"
        return
    if probe.kind == "channels":
        yield "its channels are in dimension 1"
        return
    if probe.kind == "heads":
        yield "each head has numbers of its own"
        return
    hard = {r.what: r for r in record.reaches if not r.auxiliary}
    for reach in hard.values():
        yield _explain(reach, also=bool(readers))
    if not readers and not hard:
        yield "no linear reads its output"
    for attribute in filter(None, (probe.weight, probe.bias)):
        yield from _own_parameter_obstacles(mode, record.name, attribute)
    for weight in readers:
        yield from weight.obstacles()
        if probe.bias is not None:
            yield from weight.bias_obstacles(readers)


def _cautions(record: NormRecord, readers: list[_Weight], loss_head: str | None) -> Iterator[str]:
    """Hidden states that a fold would change although it keeps the model's function."""
    for reach in {r.what: r for r in record.reaches if r.auxiliary}.values():
        yield _explain(reach, also=False)
    if any(weight.name == loss_head for weight in readers):
        yield f"it is the last norm: its output is the last hidden state, which {loss_head} turns into logits"


def _own_parameter_obstacles(mode: ShadowMode, norm: str, attribute: str) -> Iterator[str]:
    name = f"{norm}.{attribute}" if norm else attribute
    parameter = mode.parameters.by_name[name]
    others = [n for n in mode.parameters.names[id(parameter)] if n != name]
    if others or id(parameter) in mode.parameters.overlapping:
        yield f"its {attribute} is shared with {', '.join(others) or 'another parameter'}"
    for use in mode.uses.get(id(parameter), ()):
        if use.module != norm:
            yield f"its {attribute} is also used by {use.operation}{_inside(use.module)}"


def _explain(reach: Reach, also: bool) -> str:
    what = reach.what
    if what == "model output":
        return f"its output is returned as {reach.operation} by {reach.module or 'the model'}"
    article = "" if what.startswith(_NO_ARTICLE) else "an " if what[0] in "aeiou" else "a "
    where = f" ({reach.operation}{_inside(reach.module)})"
    return f"its output {'also ' if also else ''}goes to {article}{what}{where}"


def _inside(module: str) -> str:
    return f" in {module}" if module else ""
