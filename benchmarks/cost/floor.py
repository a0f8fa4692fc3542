"""The fewest bytes that an exact method keeps for the backward of a model, computed from the stock model's forward.

The stock forward runs on fake tensors. Every storage that an operation writes is a node; every tensor that autograd
saves is needed in backward. A node is kept, or it is computed again from nodes that are kept. The floor is the cheapest
choice: a minimum cut between what cannot be computed again and what is needed. `docs/methods.md` states the rules.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memopt.torch_compat import (
    FakeTensor,
    TorchDispatchMode,
    device_read,
    is_operator,
    no_torch_function,
    operator_schema,
    storage_id,
)
from memopt.trace.estimate import traced
from memopt.trace.storages import storages
from memopt.trace.training import Step
from memopt.walk.aten.rules import tensors_in
from memopt.walk.models.plain import STANDS_FOR_KERNEL, exchanged, homes

#: Products with a weight, whose results are not computed again.
PRODUCTS = frozenset({"mm", "addmm", "_grouped_mm", "convolution", "linear"})
#: Products of two activations: not computed again, but where attention's kernels do so, in front of a softmax.
PAIRS = frozenset({"bmm", "baddbmm"})
_SOFTMAX = frozenset({"_softmax", "_safe_softmax"})
_RANDOM = frozenset({"native_dropout", "bernoulli", "bernoulli_", "rand", "randn", "rand_like", "randn_like"})
#: Of their operand they read the shape alone.
_NEW = frozenset(name for what in ("empty", "zeros", "ones", "full") for name in (f"new_{what}", f"{what}_like"))


@dataclass(eq=False)
class Node:
    """What a storage holds after one operation."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    operation: str
    module: str
    inputs: tuple[Node, ...]
    fixed: bool
    """Whether it is never computed again."""
    needed: int = 0
    """How many operations save it for backward."""


@dataclass(frozen=True)
class Floor:
    """The cheapest choice of nodes to keep."""

    nbytes: int
    kept: tuple[Node, ...]
    unit: int = 0
    """Bytes of the first block's input."""


def floor_of(step: Step) -> Floor:
    """What an exact method keeps of the stock model of `step`; errors as `memopt.trace.estimate.traced`'s."""
    with traced(step.stock) as model:
        recorder = Recorder(model.model, step.sites.blocks, list(tensors_in(model.arguments)))
        model.arguments.pop("labels", None)  # blocks alone
        with recorder.watching([*_functions(step), *_stand_ins(model.model)]):
            output = model.run()
        del output
    return cheapest(recorder)


def cheapest(recorder: Recorder) -> Floor:
    """The minimum cut: every path from a node that is not computed again to a needed one goes through a kept one."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(("not kept", "needed"))
    for node in recorder.nodes:
        graph.add_edge((node, "in"), (node, "out"), capacity=node.nbytes)
        for each in node.inputs if not node.fixed else ():
            graph.add_edge((each, "out"), (node, "in"))
        if node.fixed:
            graph.add_edge("not kept", (node, "in"))
        if node.needed > 0:
            graph.add_edge((node, "out"), "needed")
    nbytes, (near, _) = networkx.minimum_cut(graph, "not kept", "needed")
    kept = tuple(node for node in recorder.nodes if (node, "in") in near and (node, "out") not in near)
    return Floor(int(nbytes), kept, recorder.unit)


@dataclass(eq=False)
class Recorder:
    """Records a forward of `model`."""

    model: nn.Module
    blocks: Sequence[str]
    given: Sequence[Tensor]
    """Inputs, which do not count."""
    nodes: list[Node] = field(default_factory=list)
    unit: int = 0
    function: str = ""
    """Of a function that runs: ``plain`` for one that is run again as a whole, ``kernel`` for one that says itself
    what it keeps."""
    _now: dict[int, Node | None] = field(default_factory=dict)
    """Storage -> what it holds; None for what costs nothing: parameters, inputs, and what follows from them alone."""
    _held: list[Any] = field(default_factory=list)
    """An address is not used again while its storage lives."""
    _module: list[str] = field(default_factory=lambda: [""])

    @contextlib.contextmanager
    def watching(self, functions: Sequence[tuple[str, str]] = ()) -> Iterator[None]:
        """Record what runs inside.

        Args:
            functions: (Python module, name) of functions that are run again as a whole, or stand for a kernel.
        """
        for tensor in (*self.model.parameters(), *self.model.buffers(), *self.given):
            self._set(tensor, None)
        homes_of = [(sys.modules[home], name) for home, name in dict.fromkeys(functions)]
        wrapped = [(home, name, self._whole(vars(home)[name])) for home, name in homes_of]
        hooks = [
            hook
            for name, module in self.model.named_modules()
            for hook in (
                module.register_forward_pre_hook(self._entering(name), with_kwargs=True),
                module.register_forward_hook(self._leaving, always_call=True),
            )
        ]
        try:
            with exchanged(wrapped), _Dispatch(self), saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def record(self, name: str, mutates: bool, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """One operation that ran."""
        sources = tuple(dict.fromkeys(node for each in inputs if (node := self._of(each)) is not None))
        known = {storage_id(each) for each in storages(inputs)}
        pair = name in PAIRS and len(sources) > 1
        always = bool(self.function) or name in _RANDOM
        fixed = always or name in PRODUCTS or name in PAIRS or name.startswith("_scaled_dot_product")
        if name in _SOFTMAX:
            _compute_again(sources)
        for output in outputs:
            (storage,) = storages([output]) if output.untyped_storage() is not None else (None,)
            if storage_id(storage) in known and not mutates:
                continue
            free = (name in _NEW or not sources) and not always
            if free and not (name in PRODUCTS and output.dim() > 1):
                self._set(output, None)
                continue
            node = Node(
                storage.nbytes(), tuple(output.shape), str(output.dtype).removeprefix("torch."),
                "pair" if pair and not self.function else name, self._module[-1], sources, fixed,
            )  # fmt: skip
            self.nodes.append(node)
            self._set(output, node)
        if name == "mul" and len(inputs) == 2:
            self._scaled(*inputs)

    def _scaled(self, one: Tensor, other: Tensor) -> None:
        """A product's rows times a number each: the number's gradient is <dy W, a>, from a product that runs anyway."""
        for rows, numbers in ((one, other), (other, one)):
            node = self._of(rows)
            of_rows = numbers.shape[-1:] == (1,) and 1 < rows.numel() == numbers.numel() * rows.shape[-1]
            if node is not None and of_rows and _is_product(node):
                node.needed -= 1

    def _whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        kernel = getattr(function, STANDS_FOR_KERNEL, False)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not kernel:
                for tensor in tensors_in((args, kwargs)):
                    node = self._of(tensor)
                    if node is not None and tensor.is_floating_point():
                        node.needed += 1
            outer, self.function = self.function, "kernel" if kernel else "plain"
            try:
                return function(*args, **kwargs)
            finally:
                self.function = outer

        return run

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._module.append(name)
            if name not in self.blocks:
                return
            hidden = next((each for each in tensors_in((args, kwargs)) if each.is_floating_point()), None)
            if hidden is not None:
                self.unit = self.unit or hidden.nbytes
                _keep_sums(self._of(hidden), self.unit)

        return enter

    def _leaving(self, *_: Any) -> None:
        self._module.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        node = self._of(tensor)
        if node is not None and self.function != "plain":
            node.needed += 1
        return tensor

    def _of(self, tensor: Tensor) -> Node | None:
        return next((self._now.get(storage_id(storage)) for storage in storages([tensor])), None)

    def _set(self, tensor: Tensor, node: Node | None) -> None:
        for storage in storages([tensor]):
            self._held.append(storage)
            self._now[storage_id(storage)] = node


def _is_product(node: Node) -> bool:
    """Whether it holds a product with a weight, or one to which a bias was added."""
    if node.operation in ("add", "add_"):
        products = [each for each in node.inputs if each.operation in PRODUCTS]
        return len(products) == 1 and all(each in products or _is_row(each) for each in node.inputs)
    return node.operation in PRODUCTS


def _is_row(node: Node) -> bool:
    """Whether it holds rows of a parameter: biases of experts."""
    return node.operation in ("index", "index_select", "embedding")


def _compute_again(sources: Sequence[Node]) -> None:
    """Allow the products of queries and keys behind a softmax."""
    todo = list(sources)
    while todo:
        node = todo.pop()
        if node.operation == "pair":
            node.fixed = False
        if not node.fixed and node.operation != "pair":
            todo.extend(node.inputs)


def _keep_sums(hidden: Node | None, unit: int) -> None:
    """Do not compute the residual sum behind a block's input again, from the sums of all blocks before.

    A sum in fp32 counts in the compute dtype: the normalised output that its norm rounds to says as much.
    """
    todo = [] if hidden is None else [hidden]
    while todo:
        node = todo.pop()
        if node.operation in ("add", "add_") and len(node.inputs) == 2 and node.nbytes >= hidden.nbytes:
            node.fixed, node.nbytes = True, min(node.nbytes, unit)
        elif not node.fixed:
            todo.extend(node.inputs)


class _Dispatch(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is device_read and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        with no_torch_function():
            result = func(*args, **(kwargs or {}))
            if is_operator(func):
                schema = operator_schema(func)
                name = schema.name.rpartition("::")[2]
                inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(result))
                self._recorder.record(name, schema.is_mutable, inputs, outputs)
        return result


def _functions(step: Step) -> list[tuple[str, str]]:
    return [name for site in step.sites.functions for name in site.functions]


def _stand_ins(model: nn.Module) -> Iterator[tuple[str, str]]:
    for home in homes(model):
        for name, value in vars(home).items():
            if getattr(value, STANDS_FOR_KERNEL, False) is True:
                yield home.__name__, name
