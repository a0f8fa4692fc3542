"""The input of a linear, kept whole or as a sample of its rows: decided when the scope's module is done.

Where the linears that read one storage are all that hold it, one sample of its rows serves them all. Where somebody
else keeps it too, sampling would free nothing, and the gradient stays exact. So it does where the input can be
recomputed from what is kept anyway.
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

#: What one linear knows of its output's gradient before it is there: fp32 (rows,) on the device of its input, the norm
#: of each row's gradient up to a common factor, 0 for a row that gets none; None if nothing is known.
Importance = Callable[[], Tensor | None]

#: What reports call the tensors that are saved here.
__memopt_saves__ = "sampled rows"


def save_sampled(
    apply: Callable[[SampledInput], Tensor], sampling: Sampling, importance: Importance | None = None
) -> Tensor | None:
    """Output of a linear whose input may be kept as a sample of its rows when the innermost scope's module is done.

    Args:
        apply: runs an autograd function that saves its input and then its weight, and keeps the slot it is given.
        sampling: how rows are drawn.
        importance: what is known of the output's gradient.

    Returns:
        None if no scope is active, or a foreign hook keeps what is saved; then nothing was run.
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
    """fp32 (k,): what the product of each row counts."""
    kept: Packed
    """(k, width): the rows themselves, unscaled, in the dtype that all who read them use."""


class SampledInput(Slot):
    """The slot of one linear's input. `pack` is a saved-tensor hook for the call that saves it, and then a weight."""

    __slots__ = ("_handle", "_importance", "_packing", "_sampling", "dtype", "report", "sample")

    def __init__(self, sampling: Sampling, importance: Importance | None, packing: Packing) -> None:
        super().__init__()
        self._sampling, self._importance, self._packing = sampling, importance, packing
        self._handle: Handle | None = None
        self.sample: Sample | None = None
        """Set when the sample has taken the place of the input."""
        self.dtype: torch.dtype | None = None
        """What its rows are cast to before they are used, where that is known."""
        self.report: Callable[[Tensor], None] | None = None
        """Told of the gradient. It may hold tensors, so it goes with the input, however long the graph stays."""

    def pack(self, tensor: Tensor) -> Any:
        if hasattr(self, "packed"):  # the weight, which is saved after the input
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

    #: What an input is computed from can be replaced by a code only if the input is not recomputed for any reader.
    rank = 0

    def prepare(self) -> None:
        if self._handle is not None and self._handle.has_others:
            # Another handle exists: its sources are saved anyway, and recomputing the input costs no bytes.
            self.stay()
            self.held = None

    def stay(self) -> None:
        if self._handle is not None:
            self.packed, self._handle = self._handle.taken(), None

    def gives_way(self) -> bool:
        x = tensor_of(self)
        rows = x.shape[:-1].numel()
        kept = rows_kept(rows, self._sampling.budget)
        # Of an expanded input the storage may take less than the sample.
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
            scores = scores.double() * importance  # the product of two small norms may be below fp32
        rows, weights = sample_rows(scores, rows_kept(len(x), self._sampling.budget), self._sampling.method)
        for observer in observers:
            observer(scores, rows, weights, self._sampling.method)
        kept, dtypes = gather_rows(x, rows), {slot.dtype or x.dtype for slot in readers}
        if len(dtypes) == 1:  # autocast's, say
            kept = kept.to(dtypes.pop())
        keep = self._packing.keep
        return Sample(keep(rows), keep(weights), keep(kept))


def _together(each: Sequence[Importance | None]) -> Tensor | None:
    """The norm of the gradient rows of all readers side by side; None if that of one of them is unknown."""
    known = [None if importance is None else importance() for importance in each]
    # In fp64, in which the square of no fp32 norm is 0: a row that counts must have a score.
    norms = [each.double() for each in known if each is not None]
    return torch.stack(norms).norm(dim=0) if norms and len(norms) == len(known) else None


def _view(slot: SampledInput) -> Any:
    tensor = tensor_of(slot)
    return tensor.storage_offset(), tensor.size(), tensor.stride()
