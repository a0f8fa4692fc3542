"""Every private name of PyTorch does what `memopt.torch_compat` says, and nothing breaks without it."""

from __future__ import annotations

import ast
import gc
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import memopt
from memopt import torch_compat
from tests.factories import tiny_inputs, tiny_model
from tests.support.processes import run_code

ROOT = Path(__file__).parents[1]


def leaf(*size: int) -> Tensor:
    return torch.rand(size or (3,), requires_grad=True)


def test_this_pytorch_has_every_name() -> None:
    assert torch_compat.missing() == ()


# -- saved-tensor hooks and graph nodes -----------------------------------------------------------------------------


def test_the_hook_stack_shows_the_innermost_pair() -> None:
    outer, inner = (lambda t: t, lambda t: t), (lambda t: t, lambda t: t)
    assert torch_compat.top_saved_tensors_hooks(False) is None
    with saved_tensors_hooks(*outer):
        assert torch_compat.top_saved_tensors_hooks(False) == outer
        with saved_tensors_hooks(*inner):
            assert torch_compat.top_saved_tensors_hooks(False) == inner
        assert torch_compat.top_saved_tensors_hooks(False) == outer


def test_disabled_hooks_say_why() -> None:
    assert torch_compat.saved_tensors_hooks_disabled() is None
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        assert torch_compat.saved_tensors_hooks_disabled() == "no hooks here"


def test_sequence_numbers_rise_with_every_node() -> None:
    first = torch_compat.next_sequence_number()
    a = leaf() * 2
    b = a + 1
    assert first <= torch_compat.sequence_number(a.grad_fn) < torch_compat.sequence_number(b.grad_fn)
    assert torch_compat.sequence_number(b.grad_fn) < torch_compat.next_sequence_number()


def test_backward_runs_under_the_function_modes_that_are_active() -> None:
    seen: list[str] = []

    class Names(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    x = leaf()
    with Names():
        loss = checkpoint(torch.sin, x, use_reentrant=False).sum()
        torch_compat.run_backward(loss)
    assert seen.count("sin") == 2
    assert torch.equal(x.grad, x.detach().cos())


def test_the_node_whose_backward_runs_is_known() -> None:
    assert torch_compat.current_node() is None
    y, seen = leaf().sin(), []
    y.register_hook(lambda _: seen.append(torch_compat.current_node()))
    node = y.grad_fn
    y.sum().backward()
    assert [torch_compat.sequence_number(each) for each in seen] == [torch_compat.sequence_number(node)]
    assert torch_compat.current_node() is None


def test_the_frame_of_a_module_call_is_told_from_others() -> None:
    frames = []

    class Module(nn.Module):
        def forward(self) -> None:
            frame: Any = sys._getframe()
            while frame is not None:
                frames.append((torch_compat.is_module_call(frame), frame.f_locals.get("self")))
                frame = frame.f_back

    module = Module()
    module()
    assert [held for is_call, held in frames if is_call] == [module]


def test_functions_of_autograd_are_numbered_and_show_their_tensors_too() -> None:
    first = torch_compat.next_sequence_number()
    x = leaf()
    with saved_tensors_hooks(_pack, _unpack):
        y = _Square.apply(x)
    assert torch_compat.sequence_number(y.grad_fn) >= first
    assert torch_compat.unpack_hooks(y.grad_fn) == [_unpack]


def test_autograd_does_not_ask_a_function_whether_it_has_a_vjp() -> None:
    class Asked(_Square):
        vjp = _Square.backward

    class NotAsked(Asked):
        pass

    torch_compat.call_its_backward(NotAsked)
    x = leaf()
    NotAsked.apply(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x)
    with pytest.raises(RuntimeError, match="both 'backward' and 'vjp'"):
        Asked.apply(x).sum().backward()


def test_input_metadata_tell_dtype_and_shape_of_an_output() -> None:
    assert torch_compat.input_metadata is not None
    y = leaf(2, 3).to(torch.float64)
    assert torch_compat.input_metadata(y.grad_fn)[0].dtype == torch.float64
    assert tuple(torch_compat.input_metadata(y.view(6).grad_fn)[0].shape) == (6,)


def test_only_backward_runs_a_graph_task() -> None:
    seen: list[int] = []
    x = leaf()
    x.register_hook(lambda gradient: seen.append(torch_compat.current_graph_task_id()))
    assert torch_compat.current_graph_task_id() == -1
    x.sum().backward()
    assert seen[0] >= 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_region_knows_itself_in_both_runs_or_in_backward(use_reentrant: bool) -> None:
    seen: list[tuple[bool, bool]] = []
    hooks: list[object] = []
    calls: list[int] = []

    def run(x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch_compat.is_checkpointed_region()))
        hooks.append(torch_compat.checkpointing_hook())
        calls.append(torch_compat.calls_of_checkpointing())
        return x.sin()

    assert not torch_compat.is_checkpointed_region()
    with saved_tensors_hooks(_pack, _unpack):
        assert not torch_compat.is_checkpointed_region()
        assert torch_compat.checkpointing_hook() is None
    for _ in range(2):
        checkpoint(run, leaf(), use_reentrant=use_reentrant).sum().backward()
    assert len(seen) == 4
    assert all(known for recorded, known in seen if recorded)
    assert torch_compat.calls_of_checkpointing() == 0
    assert all(calls)
    # Each region has a hook of its own, and reentrant checkpointing has none.
    assert (hooks == [None] * 4) if use_reentrant else (None not in hooks and hooks[0] is not hooks[2])


def test_whether_fsdp_leaves_parameters_gathered() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        left = []
        for reshards in (False, True):
            sharded = fully_shard(torch.nn.Linear(2, 2), mesh=mesh, reshard_after_forward=reshards)
            hooks = [hook for each in torch_compat.module_hooks(sharded) for hook in each.values()]
            left.append(torch_compat.fsdp_leaves_gathered(sharded, hooks))
            assert hooks
            assert not torch_compat.fsdp_leaves_gathered(sharded, [*hooks, print])
    finally:
        torch.distributed.destroy_process_group()
    assert left == [True, False]
    assert not torch_compat.fsdp_leaves_gathered(torch.nn.Linear(2, 2), [])


def test_selective_checkpointing_is_told_from_plain_checkpointing() -> None:
    seen: list[bool] = []

    def run(x: Tensor) -> Tensor:
        seen.append(torch_compat.is_selectively_checkpointed())
        return x.sin()

    def chosen() -> Any:
        return torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.sin.default])

    assert not torch_compat.is_selectively_checkpointed()
    checkpoint(run, leaf(), use_reentrant=False).sum().backward()
    checkpoint(run, leaf(), use_reentrant=False, context_fn=chosen).sum().backward()
    assert seen == [False, False, True, True]


def test_unpack_hooks_are_those_of_the_scope_that_saved() -> None:
    x, y = leaf(), leaf()
    plain = x * y
    with saved_tensors_hooks(_pack, _unpack):
        hooked, rows = x * y, (x * 2)[torch.tensor([1])]
    assert torch_compat.unpack_hooks(plain.grad_fn) == [None, None]
    assert torch_compat.unpack_hooks(hooked.grad_fn) == [_unpack, _unpack]
    assert torch_compat.unpack_hooks(rows.grad_fn) == [_unpack]
    (plain.sum() + hooked.sum() + rows.sum()).backward()
    for released in (plain, hooked, rows):
        with pytest.raises(RuntimeError):
            torch_compat.unpack_hooks(released.grad_fn)


def _nodes() -> dict[str, tuple[Callable[[Tensor], Tensor], dict[str, Any]]]:
    """Kind of node -> an operation that makes it of z, (2, 4, 6), and what its fields hold beside z and output."""
    return {
        "MulBackward0": (lambda z: z * z, {}),
        "SiluBackward0": (F.silu, {}),
        "GeluBackward0": (lambda z: F.gelu(z, approximate="tanh"), {"approximate": "tanh"}),
        "MishBackward0": (F.mish, {}),
        "HardswishBackward0": (F.hardswish, {}),
        "LeakyReluBackward0": (lambda z: F.leaky_relu(z, 0.25), {"negative_slope": 0.25}),
        "EluBackward0": (lambda z: F.elu(z, 0.5), {"alpha": 0.5, "scale": 1, "input_scale": 1}),
        "SoftplusBackward0": (lambda z: F.softplus(z, 2, 8), {"beta": 2, "threshold": 8}),
        "HardtanhBackward0": (lambda z: F.hardtanh(z, -0.5, 0.75), {"min_val": -0.5, "max_val": 0.75}),
        "HardsigmoidBackward0": (F.hardsigmoid, {}),
        "CeluBackward0": (lambda z: F.celu(z, 0.5), {"alpha": 0.5}),
        "LogSigmoidBackward0": (F.logsigmoid, {}),
        "ClampBackward1": (lambda z: z.clamp(0.25, 0.5), {"min": 0.25, "max": 0.5}),
        "GluBackward0": (lambda z: F.glu(z, -1), {"dim": 2**64 - 1}),
        "PowBackward0": (lambda z: z**3, {"exponent": 3}),
        "BaddbmmBackward0": (
            lambda z: torch.baddbmm(torch.ones(2, 4, 4), z, z.mT, beta=3, alpha=0.5),
            {"beta": 3, "alpha": 0.5},
        ),
        "IndexBackward0": (lambda z: z[torch.tensor([1])], {"indices": (torch.tensor([1]),)}),
        "SelectBackward0": (lambda z: z.select(-1, -2), {"dim": 2**64 - 1, "index": 2**64 - 2}),
        "TransposeBackward0": (lambda z: z.transpose(0, -1), {"dim0": 0, "dim1": 2**64 - 1}),
        "PermuteBackward0": (lambda z: z.permute(2, 0, -2), {"dims": (2, 0, 2**64 - 2)}),
        "ConstantPadNdBackward0": (lambda z: F.pad(z, (1, 2)), {"pad": (1, 2)}),
        **{
            f"{mode}Pad{rank}DBackward0": (
                lambda z, rank=rank, how=how: F.pad(z[(None,) * (rank - 1)], (1, 0) * rank, mode=how),
                {"padding": (1, 0) * rank},
            )
            for mode, how in (("Reflection", "reflect"), ("Replication", "replicate"))
            for rank in (1, 2, 3)
        },
        "SoftmaxBackward0": (lambda z: z.softmax(-1), {}),
        "SigmoidBackward0": (torch.sigmoid, {}),
        "TanhBackward0": (torch.tanh, {}),
        "ReluBackward0": (torch.relu, {}),
        "ExpBackward0": (torch.exp, {}),
        "ScaledDotProductFlashAttentionForCpuBackward0": (
            lambda z: F.scaled_dot_product_attention(*(z[None] for _ in range(3))),
            {},
        ),
    }


#: They run on a GPU alone; that their nodes exist and show the field is told by the class.
_ON_GPU = {f"ScaledDotProduct{name}AttentionBackward0" for name in ("Flash", "Efficient", "Cudnn")}


def test_every_field_has_a_canary() -> None:
    assert _nodes().keys() | _ON_GPU == torch_compat.SAVED_FIELDS.keys()
    assert all(torch_compat.shows_saved(name) for name in torch_compat.SAVED_FIELDS)
    assert not torch_compat.shows_saved("NoSuchBackward0")


@pytest.mark.parametrize("name", _nodes())
def test_a_node_shows_what_it_saved(name: str) -> None:
    operation, expected = _nodes()[name]
    z = leaf(2, 4, 6)
    output = operation(z)
    node = output.grad_fn
    assert node is not None
    assert node.name() == name
    for field in torch_compat.SAVED_FIELDS[name]:
        shown = torch_compat.saved(node, field)
        if field in ("self", "other"):
            assert torch.equal(shown, z)
        elif field in ("result", "output"):
            assert torch.equal(shown, output)
        elif field in ("batch1", "batch2"):
            assert torch.equal(shown if field == "batch1" else shown.mT, z)
        else:
            assert (tuple(shown) if isinstance(shown, (list, tuple)) else shown) == expected[field]


# -- tensors and storages -------------------------------------------------------------------------------------------


def test_tensor_hooks_are_those_of_register_hook() -> None:
    x = leaf()
    assert not torch_compat.tensor_hooks(x)
    x.register_hook(lambda gradient: gradient)
    assert torch_compat.tensor_hooks(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_share_the_identity_of_their_storage_and_others_have_their_own(device: str) -> None:
    x, other = torch.empty(4, device=device), torch.empty(4, device=device)
    identity = torch_compat.storage_id(x.untyped_storage())
    assert torch_compat.storage_id(x[1:].detach().untyped_storage()) == identity
    assert torch_compat.storage_id(other.untyped_storage()) != identity


def test_the_use_count_counts_every_tensor_and_the_storage_at_hand() -> None:
    x = torch.ones(4)
    storage = x.untyped_storage()
    assert torch_compat.storage_use_count(torch_compat.storage_id(storage)) == 2
    view = x[1:]
    assert torch_compat.storage_use_count(torch_compat.storage_id(storage)) == 3
    del view
    assert torch_compat.storage_use_count(torch_compat.storage_id(storage)) == 2


def test_a_weak_storage_does_not_keep_it_alive() -> None:
    x = torch.ones(4)
    reference = torch_compat.weak_storage(x.untyped_storage())
    alias = x.detach()
    del x
    gc.collect()
    living = torch_compat.living_storage(reference)
    assert living is not None
    assert living.nbytes() == 16
    del alias, living
    assert torch_compat.living_storage(reference) is None


# -- dispatch -------------------------------------------------------------------------------------------------------


class _Record(torch_compat.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_operators_with_their_schemas_and_none_under_no_dispatch() -> None:
    with _Record() as mode:
        x = torch.ones(2, 2).mul_(3)
        with torch_compat.no_dispatch():
            torch.ones(2)
    ones, mul = mode.seen
    assert torch_compat.is_operator(mul)
    assert not torch_compat.is_operator(torch.mul)
    assert torch_compat.operator_name(ones) == "ones"
    schema = torch_compat.operator_schema(mul)
    assert schema.name == "aten::mul_"
    assert schema.is_mutable
    assert [argument.name for argument in schema.arguments] == ["self", "other"]
    assert len(schema.returns) == 1
    assert x.sum() == 12


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_function_mode_sees_nothing_under_no_torch_function() -> None:
    with _Functions() as mode:
        x = torch.ones(2)
        with torch_compat.no_torch_function():
            assert x.shape == torch.add(x, x).shape
    assert mode.seen == [torch.ones]


def test_fake_tensors_have_no_memory_and_can_be_left() -> None:
    with torch_compat.FakeTensorMode():
        fake = torch.empty(2**40)
        with torch_compat.unset_fake_temporarily():
            real = torch.ones(2)
    assert isinstance(fake, torch_compat.FakeTensor)
    assert type(real) is Tensor


def test_a_mode_sees_that_autograd_reads_the_device_of_a_fake_tensor() -> None:
    with torch_compat.FakeTensorMode():
        weight = leaf(2)
        with _Record() as mode:
            weight.view(1, 2)
    assert torch_compat.device_read in mode.seen


def test_a_wrapper_of_tensors_is_told_from_a_tensor() -> None:
    wrapper = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert torch_compat.is_traceable_wrapper_subclass(wrapper)
    assert not torch_compat.is_traceable_wrapper_subclass(torch.ones(2))


def test_trees_are_mapped_and_listed() -> None:
    tree = {"a": [1, (2, 3)], "b": 4}
    assert torch_compat.tree_leaves(tree) == [1, 2, 3, 4]
    assert torch_compat.tree_map(lambda n: n + 1, tree) == {"a": [2, (3, 4)], "b": 5}


def test_a_function_transform_is_seen_and_its_tensors() -> None:
    seen: list[tuple[object, bool]] = []

    def function(x: Tensor) -> Tensor:
        seen.append((torch_compat.interpreter_stack(), torch_compat.is_transformed(x)))
        return x.sum()

    function(torch.ones(2))
    torch.func.grad(function)(torch.ones(2))
    assert seen[0] == (None, False)
    assert seen[1][0] is not None
    assert seen[1][1]


def test_batched_gradients_are_seen() -> None:
    seen: list[bool] = []
    x = leaf(2)
    y = x * 2
    y.register_hook(
        lambda gradient: seen.append(torch_compat.is_legacy_batched(gradient) or torch_compat.is_transformed(gradient))
    )
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    torch.autograd.grad(y.sum(), x)
    assert seen == [True, False]


def test_a_forward_mode_level_is_seen() -> None:
    assert torch_compat.forward_mode_level() == -1
    with forward_ad.dual_level():
        assert torch_compat.forward_mode_level() == 0


def test_a_trace_is_seen() -> None:
    seen: list[object] = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch_compat.tracing_state())
        return x + 1

    function(torch.ones(2))
    torch.jit.trace(function, torch.ones(2), check_trace=False)
    assert seen[0] is None
    assert seen[1] is not None


# -- modules --------------------------------------------------------------------------------------------------------


def test_the_hooks_of_a_module_are_in_their_tables() -> None:
    module = nn.Linear(2, 2)
    assert not any(torch_compat.module_hooks(module))
    module.register_forward_hook(lambda *given: None)
    assert [len(table) for table in torch_compat.module_hooks(module)] == [1, 0, 0, 0]
    assert len(torch_compat.module_forward_hooks(module)) == 1
    module.register_forward_pre_hook(lambda *given: None)
    module.register_full_backward_hook(lambda *given: None)
    module.register_full_backward_pre_hook(lambda *given: None)
    assert [len(table) for table in torch_compat.module_hooks(module)] == [1, 1, 1, 1]
    vars(module).update(torch_compat.no_forward_hooks())
    assert [len(table) for table in torch_compat.module_hooks(module)] == [0, 0, 1, 1]


def test_a_hook_for_all_modules_is_seen() -> None:
    assert not torch_compat.has_any_global_hook()
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    assert torch_compat.has_any_global_hook()
    handle.remove()


def test_a_tensor_without_memory_stands_for_others() -> None:
    class Stand(Tensor):
        @classmethod
        def __torch_dispatch__(cls, *given: Any) -> Any:
            raise AssertionError("nothing reads it")

    assert torch_compat.makes_wrappers
    stand = torch_compat.wrapper(Stand, (2, 3), torch.bfloat16, torch.device("cpu"))
    assert (type(stand), tuple(stand.shape), stand.dtype) == (Stand, (2, 3), torch.bfloat16)


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "privateuseone"])
def test_autocast_is_seen_on_every_device(device: str) -> None:
    assert not torch_compat.any_autocast_enabled()
    torch.set_autocast_enabled(device, True)
    try:
        assert torch_compat.any_autocast_enabled()
    finally:
        torch.set_autocast_enabled(device, False)


def test_parametrizations_are_cached_where_somebody_said_so() -> None:
    assert not torch_compat.parametrizations_are_cached()
    with parametrize.cached():
        assert torch_compat.parametrizations_are_cached()


def test_dropouts_are_told_by_their_base_class() -> None:
    assert torch_compat.is_dropout(nn.Dropout())
    assert torch_compat.is_dropout(nn.Dropout2d())
    assert not torch_compat.is_dropout(nn.Linear(2, 2))


def test_a_compiled_module_shows_the_original() -> None:
    module = nn.Linear(2, 2)
    assert torch_compat.compiled_module(torch.compile(module)) is module
    assert torch_compat.compiled_module(module) is None


# -- compiled graphs ------------------------------------------------------------------------------------------------


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
    node: Any = run(leaf(4, 4), leaf(4, 4)).grad_fn
    return len(node.saved_tensors)


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


# -- selective checkpointing ----------------------------------------------------------------------------------------


def _every_mm(ctx: object, operator: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
    is_mm = operator._overloadpacket is torch.ops.aten.mm
    return CheckpointPolicy.MUST_SAVE if is_mm else CheckpointPolicy.PREFER_RECOMPUTE


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
        arguments = torch_compat.selective_checkpoint_arguments(policy)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
        with Count() as count:
            model(**inputs).loss.backward()
        products.append(count.computed.count("mm"))
    assert products[0] == products[1]
    for (name, ours), (_, theirs) in zip(patched.named_parameters(), stock.named_parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm(), name


def test_what_a_policy_selects_is_not_computed_again() -> None:
    arguments = torch_compat.selective_checkpoint_arguments([torch.ops.aten.exp.default])
    with Count() as count:
        checkpoint(lambda t: t.relu().exp().tanh(), leaf(2, 2), **arguments).sum().backward()
    assert (count.computed.count("relu"), count.computed.count("exp")) == (2, 1)


@pytest.mark.parametrize("taker", ["checkpoint", "create_selective_checkpoint_contexts"])
def test_the_argument_of_the_next_release_is_passed_where_it_is_taken(
    monkeypatch: pytest.MonkeyPatch, taker: str
) -> None:
    given: list[bool | None] = []

    def taking(policy: object, *, respect_saved_tensors_hooks: bool | None = None) -> None:
        given.append(respect_saved_tensors_hooks)

    monkeypatch.setattr(f"torch.utils.checkpoint.{taker}", taking)
    arguments = torch_compat.selective_checkpoint_arguments([], respect_hooks=True)
    arguments["context_fn"]()
    passed = [arguments["respect_saved_tensors_hooks"]] if taker == "checkpoint" else given
    assert passed == [True]


# -- without a name -------------------------------------------------------------------------------------------------

_FIELDS = {name for name in torch_compat.names() if re.search(r"_functions\.\w+\._saved_", name)}
_OTHERS = [name for name in torch_compat.names() if name not in _FIELDS]


def _named(*patterns: str) -> str:
    return ",".join(name for name in _OTHERS if any(re.search(pattern, name) for pattern in patterns))


#: What is hidden together; no stand-in of one group switches off what tests another of the same group.
GROUPS = {
    "hook stack": _named("_top_saved"),
    "disabled hooks": _named("_error_message"),
    "raw fields": _named("unpack_hook", "_raw_saved"),
    "numbers and hooks": _named("sequence_nr", "_input_metadata", "_graph_task", "_hooks$", "_global_hook"),
    "storages": _named("Storage", "_storage_"),
    "trees": _named(
        "_pytree", "OpOverload$", "fake_tensor", "_utils", "functorch.is_", "_DropoutNd", "_autocast", "_backward_cls"
    ),
    "transforms": _named("peek_", "_current_level", "_tracing_state"),
    "fields": ",".join(sorted(_FIELDS)),
    "dispatch": _named("TorchDispatchMode"),
    "everything": ",".join(torch_compat.names()),
}


def _examined(groups: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    ran = run_code("import sys; from tests.hidden_names import main; main(sys.argv[1:])", *groups)
    assert ran.code == 0, ran.err
    for line in ran.out.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            yield found["hidden"], found


@pytest.fixture(scope="module")
def examined() -> dict[str, dict[str, Any]]:
    return dict(_examined(["nothing", *GROUPS.values()]))


@pytest.mark.parametrize("group", GROUPS)
def test_without_a_group_of_names_models_are_patched_and_right(examined: dict[str, dict[str, Any]], group: str) -> None:
    _is_right(examined[GROUPS[group]], examined["nothing"])


@pytest.mark.slow
def test_without_any_one_name_models_are_patched_and_right() -> None:
    found = dict(_examined(["nothing", *_OTHERS]))
    for name in _OTHERS:
        _is_right(found[name], found["nothing"])


def _is_right(found: dict[str, Any], whole: dict[str, Any]) -> None:
    assert "failed" not in found, found.get("failed")
    assert found["missing"] == sorted(found["hidden"].split(","))
    assert len(found["warnings"]) == 1, "said once for two models"
    assert found["error"] <= 2 * whole["error"]
    assert (found["refused"] is not None) == any(
        name.endswith(("TorchDispatchMode", "mm.default._schema")) for name in found["missing"]
    )


def test_with_every_name_nothing_is_said(examined: dict[str, dict[str, Any]]) -> None:
    assert examined["nothing"]["missing"] == examined["nothing"]["warnings"] == []


@pytest.mark.parametrize("group", ["hook stack", "disabled hooks", "raw fields", "transforms"])
def test_without_a_name_its_saving_is_off(examined: dict[str, dict[str, Any]], group: str) -> None:
    stock, patched = examined[GROUPS[group]]["kept"]
    assert stock >= patched > examined["nothing"]["kept"][1]


def test_a_rule_that_cannot_read_its_nodes_is_not_registered(examined: dict[str, dict[str, Any]]) -> None:
    assert "MulBackward0" in examined["nothing"]["rules"]
    assert examined[GROUPS["fields"]]["rules"] == []


# -- the source -----------------------------------------------------------------------------------------------------

_ATTRIBUTE = re.compile(
    r"_(raw_)?saved_[a-z_0-9]+|_schema|_cdata|_sequence_nr|_input_metadata|_orig_mod|_new_with_weak_ptr"
    r"|_(forward|backward)(_pre)?_hooks|_has_any_global_hook"
)
_STABLE = {"__version__"}


def private_names(source: str) -> list[str]:
    """Private names of PyTorch that `source` uses, but those that ``torch_compat`` says are stable."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            rooted = re.fullmatch(r"(torch|nn|forward_ad)(\.\w+)+", path) and not path.startswith("torch.ops.")
            found += [path] if _ATTRIBUTE.fullmatch(node.attr) else []
            paths = [path] if rooted else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [node.value] if _ATTRIBUTE.fullmatch(node.value) else []
            continue
        else:
            continue
        private = (p for p in paths if any(s.startswith("_") and s not in _STABLE for s in p.split(".")[1:]))
        found += private
        found += [path for path in paths if path.endswith("StorageWeakRef")]
    return found


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils._pytree import tree_map",
        "from torch.utils import _pytree",
        "import torch._dynamo",
        "torch._C._get_tracing_state()",
        "node._saved_self",
        "getattr(node, '_raw_saved_tensors')",
        "h._backward_hooks",
        "nn.modules.module._has_any_global_hook()",
        "from torch.multiprocessing.reductions import StorageWeakRef",
    ],
)
def test_a_private_name_is_found_in_source(line: str) -> None:
    assert private_names(line)


def test_no_other_file_of_the_package_uses_a_private_name() -> None:
    package = ROOT / "src" / "memopt"
    files = [path for path in package.rglob("*.py") if package / "torch_compat" not in path.parents]
    found = {str(path.relative_to(package)): private_names(path.read_text()) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_fake_tensor_may_have_known_values_and_no_other_has() -> None:
    values = torch.arange(3)
    with torch_compat.FakeTensorMode():
        fake, unknown = torch.empty(3, dtype=torch.long), torch.empty(3)
    torch_compat.know_values(fake, values)
    assert torch_compat.known_values(fake) is values
    assert torch_compat.known_values(unknown) is None
    assert torch_compat.known_values(values) is None


def test_every_public_name_has_a_test() -> None:
    source = Path(__file__).read_text()
    said = {"Missing", "warn_once_of_missing"}  # tested by the message that is said once
    public = {
        name for name, value in vars(torch_compat).items() if name[0] != "_" and not isinstance(value, ModuleType)
    }
    assert len(public) > 40
    assert [name for name in public - said if f"torch_compat.{name}" not in source] == []


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def _pack(tensor: Tensor) -> Tensor:
    return tensor.detach()


def _unpack(packed: Tensor) -> Tensor:
    return packed
