"""The input of a linear, kept whole or as a sample of its rows. The end of the scope's module decides which.

If only linears that read the input hold its storage, one sample of its rows serves them all. If anything else holds it,
sampling would free nothing, so the input stays whole and the gradient exact. The input is not sampled either if it can
be recomputed from tensors that are saved anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.sampled_linear.function import gather_rows, row_norms
from memopt.kernels.sampled_linear.sampling import Method, rows_kept, sample_rows
from memopt.saved.handles import Handle
from memopt.saved.pinned import Packed
from memopt.saved.scope import new_slot, saving_by
from memopt.saved.slots import Compressible, Packing, Slot, tensor_of

#: Bytes of an index and a weight.
_PER_ROW = torch.int32.itemsize + torch.float32.itemsize

#: Called with the scores of all rows, the rows that are saved, their weights and the method.
observers: list[Callable[[Tensor, Tensor, Tensor, Method], None]] = []

#: Predicts the gradient of a linear's output: fp32 (rows,) on the device of its input, the norm of each row's gradient
#: up to a common factor, 0 for a row without gradient; None if there is no prediction.
Importance = Callable[[], Tensor | None]

#: The name in reports for tensors that are saved here.
__memopt_saves__ = "sampled rows"


def save_sampled(
    apply: Callable[[SampledInput], Tensor], sampling: Sampling, importance: Importance | None = None
) -> Tensor | None:
    """Output of a linear whose input may be kept as a sample of its rows when the innermost scope's module is done.

    Args:
        apply: runs an autograd function that saves its input and then its weight, and keeps the given slot.
        sampling: how rows are drawn.
        importance: predicts the norms of the output's gradient.

    Returns:
        None if no scope is active, or a foreign hook keeps the saved tensors; `apply` was not called then.
    """
    slot = new_slot(lambda packing: SampledInput(sampling, importance, packing))
    if slot is None:
        return None
    with saving_by(slot.pack):
        return apply(slot)


@dataclass(frozen=True)
class Sampling:
    """How rows are drawn."""

    method: Method = "systematic"
    budget: float = 0.3
    """Part of the rows that is kept."""


@dataclass(frozen=True)
class Sample:
    """Rows of a matrix X that stand for all of it in dY^T X."""

    rows: Packed
    """int32 (k,)."""
    weights: Packed
    """fp32 (k,): the weight of each row's product."""
    kept: Packed
    """(k, width): the rows, unscaled, in the dtype of the products if all readers use one, else in the input's."""


class SampledInput(Slot):
    """The slot of one linear's input. `pack` is the saved-tensor hook of a call that saves input, then weight."""

    __slots__ = ("_handle", "_importance", "_packing", "_sampling", "dtype", "report", "sample")

    def __init__(self, sampling: Sampling, importance: Importance | None, packing: Packing) -> None:
        super().__init__()
        self._sampling, self._importance, self._packing = sampling, importance, packing
        self._handle: Handle | None = None
        self.sample: Sample | None = None
        """The sample that has replaced the input; None while the input is whole."""
        self.dtype: torch.dtype | None = None
        """The dtype to which backward casts the rows, if known."""
        self.report: Callable[[Tensor], None] | None = None
        """Receives the gradient's row norms. Kept here, since it may hold tensors: they are freed with the input."""

    def pack(self, tensor: Tensor) -> Any:
        if hasattr(self, "packed"):  # `tensor` is the weight, which is saved after the input
            return self._packing.whole(tensor)[0]
        handle = self._packing.follow(tensor)
        if handle is not None and not handle.may_be_coded:
            self.packed = handle.taken()
            return self
        self._handle = handle
        self.packed, holder = self._packing.whole(tensor)
        if holder is not None and not tensor.is_leaf and tensor.dim() > 1:
            self.held = Compressible(self.packed, holder, tensor)
        return self

    def unpack(self) -> Tensor:
        """The input or, once there is a `sample`, its rows."""
        return self.packed.unpack()

    #: Inputs are settled first: a tensor can become a code only if no reader recomputes an input from it.
    rank = 0

    def prepare(self) -> None:
        if self._handle is not None and self._handle.has_others:
            # Another handle exists: the tensors that it reads are saved anyway, so recomputing costs no bytes.
            self.stay()
            self.held = None

    def stay(self) -> None:
        if self._handle is not None:
            self.packed, self._handle = self._handle.taken(), None

    def is_replaceable(self) -> bool:
        x = tensor_of(self)
        rows = x.shape[:-1].numel()
        kept = rows_kept(rows, self._sampling.budget)
        # The storage of an expanded input may be smaller than the sample.
        return kept < rows and kept * (x.shape[-1] * x.element_size() + _PER_ROW) < x.untyped_storage().nbytes()

    def exchange(self, together: Sequence[Slot]) -> None:
        group = [slot for slot in together if isinstance(slot, SampledInput) and slot.held is not None]
        readers = [slot for slot in group if _view(slot) == _view(self)]
        self.sample = next((slot.sample for slot in readers if slot.sample is not None), None)
        if self.sample is None:
            self.sample = self._draw(readers)
        self.packed, self._handle = self.sample.kept, None

    def _draw(self, readers: Sequence[SampledInput]) -> Sample:
        x = tensor_of(self)
        x = x.reshape(-1, x.shape[-1])
        scores = row_norms(x)
        importance = _together([slot._importance for slot in readers])
        if importance is not None:
            scores = scores.double() * importance  # in fp64: the product of two small norms may underflow in fp32
        rows, weights = sample_rows(scores, rows_kept(len(x), self._sampling.budget), self._sampling.method)
        for observer in observers:
            observer(scores, rows, weights, self._sampling.method)
        kept, dtypes = gather_rows(x, rows), {slot.dtype or x.dtype for slot in readers}
        if len(dtypes) == 1:  # e.g. the dtype of autocast
            kept = kept.to(dtypes.pop())
        keep = self._packing.keep
        return Sample(keep(rows), keep(weights), keep(kept))


def _together(each: Sequence[Importance | None]) -> Tensor | None:
    """The norm over all readers of each row's gradient; None if one reader has no prediction."""
    known = [None if importance is None else importance() for importance in each]
    # In fp64, where the square of a small fp32 norm is not 0: a row with a gradient must have a score.
    norms = [each.double() for each in known if each is not None]
    return torch.stack(norms).norm(dim=0) if norms and len(norms) == len(known) else None


def _view(slot: SampledInput) -> Any:
    tensor = tensor_of(slot)
    return tensor.storage_offset(), tensor.size(), tensor.stride()
