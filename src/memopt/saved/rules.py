"""Rules of PyTorch's own operations: which of their outputs can be recomputed from what they save."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from memopt.recompute_rules import RULES, Node, Rule, recomputable
from memopt.torch_compat import SAVED_FIELDS, saved, shows_saved

_LEAF_NODE = "torch::autograd::AccumulateGrad"


def _keeps_both_operands(node: Node) -> bool:
    # d(ab) needs a for b's gradient and b for a's: both are saved exactly when both edges lead somewhere. Products
    # with a parameter do not count: sharding may have freed it by the time that a reader of the product asks.
    edges = [edge for edge, _ in node.next_functions]
    return len(edges) == 2 and all(edge is not None and edge.name() != _LEAF_NODE for edge in edges)


@recomputable("MulBackward0", "gated_mlp", _keeps_both_operands)
def _product(node: Node) -> Tensor:
    return torch.mul(saved(node, "self"), saved(node, "other"))


@recomputable("SiluBackward0", "activation")
def _silu(node: Node) -> Tensor:
    return F.silu(saved(node, "self"))


@recomputable("GeluBackward0", "activation")
def _gelu(node: Node) -> Tensor:
    return F.gelu(saved(node, "self"), approximate=saved(node, "approximate"))


@recomputable("MishBackward0", "activation")
def _mish(node: Node) -> Tensor:
    return F.mish(saved(node, "self"))


@recomputable("HardswishBackward0", "activation")
def _hardswish(node: Node) -> Tensor:
    return F.hardswish(saved(node, "self"))


@recomputable("LeakyReluBackward0", "activation")
def _leaky_relu(node: Node) -> Tensor:
    return F.leaky_relu(saved(node, "self"), saved(node, "negative_slope"))


@recomputable("EluBackward0", "activation")
def _elu(node: Node) -> Tensor:  # SELU too
    z, alpha = saved(node, "self"), saved(node, "alpha")
    h: Tensor = torch.ops.aten.elu(z, alpha, saved(node, "scale"), saved(node, "input_scale"))
    return h


@recomputable("SoftplusBackward0", "activation")
def _softplus(node: Node) -> Tensor:
    return F.softplus(saved(node, "self"), saved(node, "beta"), saved(node, "threshold"))


@recomputable("HardtanhBackward0", "activation")
def _hardtanh(node: Node) -> Tensor:  # ReLU6 too
    return F.hardtanh(saved(node, "self"), saved(node, "min_val"), saved(node, "max_val"))


@recomputable("HardsigmoidBackward0", "activation")
def _hardsigmoid(node: Node) -> Tensor:
    return F.hardsigmoid(saved(node, "self"))


@recomputable("CeluBackward0", "activation")
def _celu(node: Node) -> Tensor:
    return F.celu(saved(node, "self"), saved(node, "alpha"))


@recomputable("LogSigmoidBackward0", "activation")
def _log_sigmoid(node: Node) -> Tensor:
    return F.logsigmoid(saved(node, "self"))


@recomputable("ClampBackward1", "activation")
def _clamp(node: Node) -> Tensor:
    return torch.clamp(saved(node, "self"), saved(node, "min"), saved(node, "max"))


@recomputable("GluBackward0", "activation")
def _glu(node: Node) -> Tensor:
    return F.glu(saved(node, "self"), signed(saved(node, "dim")))


@recomputable("PowBackward0", "activation")
def _power(node: Node) -> Tensor:
    return torch.pow(saved(node, "self"), saved(node, "exponent"))


def signed(number: int) -> int:
    """A saved dimension as it was given: nodes show negative ones as huge positive ones."""
    return number - 2**64 if number >= 2**63 else number


def _kept_output(node: Node) -> Tensor:
    output: Tensor = saved(node, "output")
    return output


def _kept_result(node: Node) -> Tensor:
    result: Tensor = saved(node, "result")
    return result


#: Operations that keep their result: softmax in fp32 and its 16-bit cast, for one, would both be kept.
for _name in ("SoftmaxBackward0", "SigmoidBackward0", "TanhBackward0", "ReluBackward0", "ExpBackward0"):
    RULES[_name] = Rule(_kept_result, lambda node: True, "activation", of_copies_only=True)

#: Attention keeps its output in the layout of the queries; the linear behind it keeps a copy in its own layout.
for _name in ("FlashAttention", "EfficientAttention", "CudnnAttention", "FlashAttentionForCpu"):
    RULES[f"ScaledDotProduct{_name}Backward0"] = Rule(
        _kept_output, lambda node: True, "activation", of_copies_only=True
    )

# A rule that cannot read what its nodes saved would fail in backward.
for _name in SAVED_FIELDS:
    if not shows_saved(_name):
        RULES.pop(_name, None)
