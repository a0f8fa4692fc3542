"""The producer of each tensor (a norm, a linear, an activation, a gated product), followed op by op.

Driven by `memopt.walk.flow.shadow` while forwards run; yields activations, gated MLPs, linears, dropouts and the loss
head as site data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, nn

from memopt.torch_compat import is_dropout, operator_schema, tree_leaves
from memopt.torch_compat.activations import OPERATIONS, kind_of_call
from memopt.walk.aten.ops import MOVEMENT, NORM_FUNCTIONS, PADS
from memopt.walk.aten.parameters import ParameterTable, storage_key
from memopt.walk.aten.rules import OpCall
from memopt.walk.calls.outputs import output_tensors
from memopt.walk.sites import ActivationSite, DropoutSite, GatedMLPSite, LinearSite, LossHead

_ONE_A_SAMPLE = "its logits are not a row of classes for each token, and small"
_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
_SOFTMAXES = frozenset({"softmax", "_softmax"})
#: Greatest relative difference between a head's classes and the rows of the input embedding: either may be padded.
_PADDED = 0.1
#: Ops that :meth:`Labels._see_scores` records.
_OF_SCORES = frozenset({"embedding", "_log_softmax", "nll_loss_forward", "nll_loss2d_forward"})
#: Ops whose output has the origin of their input.
_KEEP_ORIGIN = MOVEMENT | PADS | {"clamp", "clamp_min", "clamp_max", "native_dropout", "dropout"}


@dataclass(frozen=True)
class _Origin:
    """The producer of a tensor. `part` distinguishes the pieces of a fused linear's output."""

    kind: Literal["norm", "linear", "activation", "gated", "scores"]
    """`scores`: the log_softmax of a linear's output."""
    name: str
    part: tuple[int, ...] = ()
    scaled: bool = False
    copied: bool = False
    operations: tuple[str, ...] = ()
    """Operations applied to a linear's output, in order and in words, as ``scale 0.25``."""


@dataclass
class _Activation:
    site: ActivationSite
    reads: _Origin | None = None


@dataclass
class _Gated:
    site: GatedMLPSite
    activation: str
    modules: list[str] = field(default_factory=list)


class Labels:
    """Collects sites while forwards run: in eval mode from the origins of tensors, with `training` from dropouts."""

    def __init__(self, model: nn.Module, activations: Mapping[str, ActivationSite]) -> None:
        self.activations_by_module = dict(activations)
        self.training = False
        self.function_norms: dict[str, str] = {}
        self.norms_read: dict[str, set[str]] = {}
        """Activation -> the norms whose outputs it reads."""
        self._modules = dict(model.named_modules())
        self._origins: dict[int, tuple[Tensor, _Origin]] = {}
        self._activations: dict[str, _Activation] = {}
        self._gated: dict[str, _Gated] = {}
        self._linears: dict[str, LinearSite] = {}
        self.hidden: set[str] = set()  # weights whose product no operation showed
        self.products = 0  # recorded so far
        self._readers: dict[int, dict[str, None]] = {}
        self._shared: dict[str, dict[str, None]] = {}
        self._alive: list[Tensor] = []
        self._dropouts: dict[str, DropoutSite] = {}
        self._softmaxes: dict[str, None] = {}
        self._heads: dict[str, tuple[int, bool, int, tuple[str, ...]]] = {}
        """Weight -> its logits: dimensions, whether the model itself returns them, number of classes, operations."""
        self._inputs: tuple[Tensor, ...] = ()
        self._vocabularies: set[int] = set()
        """Row counts of the embedding tables that the model's inputs index."""

    # -- events -------------------------------------------------------------------------------------------------

    def begins(self, inputs: Mapping[str, Any]) -> None:
        """A call with these arguments begins."""
        self._inputs = tuple(leaf for leaf in tree_leaves(dict(inputs)) if isinstance(leaf, Tensor))

    def norm(self, name: str, output: Tensor) -> None:
        self._set(output, _Origin("norm", name))

    def activation(self, name: str, source: Tensor, output: Tensor) -> None:
        """Record that the activation module `name` ran."""
        if not self.training:
            probe = self.activations_by_module[name]
            self._activated(name, replace(probe, name=name), source, output)

    def contraction(
        self, weight: str, shape: tuple[int, ...], source: Tensor, output: Any, module: str, *, computed: bool = False
    ) -> None:
        """Record that `source` was contracted with the parameter `weight`, or with a tensor `computed` from it."""
        self.products += 1
        site = self._linears.setdefault(weight, LinearSite(weight, module, shape, source.shape[-1]))
        if computed and not site.computed:
            self._linears[weight] = replace(site, computed=True)
        if self.training:
            return
        origin = self._origin(source)
        if origin is not None and origin.kind != "scores":
            self._feeds(origin, weight, module)
        key = storage_key(source)
        if key is not None:
            readers = self._readers.setdefault(key, {})
            readers[weight] = None
            self._alive.append(source)
            for reader in readers:
                self._shared.setdefault(reader, {}).update(readers)
        if isinstance(output, Tensor):
            self._set(output, _Origin("linear", weight, (id(output),)))

    def hidden_product(self, weight: str, shape: tuple[int, ...], source: Tensor, output: Tensor, module: str) -> None:
        """Record that `module`, a linear whose code hides the product, ran (float8 training multiplies casts)."""
        self.hidden.add(weight)
        self.contraction(weight, shape, source, output, module, computed=True)

    def bias(self, weight: str, bias: str) -> None:
        self._linears[weight] = replace(self._linears[weight], bias=bias)

    def operation(self, call: OpCall, here: str, parameters: ParameterTable) -> None:
        """Record an op that is no contraction with a parameter."""
        name = call.name.rstrip("_") if call.name not in MOVEMENT else call.name
        if name in NORM_FUNCTIONS:
            self.function_norms.setdefault(here, name)
        if name in _SOFTMAXES and len(call.tensors[0].shape) > 2:
            self._softmaxes.setdefault(here)
        if self.training:
            self._see_dropout(call, here)
        elif name in _OF_SCORES:
            self._see_scores(name, call)
        elif here not in self.activations_by_module and call.outputs and call.tensors:
            self._see(name, call, here, parameters)

    def outputs(self, output: Any, *, of_the_model: bool = True) -> None:
        """Find the linears that compute the logits in `output`, which a call returned. Logits are the fields of a
        mapping named ``*logits`` and, in any output, tensors with a row for each token over the vocabulary of the
        model's inputs. Logits of a part that was called alone (`of_the_model` False) rank last."""
        if self.training:
            return
        named = output.items() if isinstance(output, Mapping) else ()
        for key, tensor in named:
            if isinstance(tensor, Tensor) and str(key).endswith("logits") and tensor.dim() in (2, 3):
                self._head(tensor, tensor.dim(), of_the_model=of_the_model)
        for _, tensor in output_tensors(output) if of_the_model else ():
            last = tensor.shape[-1] if tensor.dim() == 3 else 0
            if last and any(abs(last - size) <= _PADDED * size for size in self._vocabularies):
                self._head(tensor, tensor.dim())

    def _head(self, logits: Tensor, dimensions: int, *, of_the_model: bool = True, read: int = 0) -> None:
        """Record the linear that computed `logits`, if any, as a head; the last `read` operations are the loss's."""
        if (found := self._logits(logits)) is not None and not self._linears[found[0]].computed:
            weight, operations = found
            if isinstance(self._modules.get(self._linears[weight].module), _CONVOLUTIONS):
                return  # it maps no row of features alone: the map of a segmentation (CLIPSeg)
            head = (dimensions, of_the_model, logits.shape[-1], operations[: len(operations) - read])
            self._heads[weight] = max(head, self._heads.get(weight, head))

    def _logits(self, tensor: Tensor) -> tuple[str, tuple[str, ...]] | None:
        """The weight of the linear that computed `tensor`, and the operations between; None if no linear did."""
        origin = self._origin(tensor)
        if origin is None:
            return None
        operations = origin.operations
        if origin.kind == "activation":  # a soft cap
            kind, origin = self._activations[origin.name].site.kind, self._activations[origin.name].reads
            operations = _capped(origin.operations if origin is not None else (), kind, operations)
        is_one = origin is not None and origin.kind in ("linear", "scores")
        return (origin.name, operations) if origin is not None and is_one else None

    def _see_scores(self, name: str, call: OpCall) -> None:
        """Record an embedding of the model's inputs, a log_softmax, or a loss that reads a log_softmax."""
        first = call.tensors[0]
        if name == "embedding":
            keys = {storage_key(each) for each in self._inputs}
            if storage_key(call.tensors[1]) in keys:
                self._vocabularies.add(first.shape[0])
        elif name == "_log_softmax":
            if (found := self._logits(first)) is not None:
                self._set(call.outputs[0], _Origin("scores", found[0], operations=(*found[1], "log_softmax")))
        elif (origin := self._origin(first)) is not None and origin.kind == "scores":
            self._head(first, 3 if len(first) > self._samples else 2, read=1)

    @property
    def _samples(self) -> int:
        """Number of samples in the call; 1 for a single row of tokens."""
        most = max((tensor.dim() for tensor in self._inputs), default=0)
        return max((len(tensor) for tensor in self._inputs if tensor.dim() == most), default=1) if most > 1 else 1

    def forget(self) -> None:
        """Release the tensors of past forwards."""
        self._origins.clear()
        self._inputs = ()
        self._readers.clear()
        self._alive.clear()

    # -- origins ------------------------------------------------------------------------------------------------

    def _set(self, tensor: Tensor, origin: _Origin) -> None:
        if not self.training:
            self._origins[id(tensor)] = (tensor, origin)

    def _origin(self, tensor: Any) -> _Origin | None:
        entry = self._origins.get(id(tensor))
        return entry[1] if entry is not None else None

    def _see(self, name: str, call: OpCall, here: str, parameters: ParameterTable) -> None:
        tensors, out = call.tensors, call.outputs[0]
        origin = self._origin(tensors[0])
        kind = kind_of_call(name, call.kwargs)
        if kind is not None:
            if not OPERATIONS[name].only_of_linears or (origin is not None and origin.kind == "linear"):
                self._activated(f"{here}()/{kind}", ActivationSite(here, kind, False), tensors[0], out)
        elif name in _KEEP_ORIGIN and origin is not None:
            for moved in call.outputs:
                whole = moved.numel() == tensors[0].numel()
                part = origin.part if whole else (*origin.part, int(moved.storage_offset()))
                copied = origin.copied or name in PADS or name == "clone"
                self._set(moved, replace(origin, part=part, copied=copied))
        elif name in {"add", "sub", "mul", "div"} and len(tensors) == 1 and origin is not None:
            done = _in_words(name, call.argument(1, "other"))
            scaled = origin.scaled or name in {"mul", "div"}
            self._set(out, replace(origin, scaled=scaled, operations=(*origin.operations, done)))
        elif name == "add" and len(tensors) == 2:
            self._sum(tensors[0], tensors[1], out, parameters)
        elif name == "mul" and len(tensors) == 2:
            self._product(tensors[0], tensors[1], out, here)

    def _sum(self, a: Tensor, b: Tensor, out: Tensor, parameters: ParameterTable) -> None:
        """The output of a linear plus a bias or a low-rank update is still that linear's output."""
        first, second = self._origin(a), self._origin(b)
        if first is None or first.kind != "linear":
            a, b, first, second = b, a, second, first
        if first is None or first.kind != "linear":
            return
        update = second is not None and second.kind == "linear" and a.shape == b.shape
        vector = b.dim() > 0 and b.numel() == b.shape[-1]
        if update or vector or parameters.view(b) is not None:
            self._set(out, first)

    def _product(self, a: Tensor, b: Tensor, out: Tensor, here: str) -> None:
        origins = {o.kind: o for o in (self._origin(a), self._origin(b)) if o is not None}
        activation, linear, gated = (origins.get(k) for k in ("activation", "linear", "gated"))
        if activation is not None and linear is not None:
            source = self._activations[activation.name]
            if source.reads is None or source.reads.kind != "linear":
                return
            if (source.reads.name, source.reads.part) == (linear.name, linear.part):
                self._self_gated(activation, source, out)
            elif a.shape == b.shape:  # a gate for every element, not a router's weight for every token
                self._gate(activation, source.reads, linear, out, here)
        elif gated is not None:  # routing weights, masks
            self._set(out, gated)

    def _self_gated(self, origin: _Origin, activation: _Activation, out: Tensor) -> None:
        """x * sigmoid(x), written out."""
        scaled = activation.reads is not None and activation.reads.scaled
        kind = "silu" if activation.site.kind == "sigmoid" and not scaled else "other"
        if not activation.site.is_module:
            activation.site = replace(activation.site, kind=kind, operations=3 if scaled else 2)
        self._set(out, origin)

    def _gate(self, activation: _Origin, gate: _Origin, up: _Origin, out: Tensor, here: str) -> None:
        key = f"{here}/{gate.name}/{up.name}"
        if key not in self._gated:
            kind = self._activations[activation.name].site.kind
            modules = [here, *(self._linears[o.name].module for o in (gate, up))]
            site = GatedMLPSite(_common_ancestor(modules), kind, gate.name, up.name, None)
            self._gated[key] = _Gated(site, activation.name, modules)
        self._set(out, _Origin("gated", key))

    def _activated(self, key: str, site: ActivationSite, source: Tensor, output: Tensor) -> None:
        activation = self._activations.setdefault(key, _Activation(site))
        origin = self._origin(source)
        if origin is not None and origin.kind == "linear":
            activation.reads = origin
            activation.site = replace(activation.site, source=origin.name)
        elif origin is not None and origin.kind == "norm":
            self.norms_read.setdefault(site.name, set()).add(origin.name)
        self._set(output, _Origin("activation", key))

    def _feeds(self, origin: _Origin, weight: str, module: str) -> None:
        fed_by = origin.name
        if origin.kind == "activation":
            activation = self._activations[origin.name]
            fed_by = activation.site.name
            if activation.site.next_linear is None:
                activation.site = replace(activation.site, next_linear=weight, copied=origin.copied)
        elif origin.kind == "gated":
            gated = self._gated[origin.name]
            if gated.site.down is None:
                gated.modules.append(module)
                gated.site = replace(gated.site, down=weight, name=_common_ancestor(gated.modules))
            fed_by = gated.site.name
        if self._linears[weight].fed_by is None:
            self._linears[weight] = replace(self._linears[weight], fed_by=fed_by)

    def _see_dropout(self, call: OpCall, here: str) -> None:
        probability = _drop_probability(call)
        module = self._modules.get(here)
        if probability and module is not None:
            alone = next(module.children(), None) is None and next(module.parameters(), None) is None
            self._dropouts.setdefault(here, DropoutSite(here, round(probability, 12), is_module=alone))

    # -- results ------------------------------------------------------------------------------------------------

    def activation_sites(self) -> tuple[ActivationSite, ...]:
        inside = {g.activation: g.site.name for g in self._gated.values()}
        seen = [replace(a.site, gated_mlp=inside.get(key)) for key, a in self._activations.items()]
        ran = {site.name for site in seen if site.is_module}
        idle = (replace(probe, name=name) for name, probe in self.activations_by_module.items() if name not in ran)
        return (*seen, *idle)

    def gated_sites(self) -> tuple[GatedMLPSite, ...]:
        return tuple(gated.site for gated in self._gated.values())

    def linear_sites(self) -> tuple[LinearSite, ...]:
        def others(weight: str) -> tuple[str, ...]:
            return tuple(w for w in self._shared.get(weight, ()) if w != weight)

        return tuple(replace(site, input_shared_with=others(weight)) for weight, site in self._linears.items())

    def dropout_sites(self) -> tuple[DropoutSite, ...]:
        """Dropouts that drew a mask in a training forward, and dropout modules that are switched off."""
        sites = dict(self._dropouts)
        for name, module in self._modules.items():
            if is_dropout(module):
                sites.setdefault(name, DropoutSite(name, float(module.p)))
        return tuple(sites.values())

    def softmax_sites(self) -> tuple[str, ...]:
        """Modules whose forward calls a softmax of a tensor with more than two dimensions."""
        return tuple(self._softmaxes)

    def loss_heads(self, parameters: ParameterTable) -> Iterator[LossHead]:
        """The main head first: it has logits of every token, which the model itself returns, over the most classes."""
        for weight in sorted(self._heads, key=lambda each: self._heads[each][:3], reverse=True):
            dimensions, _, vocab_size, operations = self._heads[weight]
            names = parameters.names[id(parameters.by_name[weight])]
            tied_to = next((name for name in names if name != weight), None)
            obstacle = _ONE_A_SAMPLE if dimensions == 2 else ""
            yield LossHead(weight, vocab_size, self._linears[weight].module, tied_to, operations, obstacle)


def _in_words(name: str, number: object) -> str:
    """A ``mul``, ``div``, ``add`` or ``sub`` with one number, in words: ``scale 0.5``, ``shift 1``."""
    value = float(number) if isinstance(number, (int, float)) else None
    if name in {"mul", "div"}:
        return "scale" if not value else f"scale {value if name == 'mul' else 1 / value:g}"
    return "shift" if value is None else f"shift {value if name == 'add' else -value:g}"


def _capped(before: tuple[str, ...], kind: str, after: tuple[str, ...]) -> tuple[str, ...]:
    """The operations before and after an activation, joined with it; c tanh(x / c) becomes one cap."""
    if kind == "tanh" and before and after and after[0].startswith("scale "):
        number = float(after[0].removeprefix("scale "))
        if number and before[-1] == f"scale {1 / number:g}":
            return (*before[:-1], f"cap {number:g}", *after[1:])
    return (*before, kind, *after)


def _drop_probability(call: OpCall) -> float | None:
    """Probability with which the op zeroes an element; None if it does not."""
    if call.name == "bernoulli_" and len(call.args) > 1 and isinstance(call.args[1], float):
        return 1.0 - call.args[1]
    if call.name in {"native_dropout", "dropout"}:
        return float(call.args[1])
    names = [argument.name for argument in operator_schema(call.func).arguments]
    if "dropout_p" in names:
        return float(call.argument(names.index("dropout_p"), "dropout_p", 0.0))
    return None


def _common_ancestor(modules: list[str]) -> str:
    """The innermost module that contains, or is, every one of `modules`."""
    paths = [name.split(".") for name in modules]
    depth = 0
    while all(len(path) > depth for path in paths) and len({path[depth] for path in paths}) == 1:
        depth += 1
    return ".".join(paths[0][:depth])
