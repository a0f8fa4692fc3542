"""The input of an activation, saved unchanged or as a code of the derivative: decided when the scope's module returns.

Most activations save their input. If a reader saves the output, backward recomputes the output from the unchanged
input, and the gradient is exact. If none does (the linear behind it is frozen and has no adapter, or saves a sample of
rows), backward needs only the derivative, and a code of it replaces the input. A ReLU saves its output,
which the next linear may save as well; where it does not, one bit an element replaces it, and the gradient stays
exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from memopt.recompute.specs import Recomputed, recomputed_of
from memopt.saved.scope import in_a_scope, new_slot, saving_by
from memopt.saved.slots import Compressible, Packing, Slot, tensor_of


def save_as_code(
    apply: Callable[[Codable | None], Tensor], encode: Callable[[Tensor], Tensor], *, of_output: bool = False
) -> Tensor | None:
    """Output of an activation whose input may be replaced by a code when the innermost scope's module returns.

    Args:
        apply: runs an autograd function that saves only its input (with `of_output`, its output), and gives it the
            slot.
        encode: computes the code, one tensor, of the saved tensor.

    Returns:
        The output; None if no scope is active, and then nothing was run.
    """
    if not in_a_scope():
        return None
    slot = new_slot(lambda packing: Codable(encode, packing, of_output=of_output))
    if slot is None:
        return apply(None)
    with saving_by(slot.pack):
        output = apply(slot)
    if output.grad_fn is not None:
        slot.read_through(recomputed_of(output.grad_fn))
    return output


class Codable(Slot):
    """The slot of one activation's input or output. `pack` is a saved-tensor hook for the call that saves it."""

    __slots__ = ("_encode", "_of_output", "_packing", "_recomputed", "is_coded")

    def __init__(self, encode: Callable[[Tensor], Tensor], packing: Packing, *, of_output: bool = False) -> None:
        super().__init__()
        self._encode, self._packing, self._of_output = encode, packing, of_output
        self._recomputed: Recomputed | None = None
        self.is_coded = False
        """Whether `unpack` returns the code."""

    def pack(self, tensor: Tensor) -> Codable:
        self.packed, holder = self._packing.shortest(tensor)
        # A leaf belongs to other code, and is held itself if it is trained. A saved output is detached, so a leaf too.
        if holder is not None and (self._of_output or not tensor.is_leaf):
            self.held = Compressible(self.packed, holder, tensor)
        return self

    def read_through(self, recomputed: Recomputed) -> None:
        """Set `recomputed`, which counts the readers of the output that is recomputed from the tensor."""
        self._recomputed = recomputed

    def gives_way(self) -> bool:
        return self._recomputed is not None and not self._recomputed.readers

    def exchange(self, together: Sequence[Slot]) -> None:
        self.packed = self._packing.keep(self._encode(tensor_of(self)))
        self.is_coded = True
