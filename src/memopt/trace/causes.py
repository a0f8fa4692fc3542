"""The cause of a saved tensor in a user's words, derived from its producer, the operations that save it, and the
sites of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from memopt.saved.observer import CHECKPOINT
from memopt.torch_compat.activations import OPERATIONS
from memopt.trace.storages import Birth
from memopt.walk.sites import Sites, parent

Cause = Literal[
    "norm input",
    "norm output (x_hat)",
    "norm statistics",
    "attention q/k/v",
    "attention output",
    "attention scores",
    "attention mask",
    "linear input",
    "sampled rows",
    "convolution input",
    "matmul input",
    "gate",
    "up",
    "gate and up",
    "activation input",
    "activation intermediate",
    "activation output",
    "softmax output",
    "dropout mask",
    "softmax/loss",
    "checkpoint input",
    "codes",
    "weight copy",
    "expert weights + adapter (PEFT)",
    "other",
]
#: Every cause, in the order in which tables list them.
CAUSES: tuple[Cause, ...] = get_args(Cause)

EXPERTS: Cause = "expert weights + adapter (PEFT)"
EXPERTS_NOTE = (
    "Experts: PEFT adds an adapter's product to the weights of all experts of a layer, and their sums, as large as the "
    "weights, are saved for backward. A patched model recomputes them. In a stock one, target the linears of attention "
    "alone (--lora-targets q,k,v,o), or checkpoint the blocks, which holds the sums of one at a time."
)

_NORMS = frozenset({"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"})
#: Names of Python functions. Softsign is added by hand: it consists of several operations.
_ACTIVATIONS = frozenset({"softsign", *(name for operation in OPERATIONS.values() for name in operation.functions)})
_LINEARS = frozenset({"linear", "addmm", "grouped_mm", "bilinear"})
_PRODUCTS = frozenset({"matmul", "mm", "bmm", "baddbmm", "einsum", "rmatmul"})
_LOSSES = frozenset({"cross_entropy", "nll_loss", "log_softmax", "binary_cross_entropy_with_logits", "mse_loss"})


class Causes:
    """The rules for the model of `sites`. Without sites, only single operations are recognised."""

    def __init__(self, sites: Sites | None) -> None:
        sites = sites or Sites(model_class="", model_type="")
        self._norms = {site.name for site in sites.norms} | {name for name, _ in sites.skipped}
        self._activations = {site.name for site in sites.activations if site.is_module}
        self._gates = {parent(site.gate) for site in sites.gated_mlps}
        self._ups = {parent(site.up) for site in sites.gated_mlps}
        self._hidden_size = sites.hidden_size
        # Weights of several experts in one parameter. Only those of linears: positions and class tokens are 3-d too.
        self._stacked = {site.shape for site in sites.linears if len(site.shape) == 3}
        self._linears = {site.module for site in sites.linears} | {parent(site.parameter) for site in sites.linears}

    def of(self, birth: Birth, savers: tuple[tuple[str, str], ...], *, differentiable: bool) -> Cause:
        """Cause of the storage born as `birth`, which `savers`, pairs of (module, operation), save."""
        module, operation = savers[0]
        origin = birth.origin
        if operation == CHECKPOINT:
            return "checkpoint input"
        if birth.of_parameter:
            return "weight copy"
        if operation in CAUSES:  # a step of memopt, named by its cause
            return operation
        if birth.dtype == "uint8" and len(birth.shape) == 1:  # packed codes
            return "codes"
        if any("attention" in name for _, name in savers):
            if "attention" in origin.operation:
                return "attention output"
            if "attention" in origin.function:
                return "attention scores"
            is_mask = not differentiable and (birth.dtype == "bool" or len(set(birth.shape[-2:])) == 1)
            return "attention mask" if is_mask else "attention q/k/v"
        if operation.endswith("dropout") and birth.function == operation:
            return "dropout mask"
        if operation in _LOSSES or "log_softmax" in origin.operation:
            return "softmax/loss"
        if _inside(module, self._norms) or operation in _NORMS:
            return self._of_norm(birth, module, operation)
        if _inside(module, self._activations) or operation in _ACTIVATIONS:
            return self._of_activation(birth, module, operation)
        if "softmax" in origin.operation:
            return "softmax output"
        if birth.shape in self._stacked and _inside(module, self._linears):
            return EXPERTS
        if operation in _LINEARS or (operation in _PRODUCTS and _inside(module, self._linears)):
            return "linear input"
        if operation.startswith("conv"):
            return "convolution input"
        if operation in _PRODUCTS:
            return "matmul input"
        if origin.function in _ACTIVATIONS or _inside(origin.module, self._activations):
            return "activation output"
        # An experts module computes gate, up, down and the routing. Its gate and up outputs differ from the others in
        # shape: they are no vectors, and not as wide as the hidden state.
        if birth.shape[1:] and birth.shape[-1] not in (1, self._hidden_size):
            if _inside(origin.module, self._ups):
                return "gate and up" if _inside(origin.module, self._gates) else "up"
            if _inside(origin.module, self._gates):
                return "gate"
        return "other"

    def _of_norm(self, birth: Birth, module: str, operation: str) -> Cause:
        origin = birth.origin
        made_here = (
            _inside(origin.module, self._norms) if _inside(module, self._norms) else origin.function == operation
        )
        if not made_here:
            return "norm input"
        return "norm statistics" if birth.shape[-1:] in ((), (1,)) else "norm output (x_hat)"

    def _of_activation(self, birth: Birth, module: str, operation: str) -> Cause:
        origin = birth.origin
        if origin.function == operation and operation in _ACTIVATIONS:
            return "activation output"
        if _inside(origin.module, self._activations):
            return "activation intermediate"
        if _inside(origin.module, self._gates):
            return "gate and up" if _inside(origin.module, self._ups) else "gate"
        return "activation input"


def _inside(module: str, names: Iterable[str]) -> bool:
    """Whether `module` is one of `names` or lies inside one."""
    while module:
        if module in names:
            return True
        module = module.rpartition(".")[0]
    return False
