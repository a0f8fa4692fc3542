"""The stock and the folded form of an adapter's model: which modules read folded norms, with which scale and shift.
Adapters that have no exact form on the other side are refused, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memopt.checkpoint import arithmetic
from memopt.checkpoint.adapters.folder import Adapter, Part
from memopt.checkpoint.arithmetic import Floats
from memopt.checkpoint.fold import Fill, Fold, FoldedConsumer, FoldPlan, Scale, Shift
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


#: Kinds of PEFT whose effect on a module is in tensors of that module, or that only add inputs behind the embedding.
_KINDS = (
    "LORA", "ADALORA", "LOHA", "LOKR", "IA3", "VERA", "OFT", "BOFT", "LN_TUNING", "PROMPT_TUNING", "P_TUNING",
    "PREFIX_TUNING", "TRAINABLE_TOKENS",
)  # fmt: skip
#: Parts whose columns are the channels of the module's input; they are scaled.
COLUMNS = ("lora_A.weight", "lora_A", "hada_w1_b")
#: Parts of the same adapters that do not touch the input.
_OTHERS = (
    "lora_B.weight", "lora_B", "lora_E", "ranknum", "hada_w1_a", "hada_w2_a", "hada_w2_b", "ia3_l", "lora_B.bias",
    "lora_magnitude_vector",
)  # fmt: skip
#: Variants of LoRA that compute more than B A x.
_VARIANTS = (
    "use_qalora", "velora_config", "monteclora_config", "use_bdlora", "arrow_config", "kasa_config",
    "layer_replication", "alora_invocation_tokens", "megatron_config",
)  # fmt: skip
#: Initialisations that leave the base model as it is; others subtract the initial product of B and A from its weights.
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")


def refuse(sides: Sides) -> None:
    """Raise a NegativeVerdict that names the part, if a part of the adapter has no exact form on the other side."""
    kind, config = sides.adapter.kind, sides.adapter.config
    if kind not in _KINDS:
        raise sides.refusal(f"memopt does not know what adapters of the kind {kind} compute")
    if config.get("init_lora_weights", True) not in _KEEPS_BASE:
        raise sides.refusal(
            f"its initialisation ({config['init_lora_weights']}) changes the weights of the base model; save it as "
            "plain LoRA first (path_initial_model_for_weight_conversion of PEFT's save_pretrained)"
        )
    if variants := [name for name in _VARIANTS if config.get(name)]:
        raise sides.refusal(f"{variants[0]} of its config computes more than B A x")
    for part in sides.parts.values():
        if reason := _obstacle(sides, part):
            raise sides.refusal(f"{part.key}: {reason}")
    if any(sides.reads_shift(part) for part in sides.lora()) and any(
        part.leaf.startswith("lora_embedding") for part in sides.parts.values()
    ):
        raise sides.refusal("it needs a bias beside B, which PEFT does not have together with LoRA on embeddings")


def _obstacle(sides: Sides, part: Part) -> str | None:
    """Why a tensor has no exact form on the other side; None if it has one."""
    info, reader = sides.adapter.source.tensors[part.key], sides.reader_of(part)
    if part.module is None:
        return _obstacle_of_new(sides, part)
    if not part.added:
        return _obstacle_of_whole(sides, part)
    if reader is None:
        touched = (name for name in sides.operations if name.rpartition(".")[0] == part.module)
        return next(
            (f"{name} is changed by a fold, and this kind of adapter has no form for that" for name in touched), None
        )
    why = f"{part.module} reads the folded {reader.norm}"
    if part.leaf not in (*COLUMNS, *_OTHERS):
        return f"{why}, and this kind of adapter has no form for that"
    if part.leaf in COLUMNS and info.shape[1:2] != (len(reader.scale),):
        return f"{why}, and its channels are not the columns of this tensor"
    flat = 2 if part.leaf in COLUMNS and reader.shift.any() else 1 if part.leaf == "lora_magnitude_vector" else None
    if flat is not None and len(info.shape) != flat:
        return f"{why}, and it is no linear"
    if reader.shift.any():
        plain = sides.adapter.kind == "LORA" and not sides.adapter.config.get("use_dora")
        feedforward = part.leaf == "ia3_l" and len(info.shape) == 2 and info.shape[0] == 1
        if not plain and (part.leaf != "ia3_l" or feedforward):
            return f"{why}, whose bias has no place in this kind of adapter"
    return None


def _obstacle_of_new(sides: Sides, part: Part) -> str | None:
    """`_obstacle` of a tensor whose module, such as a new head, the base model lacks: it may read a folded norm."""
    for fold in sides.folds if part.key != part.leaf else ():  # prompts have no module and no prefix
        top = fold.norm.partition(".")[0]
        if any(consumer.weight.partition(".")[0] != top for consumer in fold.consumers):
            return f"the model has no such module, which may read the folded {fold.norm}"
    return None


def _obstacle_of_whole(sides: Sides, part: Part) -> str | None:
    """`_obstacle` of a tensor of the model that was trained as a whole."""
    name, key = str(part.base), part.key
    operation, info = sides.operations.get(name), sides.adapter.source.tensors[key]
    before = sides.base.tensors[name]
    if isinstance(operation, Fill):
        base = read_floats(sides.base, name)
        expected = np.full_like(base, operation.value) if sides.back else base
        same = np.array_equal(read_floats(sides.adapter.source, key), expected)
        return None if same else "it trains a norm that is folded"
    if isinstance(operation, Scale):
        axis = operation.axis
        if len(info.shape) != len(before.shape) or info.shape[axis] != before.shape[axis]:
            raise sides.adapter.misfit(f"{key} is {info.shape}, the model's is {before.shape}")
        reader, bias = sides.readers[name], f"{part.module}.bias"
        if reader.shift.any() and bias in sides.operations and bias not in sides.whole:
            return "it was trained without the bias that the norm's bias was folded into"
    if isinstance(operation, Shift):
        weights = [(sides.tensor(each.weight)[1].shape, each.axis) for each in operation.parts]
        if any(len(shape) != 2 or info.shape != (shape[1 - axis],) for shape, axis in weights):
            return "it is not one number for each output of its module"
    return None
