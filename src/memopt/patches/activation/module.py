"""Activation modules that save only their input: activations of several operations, and activations whose output the
next linear recomputes.

If nothing saves the output (the linear behind it is frozen and has no adapter, or saves a sample of rows), backward
needs only the derivative, and a code of it may replace the input when the scope's module returns. A ReLU saves its
output, which the next linear may save as well; if it does not, one bit an element may replace it, exactly.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memopt.kernels.activation.function import Dtypes, recomputed_activation, recomputed_relu
from memopt.kernels.base.device import runs_triton
from memopt.kernels.derivative_codes.codes import code_of, derivative_code, encode
from memopt.kernels.derivative_codes.function import CodableFunction, MaskableReluFunction, coded_activation
from memopt.kernels.derivative_codes.schemes import RELU_MASK, DerivativeCode
from memopt.patches.reads import observed_reads
from memopt.patches.swap import is_watched, steps_aside, swap_forward
from memopt.recompute.specs import Recomputed, keep_producer, recomputed_of
from memopt.recompute.versions import with_witness
from memopt.saved.scope import in_a_scope, new_slot, recomputes, saving_by
from memopt.saved.slots import Compressible, Packing, Slot, tensor_of
from memopt.saved.whole import kept_whole
from memopt.torch_compat import storage_id, storage_use_count, tensor_uses
from memopt.torch_compat.activations import ACTIVATIONS, SMOOTH
from memopt.walk.probes.isolate import with_stand_ins
from memopt.walk.sites import ActivationSite

if TYPE_CHECKING:
    from memopt.patches.activation.patch import ActivationRules


@dataclass(frozen=True)
class ActivationRewrite:
    """State of a patched activation."""

    kind: str
    """As in `memopt.walk.sites.ActivationSite`."""
    is_one_operation: bool
    """The stock module saves only its input, and runs without Triton; memopt's kernel also serves the next linear."""
    saves_its_output: bool = False
    """The stock module saves its output; the patched module saves its input if the input can be recomputed."""
    in_place: bool = False
    """The stock module writes into its input; the patched module does so only if the input cannot be recomputed."""
    linear: str | None = None
    """Name of a child linear that runs first: the activation is a function of its output. None without one."""
    code: DerivativeCode | None = None
    """Code saved in place of the input: always with `is_always_coded`, else only if nothing saves the output."""
    is_always_coded: bool = False
    dtypes: Dtypes = field(default_factory=dict, compare=False, repr=False)


def patch_activation(module: nn.Module, site: ActivationSite, rules: ActivationRules | None = None) -> None:
    """Make `module` save only its input (its linear's output, if it has one). It must be elementwise. `rules` name the
    code that is saved instead, if any; with them, a module that saves its output saves a mask. Raises a ValueError if
    the module cannot be swapped, or its derivative has no such code."""
    rewrite = ActivationRewrite(site.kind, site.operations == 1, site.saves_its_output, site.in_place, site.linear)
    if rules is not None and site.saves_its_output:
        rewrite = dataclasses.replace(rewrite, code=RELU_MASK)
    elif rules is not None and rules.code != "none":
        known = site.kind in ACTIVATIONS
        # Not the bound method, because unpickling that would give the patched forward.
        stock = functools.partial(type(module).forward, module)
        code = derivative_code(site.kind, rules.code) if known else code_of(stock, rules.code)
        rewrite = dataclasses.replace(rewrite, code=code, is_always_coded=rules.where == "all")
    own, children = (*module._parameters, *module._buffers), {} if site.linear is None else {site.linear: nn.Identity()}
    z = torch.ones(2, max((parameter.numel() for parameter in module.parameters(False)), default=1), 2, device="cpu")
    reads = observed_reads(module, lambda alone: alone.forward(z), fresh=own, children=children)
    swap_forward(module, _forward if site.kind in SMOOTH else _forward_whole, rewrite, reads)


def _forward(
    stock: Callable[..., Tensor], rewrite: ActivationRewrite, module: nn.Module, *args: Any, **kwargs: Any
) -> Tensor:
    given = (*args, *kwargs.values())
    off = "" if rewrite.code is None else "activations keep no codes, and gradients are exact; codes need eager mode"
    if steps_aside(off=off) or len(given) != 1:
        return stock(module, *args, **kwargs)
    z: Tensor = given[0]
    function: Callable[[Tensor], Tensor] = functools.partial(stock, module)
    if rewrite.linear is not None:
        alone = with_stand_ins(module, {rewrite.linear: nn.Identity()}, training=module.training)
        z, function = getattr(module, rewrite.linear)(z), functools.partial(stock, alone)
    if rewrite.in_place:
        return _in_place(stock, rewrite, module, z)
    # If the input can be recomputed, so can the output, which costs less than a mask.
    is_recomputed = rewrite.saves_its_output and recomputes(z)
    if rewrite.code is not None and z.requires_grad and not is_recomputed:
        coded = _coded(z, function, rewrite.code, rewrite.is_always_coded)
        if coded is not None:
            return with_witness(coded)
    is_stock = not is_recomputed if rewrite.saves_its_output else rewrite.is_one_operation and not runs_triton(z)
    if is_stock or not z.requires_grad:
        return with_witness(function(z))
    specifies = not rewrite.saves_its_output
    if rewrite.saves_its_output and rewrite.kind == "relu":
        h = recomputed_relu(z)
    else:
        h = recomputed_activation(z, function, rewrite.kind, rewrite.dtypes, specifies=specifies)
    h = with_witness(h)
    if is_watched(module):
        keep_producer(h)
    return h


def _forward_whole(stock: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    with kept_whole():
        return _forward(stock, *args, **kwargs)


def _in_place(stock: Callable[..., Tensor], rewrite: ActivationRewrite, module: nn.Module, z: Tensor) -> Tensor:
    """The output, swapped into the object `z` so that all references see it: a stock write in place would keep it from
    being recomputed. The stock forward runs if another tensor shares the memory of `z` and must change too."""
    if type(z) is not Tensor or not z.requires_grad or not _is_alone(z) or not recomputes(z):
        return stock(module, z)
    if rewrite.kind == "relu":
        h = recomputed_relu(z, in_place=True)
    else:
        alone = with_stand_ins(module, training=module.training)
        vars(alone)["inplace"] = False
        function = functools.partial(stock, alone)
        if rewrite.is_one_operation and not runs_triton(z):
            h = function(z)
        else:
            h = recomputed_activation(z, function, rewrite.kind, rewrite.dtypes, specifies=False)
    torch.utils.swap_tensors(z, h)
    return with_witness(z)


def _is_alone(z: Tensor) -> bool:
    """Whether no other tensor shares the memory of `z`, and only Python refers to `z`, so that it can be swapped."""
    owners = storage_use_count(storage_id(z.untyped_storage()))  # z, and the storage's own Python object
    return owners <= 2 and tensor_uses(z) == 1 and not weakref.getweakrefs(z)


def _coded(z: Tensor, function: Callable[[Tensor], Tensor], code: DerivativeCode, always: bool) -> Tensor | None:
    """The output of an activation that may save a code; None where no scope shows whether the output is saved."""
    if code == RELU_MASK:
        return save_as_code(
            lambda slot: MaskableReluFunction.apply(z, slot),  # type: ignore[no-untyped-call]
            lambda kept: encode(kept, code),
            of_output=True,
        )
    if always:
        return coded_activation(z, function, code)
    return save_as_code(
        lambda slot: CodableFunction.apply(z, function, code, slot),  # type: ignore[no-untyped-call]
        lambda kept: encode(kept, code),
    )


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

    def is_replaceable(self) -> bool:
        return self._recomputed is not None and not self._recomputed.readers

    def exchange(self, together: Sequence[Slot]) -> None:
        self.packed = self._packing.keep(self._encode(tensor_of(self)))
        self.is_coded = True
