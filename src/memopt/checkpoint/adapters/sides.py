"""The stock and the folded form of an adapter's model: which modules read folded norms, with which scale and shift."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memopt.checkpoint import arithmetic
from memopt.checkpoint.adapters.folder import Adapter, Part
from memopt.checkpoint.arithmetic import Floats
from memopt.checkpoint.fold import Fold, FoldedConsumer, FoldPlan, Scale
from memopt.checkpoint.shards import read_floats, scale_of
from memopt.checkpoint.sources.header import TensorInfo
from memopt.checkpoint.sources.source import CheckpointSource
from memopt.errors import NegativeVerdict


@dataclass(frozen=True)
class Reader:
    """The weight of a module that reads folded norms; scale and shift have a number for each input coordinate."""

    name: str
    axis: int
    scale: Floats
    shift: Floats
    norm: str


class Sides:
    """An adapter, its model without folds, and the folds; `back`: convert from the folded to the stock model."""

    def __init__(self, adapter: Adapter, base: CheckpointSource, folds: tuple[Fold, ...], back: bool) -> None:
        self.adapter, self.base, self.back = adapter, base, back
        if names := adapter.config.get("target_parameters"):
            # A, B and the files may split such a parameter into experts, each in a different order.
            raise self.refusal(
                f"its target_parameters ({', '.join(names)}) adapt parameters, not the inputs of modules"
            )
        self.operations = FoldPlan(folds).operations()
        self.parts = {part.key: part for part in adapter.parts(base)}
        self.whole = {part.base: part for part in self.parts.values() if not part.added and part.base}
        readers: dict[str, list[tuple[Fold, FoldedConsumer]]] = {}
        for fold in folds:
            for consumer in fold.consumers:
                readers.setdefault(consumer.weight, []).append((fold, consumer))
        self.readers = {name: self.reader(name, parts) for name, parts in readers.items()}
        self.folds = folds

    def reader(self, name: str, parts: list[tuple[Fold, FoldedConsumer]]) -> Reader:
        operation = self.operations[name]
        assert isinstance(operation, Scale)
        size = self.base.tensors[name].shape[operation.axis]
        scale, shift = scale_of(self.base, operation, size), np.zeros(size)
        for fold, consumer in parts:
            if fold.bias:
                beta = read_floats(self.base, fold.bias)
                shift = shift + arithmetic.fold_shift(beta, consumer.scale, size, consumer.channels)
        return Reader(name, operation.axis, scale, shift, parts[0][0].norm)

    def reader_of(self, part: Part) -> Reader | None:
        """The reader of folded norms that a part of the adapter is added to, or replaces."""
        return self.readers.get(part.base or "")

    def reads_shift(self, part: Part) -> bool:
        """Whether the module of `part` reads a folded norm that has a bias."""
        reader = self.reader_of(part)
        return reader is not None and bool(reader.shift.any())

    def lora(self) -> list[Part]:
        """The LoRA matrices A on linears; each has a matrix B."""
        return [part for part in self.parts.values() if part.leaf == "lora_A.weight"]

    def tensor(self, name: str) -> tuple[CheckpointSource, TensorInfo]:
        """The source and metadata of a weight: the adapter's, if the adapter trained the weight as a whole."""
        part = self.whole.get(name)
        if part is not None:
            return self.adapter.source, self.adapter.source.tensors[part.key]
        return self.base, self.base.tensors[name]

    def refusal(self, why: str) -> NegativeVerdict:
        side = "the stock model" if self.back else "the folded model"
        return NegativeVerdict(
            f"The adapter '{self.adapter.source.root}' has no exact form on {side}: {why}.",
            "Merge it into the model that it was trained on (merge_and_unload), or train without folds "
            "(memopt.patch(model), or recipe 'exact-unfolded').",
        )
