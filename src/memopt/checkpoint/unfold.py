"""Undo folds: a norm gets its affine back, and the linears that read it are divided by its scale.

The norm y = s x_hat + t of the patched files (the identity, unless somebody trained it) feeds W and b. With the
original scale s_o and shift t_o the restored norm has s_r = s_o s and t_r = t_o + s_o t, and its linears have
W_r = W s / s_r and b_r = b + c (W t - W_r t_r), where c is the constant of the fold: the same function. s_r and t_r are
rounded to the stored dtype first, so every stored element costs one rounding. An element that still equals the folded
original becomes the original element again, bit by bit.

A trained channel whose scale is zero cannot be divided by it, and one whose scale is near zero would get weights far
larger than all others, from which quantised and 16-bit formats suffer. Such channels keep the folded form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memopt.checkpoint import arithmetic
from memopt.checkpoint.arithmetic import Bits, Floats, spread
from memopt.checkpoint.fold import Fold, FoldPlan, Scale, Shift, map_names
from memopt.checkpoint.shards import as_bytes, blocks, read_floats, scale_of, shifted
from memopt.checkpoint.sources.header import DTYPE_BITS, FLOAT_DTYPES
from memopt.checkpoint.sources.source import CheckpointSource
from memopt.checkpoint.tiles import Piece, view3
from memopt.errors import first_of

Mask = npt.NDArray[np.bool_]
#: How many times larger a quotient may be than the largest weight of its tensor, before or after training.
_GROWTH = 4.0
#: Called with (tensor of the patched files, first byte, bytes).
Put = Callable[[str, int, memoryview], None]


@dataclass
class Unfolded:
    """The result of :func:`unfold`; names of tensors are those of the patched files."""

    norms: list[str] = field(default_factory=list)
    """Norms that have their affine back."""
    original: list[str] = field(default_factory=list)
    """Tensors of which every element is the original's again."""
    computed: list[str] = field(default_factory=list)
    """Tensors with elements that were trained, and so were divided or corrected."""
    kept: list[tuple[str, str]] = field(default_factory=list)
    """(norm, reason) of norms that keep their folded form, in all channels or in some."""


def unfold(patched: CheckpointSource, original: CheckpointSource, folds: tuple[Fold, ...], put: Put) -> Unfolded:
    """Take `folds` back in the tensors of `patched`, trained or not, and `put` every tensor that they touched.
    `original` is the checkpoint that `patched` was made from; `folds` are all folds, with the names of the original's
    tensors."""
    return _Unfolding(patched, original, folds, put).run()


@dataclass(frozen=True)
class _Norm:
    """One norm of the patched files and its restored form; arrays have one entry for each channel."""

    fold: Fold
    scale: Floats
    shift: Floats
    restored_scale: Floats
    restored_shift: Floats
    identity: Mask
    """True for channels whose scale and shift are as the fold left them."""
    kept: Mask
    """True for channels that keep the folded form."""

    def keeping(self, kept: Mask) -> _Norm:
        return replace(
            self,
            kept=kept,
            restored_scale=np.where(kept, self.scale, self.restored_scale),
            restored_shift=np.where(kept, self.shift, self.restored_shift),
        )


class _Block(NamedTuple):
    """A block of a reader's weight, viewed as (before axis, axis, after axis)."""

    where: Piece
    start: int
    """First byte."""
    patched: Floats
    restored: Bits
    untouched: Mask
    """True for elements that equalled the folded original and are the original's again."""
    largest: float
    """The largest finite size of a patched or original element."""


class _Unfolding:
    def __init__(
        self, patched: CheckpointSource, original: CheckpointSource, folds: tuple[Fold, ...], put: Put
    ) -> None:
        self.patched, self.source, self.put = patched, original, put
        self.operations = FoldPlan(folds).operations()
        renamed = {key: patched.renamed.get(name, name) for name, key in original.renamed.items()}
        self.keys = {name: key for name, key in renamed.items() if key in patched.tensors}
        self.keys |= map_names({name for fold in folds for name in fold.touched}, patched.tensors)
        reasons = {fold: self.obstacle(fold) for fold in folds}
        self.done = Unfolded(kept=[(fold.norm, reason) for fold, reason in reasons.items() if reason])
        #: by the name of its weight
        self.norms = {fold.weight: self.norm(fold) for fold, reason in reasons.items() if not reason}
        self.owners = {name: weight for weight, norm in self.norms.items() for name in norm.fold.own}

    def run(self) -> Unfolded:
        with np.errstate(all="ignore"):
            for weight, norm in self.norms.items():
                self.norms[weight] = norm.keeping(self.lost(norm))
            readers = dict.fromkeys(reader.weight for norm in self.norms.values() for reader in norm.fold.consumers)
            corrections: dict[str, Floats] = {}
            untouched = {name for name in readers if self.unfold_weight(name, corrections)}
            for name, correction in corrections.items():
                self.unfold_bias(name, correction, untouched)
            for norm in self.norms.values():
                self.restore(norm)
        return self.done

    def obstacle(self, fold: Fold) -> str | None:
        """Why the files do not allow to undo `fold`; None if they do."""
        for name in sorted(fold.touched):
            if name not in self.source.tensors:
                return f"the original has no {name}"
            if name not in self.keys:
                return f"{name} is not in the folder"
            before, info = self.source.tensors[name], self.patched.tensors[self.keys[name]]
            if info.shape != before.shape:
                return f"{name} has another shape in the original"
            if not {info.dtype, before.dtype} <= FLOAT_DTYPES:
                return f"{name} is stored as {info.dtype}, which holds no plain weights"
        return None

    def norm(self, fold: Fold) -> _Norm:
        """The norm of `fold`, with no channel kept in its folded form."""
        dtype = self.dtype(fold.weight)
        gamma, scale = read_floats(self.source, fold.weight), self.floats(fold.weight) + fold.offset
        shift = original_shift = np.zeros_like(scale)
        if fold.bias:
            shift, original_shift = self.floats(fold.bias), read_floats(self.source, fold.bias)
        identity = (scale == 1) & (shift == 0)
        trained = (gamma + fold.offset) * scale - fold.offset
        restored = _rounded(np.where(identity, gamma, trained), dtype) + fold.offset
        restored_shift = _rounded(original_shift + (gamma + fold.offset) * shift, dtype)
        return _Norm(fold, scale, shift, restored, restored_shift, identity, np.zeros_like(identity))

    def lost(self, norm: _Norm) -> Mask:
        """Channels with trained weights that cannot be divided by the channel's scale; see the top of the file."""
        lost: Mask = (norm.restored_scale == 0) & ~norm.identity
        for reader in norm.fold.consumers:
            channels = np.arange(len(lost)) if reader.channels is None else np.asarray(reader.channels)
            largest = np.zeros(len(channels))
            limit = 0.0
            for block in self.blocks(reader.weight):
                restored = np.abs(arithmetic.decode(block.restored, self.dtype(reader.weight)))
                trained = np.where(block.untouched, 0.0, np.nan_to_num(restored, nan=np.inf)).max(axis=(0, 2))
                largest[block.where[1]] = np.maximum(largest[block.where[1]], trained)
                limit = max(limit, block.largest)
            lost[channels[(largest > _GROWTH * limit) & (channels >= 0)]] = True
        return lost

    def unfold_weight(self, name: str, corrections: dict[str, Floats]) -> bool:
        """Restore a reader's weight, and add up its biases' corrections; returns whether it is the original's again."""
        key, dtype = self.keys[name], self.dtype(name)
        shape = self.patched.tensors[key].shape
        parts = [
            (bias, part, self.norms[self.owners[part.beta]])
            for bias, operation in self.operations.items()
            if isinstance(operation, Shift)
            for part in operation.parts
            if part.weight == name and part.beta in self.owners
        ]
        sums = {bias: np.zeros(view3(shape, part.axis)[::2]) for bias, part, _ in parts}
        untouched = True
        for block in self.blocks(name):
            untouched &= bool(block.untouched.all())
            self.put(key, block.start, as_bytes(block.restored))
            restored = arithmetic.decode(block.restored, dtype) if parts else block.patched
            for bias, part, norm in parts:
                before, after = (
                    arithmetic.fold_shift(each, part.scale, shape[part.axis], part.channels)[block.where[1]]
                    for each in (norm.shift, norm.restored_shift)
                )
                product = np.einsum("osi,s->oi", block.patched, before) - np.einsum("osi,s->oi", restored, after)
                sums[bias][block.where[0], block.where[2]] += product
        for bias, total in sums.items():
            flat = total.reshape(prod(self.source.tensors[bias].shape), -1).sum(axis=1)
            corrections[bias] = corrections.get(bias, 0.0) + flat
        self.record(key, untouched)
        return untouched

    def blocks(self, name: str) -> Iterator[_Block]:
        """A reader's weight, block by block."""
        operation, key = self.operations[name], self.keys[name]
        assert isinstance(operation, Scale)
        info, before = self.patched.tensors[key], self.source.tensors[name]
        size = info.shape[operation.axis]
        folded = scale_of(self.source, operation, size)
        factor, free = np.ones(size), np.ones(size, dtype=bool)
        for part in operation.parts:
            norm, count = self.norms.get(part.gamma), prod(self.source.tensors[part.gamma].shape)
            # Infinite or NaN where the restored scale is zero.
            quotient = np.ones(count) if norm is None else norm.scale / norm.restored_scale
            factor *= spread(quotient, size, part.channels, neutral=1.0)
            own = np.zeros(count) if norm is None else norm.identity & ~norm.kept
            free &= spread(own.astype(np.float64), size, part.channels, neutral=1.0) > 0
        width, width_before = (DTYPE_BITS[each.dtype] // 8 for each in (info, before))
        for where, start, bits in blocks(self.patched, info, operation.axis):
            column = (None, where[1], None)
            first, last = (at // width * width_before for at in (start, start + bits.nbytes))
            old = arithmetic.stored(self.source.read_range(name, first, last), before.dtype).reshape(bits.shape)
            before_fold = arithmetic.decode(old, before.dtype)
            product = arithmetic.encode(before_fold * folded[column], before.dtype)
            untouched = (_converted(product, before.dtype, info.dtype) == bits) & free[column]
            values = arithmetic.decode(bits, info.dtype)
            divided = np.where(factor[column] == 1, bits, arithmetic.encode(values * factor[column], info.dtype))
            restored = np.where(untouched, _converted(old, before.dtype, info.dtype), divided)
            yield _Block(where, start, values, restored, untouched, max(_largest(values), _largest(before_fold)))

    def unfold_bias(self, name: str, correction: Floats, untouched: set[str]) -> None:
        """Restore the bias of a reader."""
        operation, dtype, before = self.operations[name], self.dtype(name), self.source.tensors[name].dtype
        assert isinstance(operation, Shift)
        bits = arithmetic.stored(self.patched.read_range(self.keys[name]), dtype)
        restored = arithmetic.encode(arithmetic.decode(bits, dtype) + correction, dtype)
        same = np.zeros(bits.shape, dtype=bool)
        if all(part.weight in untouched for part in operation.parts):
            same = _converted(shifted(self.source, name, operation), before, dtype) == bits
            restored = np.where(same, self.original(name), restored)
        self.put(self.keys[name], 0, as_bytes(restored))
        self.record(self.keys[name], bool(same.all()))

    def restore(self, norm: _Norm) -> None:
        """Restore the norm's own tensors."""
        fold = norm.fold
        for name, values in zip(fold.own, (norm.restored_scale - fold.offset, norm.restored_shift), strict=False):
            old = self.original(name)
            restored = np.where(norm.identity & ~norm.kept, old, arithmetic.encode(values, self.dtype(name)))
            self.put(self.keys[name], 0, as_bytes(restored))
            self.record(self.keys[name], bool((restored == old).all()))
        if not norm.kept.any():
            self.done.norms.append(fold.norm)
            return
        channels = [str(channel) for channel in np.flatnonzero(norm.kept)]
        readers = ", ".join(self.keys[reader.weight] for reader in fold.consumers)
        why = (
            f"its scale is too near zero in channel {first_of(channels)} of {len(norm.kept)} to divide {readers} by it"
        )
        self.done.kept.append((fold.norm, why))

    def dtype(self, name: str) -> str:
        return self.patched.tensors[self.keys[name]].dtype

    def floats(self, name: str) -> Floats:
        return read_floats(self.patched, self.keys[name])

    def original(self, name: str) -> Bits:
        """The original tensor, flat, in the dtype of the patched one."""
        before = self.source.tensors[name].dtype
        return _converted(arithmetic.stored(self.source.read_range(name), before), before, self.dtype(name))

    def record(self, key: str, original: bool) -> None:
        (self.done.original if original else self.done.computed).append(key)


def _converted(bits: Bits, dtype: str, to: str) -> Bits:
    return bits if dtype == to else arithmetic.encode(arithmetic.decode(bits, dtype), to)


def _rounded(values: Floats, dtype: str) -> Floats:
    return arithmetic.decode(arithmetic.encode(values, dtype), dtype)


def _largest(values: Floats) -> float:
    return float(np.abs(values).max(initial=0.0, where=np.isfinite(values)))
