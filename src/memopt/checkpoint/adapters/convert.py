"""Convert an adapter of the stock model into one of the folded model, and back; both compute the same function.

A reader of a folded norm has W' = W diag(s) and b' = b + W t: its input was y = s x_hat + t, and is now x_hat.
LoRA adds B A y = (B A diag(s)) x_hat + B A t, so A' = A diag(s), and B A t becomes the bias of B (PEFT's `lora_bias`).
DoRA divides by the norms of the rows of W + c B A, which a fold changes: its magnitude is multiplied by
|W' + c B A'| / |W + c B A|. A tensor that was trained as a whole (`modules_to_save`, biases) is folded as the base
model's is. The way back divides by s. Each stored element is rounded once. The part of an adapter on a module that
reads no folded norm is unchanged.

Adapters without such a form are refused: a rotation of the input (OFT), a Kronecker factor over the input (LoKr),
projections that all modules share (VeRA).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt

import numpy as np

from memopt.checkpoint import arithmetic
from memopt.checkpoint.adapters.folder import Adapter, Part, pattern_value
from memopt.checkpoint.adapters.sides import COLUMNS, Reader, Sides, refuse
from memopt.checkpoint.arithmetic import Bits, Floats
from memopt.checkpoint.fold import Fold, Scale, Shift
from memopt.checkpoint.shards import BLOCK, as_bytes, blocks, read_floats
from memopt.checkpoint.sources.source import CheckpointSource
from memopt.errors import first_of

Blocks = Iterator[memoryview]


@dataclass(frozen=True)
class Converted:
    """A converted adapter, tensor by tensor."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """Tensor -> dtype and shape."""
    blocks: Callable[[str], Blocks]
    """The bytes of a tensor, in order."""
    config: dict[str, object]
    changed: tuple[str, ...]
    notes: tuple[str, ...]


def convert(adapter: Adapter, base: CheckpointSource, folds: tuple[Fold, ...], *, back: bool) -> Converted:
    """The adapter of the model `base` as one of that model with `folds`, by its tensor names; with `back`, the other
    way round. Raises a ModelError if the adapter has modules or shapes that the model lacks, and a NegativeVerdict that
    names the module and the reason if it has no exact form on the other side."""
    return _Conversion(adapter, base, folds, back).run()


class _Conversion(Sides):
    """Computes the converted tensors."""

    def run(self) -> Converted:
        refuse(self)
        source = self.adapter.source
        tensors = {name: (info.dtype, info.shape) for name, info in source.tensors.items()}
        config, notes = dict(self.adapter.config), []
        shifted = [part for part in self.lora() if self.reads_shift(part)]
        if shifted and not config.get("lora_bias"):
            config |= {"lora_bias": True, "init_lora_weights": True}
            for part in self.lora():
                rows = source.tensors[_pair(part.key)]
                tensors[rows.name.removesuffix("weight") + "bias"] = (rows.dtype, rows.shape[:1])
            notes.append(
                "The norms have a bias, so the converted adapter has one too (lora_bias in its config): "
                f"{first_of([str(part.module) for part in shifted], 2)}."
            )
        dropout = config.get("lora_dropout")
        if shifted and dropout:
            notes.append(
                f"lora_dropout {dropout} does not drop that bias: the same function, another noise in training."
            )
        changed = tuple(name for name in tensors if name not in self.parts or self.changes(self.parts[name]))
        return Converted(tensors, self.blocks, config, changed, tuple(notes))

    def changes(self, part: Part) -> bool:
        if not part.added:
            return part.base in self.operations
        if part.leaf == "lora_B.bias":
            return self.reads_shift(part)
        return part.leaf in (*COLUMNS, "lora_magnitude_vector") and self.reader_of(part) is not None

    def blocks(self, key: str) -> Blocks:
        """The bytes of the converted tensor `key`."""
        part = self.parts.get(key)
        if part is None:  # the bias of a B that had none
            yield as_bytes(self.bias_of_b(key))
        elif not self.changes(part):
            yield from self.copied(key)
        elif part.leaf == "lora_B.bias":
            yield as_bytes(self.bias_of_b(key))
        elif part.leaf == "lora_magnitude_vector":
            yield as_bytes(self.magnitude(part))
        elif part.added:
            yield from self.scaled(key, 1, self.readers[str(part.base)])
        else:
            yield from self.converted_whole(part)

    def converted_whole(self, part: Part) -> Blocks:
        name = str(part.base)
        operation = self.operations[name]
        if isinstance(operation, Scale):
            yield from self.scaled(part.key, operation.axis, self.readers[name])
        elif isinstance(operation, Shift):
            yield as_bytes(self.shifted(part.key, operation))
        else:
            dtype = self.adapter.source.tensors[part.key].dtype
            size = int(np.prod(self.base.tensors[name].shape))
            values = read_floats(self.base, name) if self.back else np.full(size, operation.value)
            yield as_bytes(arithmetic.encode(values, dtype))

    def copied(self, key: str) -> Blocks:
        nbytes = self.adapter.source.tensors[key].nbytes
        for start in range(0, nbytes, BLOCK):
            yield memoryview(self.adapter.source.read_range(key, start, min(start + BLOCK, nbytes)))

    def scaled(self, key: str, axis: int, reader: Reader) -> Blocks:
        """A tensor whose coordinates along `axis` are channels of the norm, multiplied or divided by its scale."""
        info = self.adapter.source.tensors[key]
        for where, _, block in blocks(self.adapter.source, info, axis):
            values = arithmetic.decode(block, info.dtype)
            yield as_bytes(self.other_side(key, values, reader.scale[None, where[1], None], info.dtype))

    def other_side(self, key: str, values: Floats, scale: Floats, dtype: str) -> Bits:
        with np.errstate(all="ignore"):
            exact = np.where(values == 0, values, values / scale if self.back else values * scale)
            result = arithmetic.encode(exact, dtype)
            lost = np.isfinite(values) & ~np.isfinite(arithmetic.decode(result, dtype))
        if lost.any():
            why = "the norm's scale is zero or too near it" if self.back else f"it would overflow {dtype}"
            raise self.refusal(f"{key}: {why}")
        return result

    def stock(self, key: str, axis: int, reader: Reader) -> Floats:
        """A scaled tensor of the adapter in the form that fits the stock model, as fp64."""
        info = self.adapter.source.tensors[key]
        values = read_floats(self.adapter.source, key).reshape(info.shape)
        if not self.back:
            return values
        sizes = [len(reader.scale) if each == axis else 1 for each in range(len(info.shape))]
        return arithmetic.decode(self.other_side(key, values, reader.scale.reshape(sizes), info.dtype), info.dtype)

    def sign(self) -> int:
        return -1 if self.back else 1

    def bias_of_b(self, key: str) -> Bits:
        """The bias of B, plus B A t (on the way back: minus)."""
        rows_key = key.removesuffix("bias") + "weight"
        part = self.parts[_pair(rows_key)]
        info = self.adapter.source.tensors[rows_key]
        bias = read_floats(self.adapter.source, key) if key in self.parts else np.zeros(info.shape[0])
        reader = self.reader_of(part)
        if reader is not None:
            rows = read_floats(self.adapter.source, rows_key).reshape(info.shape)
            bias = bias + self.sign() * (rows @ (self.stock(part.key, 1, reader) @ reader.shift))
        return arithmetic.encode(bias, info.dtype)

    def shifted(self, key: str, operation: Shift) -> Bits:
        """A bias that was trained as a whole, plus W t (on the way back: minus)."""
        bias = read_floats(self.adapter.source, key)
        for each in operation.parts:
            source, info = self.tensor(each.weight)
            shift = arithmetic.fold_shift(
                read_floats(self.base, each.beta), each.scale, info.shape[each.axis], each.channels
            )
            for where, _, block in blocks(source, info, each.axis):
                values = arithmetic.decode(block, info.dtype)
                if source is self.adapter.source and self.back:
                    scale = self.readers[each.weight].scale[None, where[1], None]
                    values = arithmetic.decode(self.other_side(info.name, values, scale, info.dtype), info.dtype)
                product = np.einsum("oci,c->oi", values, shift[where[1]]).reshape(-1)
                bias[where[0] if each.axis else where[2]] += self.sign() * product
        return arithmetic.encode(bias, self.adapter.source.tensors[key].dtype)

    def magnitude(self, part: Part) -> Bits:
        """DoRA's magnitude, times the quotient of the row norms of the adapted weights in the new and the old form."""
        reader, source = self.readers[str(part.base)], self.adapter.source
        stem = part.key.removesuffix("lora_magnitude_vector")
        columns_key, rows_key = f"{stem}lora_A.weight", f"{stem}lora_B.weight"
        info, dtype = self.base.tensors[reader.name], source.tensors[columns_key].dtype
        rows = read_floats(source, rows_key).reshape(source.tensors[rows_key].shape)
        stock = self.stock(columns_key, 1, reader)
        folded = arithmetic.decode(arithmetic.encode(stock * reader.scale, dtype), dtype)
        if self.back:
            folded = read_floats(source, columns_key).reshape(stock.shape)
        rank, config = len(stock), self.adapter.config
        alpha = pattern_value(config.get("alpha_pattern"), part.name, config.get("lora_alpha", 8))
        factor = float(alpha) / (sqrt(rank) if config.get("use_rslora") else rank)
        squares = np.zeros((2, len(rows)))
        for where, _, block in blocks(self.base, info, reader.axis):
            values = arithmetic.decode(block, info.dtype)
            outputs = where[0] if reader.axis else where[2]
            scale = reader.scale[None, where[1], None]
            product = arithmetic.decode(arithmetic.encode(values * scale, info.dtype), info.dtype)
            for index, (weight, factors) in enumerate(((values, stock), (product, folded))):
                delta = factor * (rows[outputs] @ factors[:, where[1]])
                delta = delta[:, :, None] if reader.axis else delta.T[None]
                squares[index, outputs] += ((weight + delta) ** 2).sum(axis=1).reshape(-1)
        quotient = np.sqrt(squares[0] / squares[1] if self.back else squares[1] / squares[0])
        found = read_floats(source, part.key) * np.where(np.isfinite(quotient), quotient, 1.0)
        return arithmetic.encode(found, source.tensors[part.key].dtype)


def _pair(key: str) -> str:
    """Key of the matrix B that belongs to a LoRA matrix A, and of the A that belongs to a B."""
    return key.replace(".lora_A.", ".lora_B.") if ".lora_A." in key else key.replace(".lora_B.", ".lora_A.")
