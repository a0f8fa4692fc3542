"""Observes forwards and records what happens to every norm's output and to every parameter.

A `ShadowMode` sees each aten op. The output of a norm is tagged with channel ids (`memopt.walk.aten.rules`), ids follow
the data, and three things are recorded: which contractions read which channels, what else a norm's output reaches,
and every use of every parameter. It runs on meta tensors (structure of the real model) and on tensors with values
(the twin). `memopt.walk.folds.verdict` decides from the records which folds are legal.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph

from memopt.recompute.pure import attributes_of
from memopt.recompute.versions import versions_of
from memopt.torch_compat import TorchDispatchMode, no_dispatch, operator_name
from memopt.walk.aten.contractions import Contraction, computed_weight, read, recognise
from memopt.walk.aten.ops import MOVEMENT, NO_USE
from memopt.walk.aten.parameters import ParameterTable, ParameterView, storage_key
from memopt.walk.aten.precision import widen
from memopt.walk.aten.rules import OpCall, Shadow, compact, propagate, tensors_in
from memopt.walk.calls.inputs import Call
from memopt.walk.calls.outputs import auxiliary_fields, output_tensors, watched_reads
from memopt.walk.flow.frames import hidden_around, running
from memopt.walk.flow.origins import Labels
from memopt.walk.flow.records import NormRecord, Use
from memopt.walk.models.plain import exchanged
from memopt.walk.probes.probe import NormProbe
from memopt.walk.sites import Reach

_disable_hooks = graph.disable_saved_tensors_hooks


class ShadowMode(TorchDispatchMode):
    """Records the forwards that run under it; use `watch`, which also installs the module hooks."""

    def __init__(self, model: nn.Module, norms: Mapping[str, NormProbe], labels: Labels | None, float64: bool) -> None:
        super().__init__()
        self.model = model
        self.parameters = ParameterTable(model)
        self.norms = {name: NormRecord(name, probe) for name, probe in norms.items()}
        self.labels = labels
        self.uses: dict[int, list[Use]] = {}
        self.visited: dict[str, None] = {}
        self._float64 = float64
        self._modules = dict(model.named_modules())
        self._shadows: dict[int, tuple[Tensor, Shadow]] = {}
        self.overwritten: set[str] = set()
        """Modules of which an argument is changed in place, by themselves or later, in train mode."""
        self.without_hooks: dict[str, None] = {}
        """Modules in whose forward code ran that allows no saved-tensor hooks, such as `torch.func.grad`."""
        self.by_methods: dict[str, None] = {}
        """Modules of which a method ran from outside of their forward."""
        self._stack: list[str] = []
        self._given: list[tuple[str, list[Tensor], list[int]]] = []
        """Modules that ran in train mode, the tensors in their arguments, and the versions of these at that time."""
        self._products: dict[str, int] = {}
        """Running module -> how many products had been recorded when it began."""
        self._call: Call | None = None
        self._paused = False
        self._next_id = 0
        self._bases: list[int] = []
        self._by_base: list[NormRecord] = []
        self._pending: tuple[ParameterView, Use, Tensor] | None = None

    # -- calls --------------------------------------------------------------------------------------------------

    def run(self, model: nn.Module, call: Call) -> Any:
        """Run a call under observation; whatever it raises passes through."""
        self._stack.clear()
        self._call = call
        if self.labels is not None:
            self.labels.training = model.training
            self.labels.begins(call.kwargs)
        try:
            with self:
                output = call.run(model)
            with self.unobserved():
                self._flush()
                self._outputs(output, call.target, () if call.target else auxiliary_fields(output))
                if self.labels is not None:
                    self.labels.outputs(output, of_the_model=not call.target)
        finally:
            self._pending = self._call = None
            for record in self.norms.values():
                record.ends()
            self.overwritten.update(name for name, given, versions in self._given if versions_of(given) != versions)
            self._given.clear()
        return output

    def forget(self) -> None:
        """Release the tensors of past forwards."""
        self._shadows.clear()
        for record in self.norms.values():
            record.storages.clear()
        self.parameters.forget_copies()
        if self.labels is not None:
            self.labels.forget()

    def _outputs(self, output: Any, module: str, auxiliary: Collection[str]) -> None:
        for key, tensor in output_tensors(output):
            shadow = self._shadow(tensor)
            if shadow is not None:
                self._escape(shadow, "model output", key, module, key in auxiliary)

    # -- module hooks -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Install hooks on every module, and report reads of values in Python, which never reach the dispatcher."""
        activations = self.labels.activations_by_module if self.labels is not None else {}
        with contextlib.ExitStack() as hooks:
            for name, module in self._modules.items():
                hooks.enter_context(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
                if name in self.norms:
                    hooks.enter_context(module.register_forward_hook(partial(self._tag, name), with_kwargs=True))
                elif name in activations:
                    hooks.enter_context(module.register_forward_hook(partial(self._activated, name)))
                hooks.enter_context(module.register_forward_hook(partial(self._leave, name)))
            hooks.enter_context(watched_reads(self._python_read))
            hooks.enter_context(exchanged([(graph, "disable_saved_tensors_hooks", self._disable_hooks)]))
            yield

    def _disable_hooks(self, message: str) -> contextlib.AbstractContextManager[None]:
        if self._call is not None:
            self.without_hooks |= dict.fromkeys([*self._stack, *dict(running(self._modules))])
        return _disable_hooks(message)

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._call is None:
            return  # a trial call, which is not observed
        for other, by_forward in running(hidden_around(name, self._modules, self._stack)):
            (self.visited if by_forward else self.by_methods).setdefault(other)
        self._stack.append(name)
        if module.training:
            given = list(tensors_in((args, kwargs, *map(attributes_of, (*args, *kwargs.values())))))
            self._given.append((name, given, versions_of(given)))
        if self.labels is not None:
            self._products[name] = self.labels.products
        self.visited.setdefault(name)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._call is None:
            return
        while self._stack and self._stack.pop() != name:
            pass
        if self.labels is not None and self._products.pop(name, None) == self.labels.products:
            self._hidden_product(self.labels, name, module, args, output)
        # The output of an inner model may be used alone, so a fold that changes it is a caution.
        if name != self._call.part and isinstance(output, Mapping) and "last_hidden_state" in output:
            with self.unobserved():
                self._outputs(output, name, auxiliary=output)

    def _hidden_product(self, labels: Labels, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Tell `labels` if `module`, in which no product was seen, is a linear."""
        x, weight = args[0] if args else None, module._parameters.get("weight")  # an attribute may be computed
        if weight is None or id(weight) not in self.parameters.names or not isinstance(module, nn.Linear):
            return
        if isinstance(x, Tensor) and isinstance(output, Tensor) and not self.parameters.is_constant(x):
            labels.hidden_product(self.parameters.name(weight, name), tuple(weight.shape), x, output, name)

    def _activated(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._call is None or self.labels is None:
            return
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            self.labels.activation(name, args[0], output)

    def _tag(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._call is None:
            return
        record = self.norms[name]
        with self.unobserved():
            inputs = [t for t in tensors_in((*args, *kwargs.values())) if t.is_floating_point()]
            if len(inputs) == 2 and not record.calls and record.probe.with_gate is not None:
                record.probe = record.probe.with_gate
            record.calls += 1
            record.rejected = record.rejected or _disagreement(record.probe, inputs, output)
            if record.rejected:
                return
            if record.probe.kind in ("channels", "heads"):
                if self.labels is not None:
                    self.labels.norm(name, output)
                return
            record.inputs += zip(inputs, versions_of(inputs), strict=True)
            record.outputs += zip([output], versions_of([output]), strict=True)
            width = output.shape[-1]
            if record.base < 0:
                record.base, record.width = self._next_id, width
                self._next_id += width
                self._bases.append(record.base)
                self._by_base.append(record)
            elif width != record.width:
                record.rejected = "it is called with tensors of several widths"
                return
            ids = torch.arange(record.base, record.base + width).expand(output.shape)
            self._shadows[id(output)] = (output, Shadow(ids))
            key = storage_key(output)
            if key is not None:
                record.storages.add(key)
            if self.labels is not None:
                self.labels.norm(name, output)

    # -- the dispatcher -----------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._float64:
            args, kwargs = widen(args, kwargs)
        name = operator_name(func)
        out = func(*args, **kwargs)
        if not self._paused:
            with self.unobserved():
                self._observe(OpCall(func, name, args, kwargs, out))
        return out

    @contextlib.contextmanager
    def unobserved(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            with no_dispatch():  # hidden from the modes below too: it is not part of the forward
                yield
        finally:
            self._paused = before

    @property
    def here(self) -> str:
        """Name of the innermost module that is running."""
        return self._stack[-1] if self._stack else ""

    def _observe(self, call: OpCall) -> None:
        self.parameters.compute(call)
        if self._adds_pending_bias(call):
            if self.labels is not None:
                self.labels.operation(call, self.here, self.parameters)
            return
        contraction = recognise(call)
        if contraction is not None:
            self._flush()
            self._contract(call, contraction)
            return
        if self.labels is not None:
            self.labels.operation(call, self.here, self.parameters)
        views = [(t, v) for t in call.tensors if (v := self.parameters.view(t)) is not None]
        if views and call.name not in NO_USE:
            sole = len(views) == 1 and self.parameters.follow(call.name, call.args, views[0][0], call.outputs)
            for _, view in () if sole else views:
                self._use(view, Use("other", self.here, call.name))
        shadows = [s for t in call.tensors if (s := self._shadow(t)) is not None]
        if shadows:
            self._follow(call, shadows)

    def _follow(self, call: OpCall, shadows: list[Shadow]) -> None:
        inside_norm = self.here in self.norms and call.name not in MOVEMENT and call.name not in NO_USE
        effect = "another norm" if inside_norm else propagate(call, self._shadow)
        if isinstance(effect, str):
            for shadow in shadows:
                self._escape(shadow, effect, call.name, self.here)
            return
        for tensor, shadow in effect:
            self._shadows[id(tensor)] = (tensor, shadow)

    def _contract(self, call: OpCall, contraction: Contraction) -> None:
        a, b = (self.parameters.view(t) for t in (contraction.a, contraction.b))
        if a is not None and b is None:
            contraction, a, b = contraction.swapped(), b, a
        shadow = self._shadow(contraction.a)
        product = "attention" if "bmm" in call.name else "matrix product"
        for stray, what in ((self._shadow(contraction.bias), "addition"), (self._shadow(contraction.b), product)):
            if stray is not None:
                self._escape(stray, what, call.name, self.here)
        if b is None or a is not None:
            if self.labels is not None and (computed := computed_weight(call, contraction, self.parameters)):
                parameter, weight, source = computed
                name, shape = self.parameters.name(parameter, self.here), tuple(weight.shape)
                self.labels.contraction(name, shape, source, call.out, self.here, computed=True)
            if shadow is not None:
                self._escape(shadow, product, call.name, self.here)
            for view in (a, b):
                if view is not None:
                    self._use(view, Use("other", self.here, call.name))
            return
        bias = self.parameters.view(contraction.bias)
        weight_name = self.parameters.name(b.parameter, self.here)
        if self.labels is not None:
            self.labels.contraction(weight_name, tuple(b.parameter.shape), contraction.a, call.out, self.here)
        use = self._reading(call, contraction, b, shadow)
        if bias is None and contraction.bias is None and isinstance(call.out, Tensor):
            self._pending = (b, use, call.out)
        else:
            self._record(b, use, bias)

    def _reading(self, call: OpCall, contraction: Contraction, weight: ParameterView, shadow: Shadow | None) -> Use:
        if shadow is None:
            return Use("raw", self.here, call.name)
        reading = read(contraction, weight, shadow)
        if isinstance(reading, str):
            self._escape(shadow, reading, call.name, self.here)
            return Use("mixed", self.here, call.name)
        owners = list(self.owners(reading.channels))
        key = storage_key(contraction.a)
        same = all(key in owner.storages for owner in owners)
        return Use("contract", self.here, call.name, reading, same_storage=same)

    def _adds_pending_bias(self, call: OpCall) -> bool:
        """F.linear on a non-contiguous input runs as a product and an add: the vector added next is its bias."""
        if self._pending is None:
            return False
        _, _, product = self._pending
        touches = any(storage_key(t) == storage_key(product) for t in call.tensors)
        if call.name in {"add", "add_"} and touches:
            others = [v for t in call.tensors if (v := self.parameters.view(t)) is not None]
            if len(others) == 1 and others[0].parameter.dim() == 1 and others[0].dims != (None,):
                weight, use, _ = self._pending
                self._pending = None
                self._record(weight, use, others[0])
                return True
        if not (touches and call.name in MOVEMENT):
            self._flush()
        return False

    def _flush(self) -> None:
        if self._pending is not None:
            weight, use, _ = self._pending
            self._pending = None
            self._record(weight, use, None)

    def _record(self, weight: ParameterView, use: Use, bias: ParameterView | None) -> None:
        module, name = use.module, self.parameters.name(weight.parameter, use.module)
        bias_name = self.parameters.name(bias.parameter, module) if bias is not None else None
        self._use(weight, Use(use.kind, module, use.operation, use.reading, bias_name, use.same_storage))
        if bias is not None:
            self._use(bias, Use("bias", module, use.operation, weight=name))
        if bias_name is not None and self.labels is not None:
            self.labels.bias(name, bias_name)

    # -- records ------------------------------------------------------------------------------------------------

    def _use(self, view: ParameterView, use: Use) -> None:
        uses = self.uses.setdefault(id(view.parameter), [])
        if not any(use.repeats(earlier) for earlier in uses):
            uses.append(use)

    def _shadow(self, tensor: Any) -> Shadow | None:
        entry = self._shadows.get(id(tensor))
        return entry[1] if entry is not None else None

    def owners(self, ids: Tensor) -> Iterator[NormRecord]:
        """Norms whose channels are among `ids`."""
        if not ids.numel():
            return
        ids = compact(ids)
        lowest, highest = int(ids.amin()), int(ids.amax())
        start, end = max(0, bisect_right(self._bases, lowest) - 1), bisect_right(self._bases, highest)
        among = self._by_base[start:end]
        if not among:
            return
        # Search all ranges at once: a hidden state may have channels of every norm.
        firsts, ends = torch.tensor([(each.base, each.base + each.width) for each in among]).unbind(1)
        place = (torch.bucketize(ids.contiguous(), firsts.contiguous(), right=True) - 1).clamp_(min=0)
        inside = place[(ids >= firsts[place]) & (ids < ends[place])]
        yield from (among[number] for number in inside.bincount().nonzero().flatten().tolist())

    def _escape(self, shadow: Shadow, what: str, operation: str, module: str, auxiliary: bool = False) -> None:
        for record in self.owners(shadow.ids):
            record.reaches.setdefault(Reach(what, operation, module, auxiliary))

    def _python_read(self, tensor: Tensor, operation: str) -> None:
        shadow = self._shadow(tensor)
        if shadow is not None and not self._paused:
            self._escape(shadow, "read of its values in Python", operation, self.here)


def _disagreement(probe: NormProbe, inputs: list[Tensor], output: Any) -> str | None:
    """Why a call is not the norm that the probe found."""
    if len(inputs) != (2 if probe.kind == "gated" else 1):
        return f"it is called with {len(inputs)} tensors"
    if not isinstance(output, Tensor) or output.shape != inputs[0].shape:
        return "its output is not one tensor in the shape of its input"
    if probe.kind == "channels":
        return None
    if probe.hidden_size and output.shape[-1] != probe.hidden_size:
        return "its channels are not in the last dimension"
    return None
