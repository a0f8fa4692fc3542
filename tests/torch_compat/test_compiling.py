"""Compiled graphs and selective checkpointing: PyTorch's private names do what `memopt.torch_compat` says."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memopt
from memopt import torch_compat
from tests.factories import tiny_inputs, tiny_model
from tests.torch_compat.leaves import leaf


@torch.compiler.assume_constant_result
def _partition(*kept: str) -> bool:
    def mark(graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if torch_compat.is_operator(node.target) and torch_compat.operator_name(node.target) in kept:
                torch_compat.keep_result(node)

    return torch_compat.partition_traced_graph(mark)


def _saved(*partition: tuple[str, ...]) -> int:
    """Number of tensors that a compiled product of an elementwise result saves: 3, or its two inputs."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        for names in partition:
            _partition(*names)
        return x.exp().sin() @ w

    torch.compiler.reset()
    run = torch.compile(function, backend="aot_eager_decomp_partition", fullgraph=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor), tensor)[1], lambda packed: packed
    ):
        run(leaf(4, 4), leaf(4, 4))
    return len(saved)


@pytest.mark.parametrize(
    ("lacks", "expected"), [("joint_custom_pass", 2), ("ban_recompute_used_far_apart", 3), ("patch", 3)]
)
def test_without_a_setting_of_the_partitioner_a_graph_is_right(
    monkeypatch: pytest.MonkeyPatch, lacks: str, expected: int
) -> None:
    monkeypatch.setitem(torch_compat.lookup._missing, f"torch._functorch.config.{lacks}", None)
    assert _saved(("sin",)) == expected


def test_a_traced_graph_recomputes_elementwise_results_but_those_that_are_to_be_kept() -> None:
    assert (_saved(), _saved(()), _saved(("sin",)), _saved()) == (3, 2, 3, 3)
    assert not torch_compat.partition_traced_graph(lambda graph: None), "nothing is traced"


def _every_mm(ctx: object, operator: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    is_mm = operator._overloadpacket is torch.ops.aten.mm
    return CheckpointPolicy.MUST_SAVE if is_mm else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(policy: Any) -> dict[str, Any]:
    """Keyword arguments of `checkpoint` that save the results which `policy` selects. PyTorch is about to change what
    leaving `respect_saved_tensors_hooks` out means (pytorch#191236), so it is passed wherever it is taken."""
    create: Any = create_selective_checkpoint_contexts
    name = "respect_saved_tensors_hooks"
    own, around = ({name: False} if name in inspect.signature(each).parameters else {} for each in (create, checkpoint))
    return {"use_reentrant": False, "context_fn": functools.partial(create, policy, **own), **around}


class Count(torch_compat.TorchDispatchMode):
    """The names of the operators that were computed."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.computed.append(torch_compat.operator_name(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", [[torch.ops.aten.mm.default], _every_mm], ids=["list", "function"])
def test_selective_checkpointing_of_a_patched_model_computes_and_gives_what_it_does_in_stock(policy: Any) -> None:
    inputs = tiny_inputs("llama")
    stock = tiny_model("llama").train()
    patched = memopt.patch(tiny_model("llama").train(), memopt.load_recipe("exact-unfolded", ("loss.method=none",)))
    products = []
    for model in (stock, patched):
        arguments = _selective(policy)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
        with Count() as count:
            model(**inputs).loss.backward()
        products.append(count.computed.count("mm"))
    assert products[0] == products[1]
    for (name, ours), (_, theirs) in zip(patched.named_parameters(), stock.named_parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm(), name


def test_what_a_policy_selects_is_not_computed_again() -> None:
    arguments = _selective([torch.ops.aten.exp.default])
    with Count() as count:
        checkpoint(lambda t: t.relu().exp().tanh(), leaf(2, 2), **arguments).sum().backward()
    assert (count.computed.count("relu"), count.computed.count("exp")) == (2, 1)


def test_a_function_that_runs_eagerly_is_not_compiled() -> None:
    seen: list[bool] = []

    @torch_compat.eagerly
    def note(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    torch.compile(lambda x: note(x) * 2, backend="eager")(torch.ones(2))
    assert seen == [False]
