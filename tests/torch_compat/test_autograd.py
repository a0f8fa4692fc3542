"""Hooks, graph nodes and tensors' identities: PyTorch's private names do what `memopt.torch_compat` says."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from memopt import torch_compat
from tests.torch_compat.leaves import leaf


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


def test_saved_tensors_are_kept_from_foreign_hooks_unless_hooks_are_disabled() -> None:
    seen: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch_compat.without_foreign_hooks():
            leaf().sin()
        assert not seen
        leaf().sin()
        assert len(seen) == 1
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"), torch_compat.without_foreign_hooks():
        leaf().sin().sum().backward()


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


def test_the_frame_of_a_module_call_is_distinguished_from_others() -> None:
    frames, running = [], []

    class Module(nn.Module):
        def forward(self) -> None:
            running.extend(torch_compat.modules_that_run())
            frame: Any = sys._getframe()
            while frame is not None:
                frames.append((torch_compat.is_module_call(frame), frame.f_locals.get("self")))
                frame = frame.f_back

    module = Module()
    module()
    assert [held for is_call, held in frames if is_call] == [module]
    assert running == [module]


def test_the_modules_that_run_are_named_from_the_inside() -> None:
    running: list[nn.Module] = []
    outer = nn.Sequential(nn.ReLU())
    outer[0].register_forward_hook(lambda *_: running.extend(torch_compat.modules_that_run()))
    outer(leaf())
    assert running == [outer[0], outer]


def test_functions_of_autograd_are_numbered_and_show_their_tensors_too() -> None:
    first = torch_compat.next_sequence_number()
    x = leaf()
    with saved_tensors_hooks(_pack, _unpack):
        y = _Square.apply(x)
    assert torch_compat.sequence_number(y.grad_fn) >= first
    assert torch_compat.unpack_hooks(y.grad_fn) == [_unpack]


def test_autograd_does_not_read_whether_a_function_has_a_vjp() -> None:
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


def test_a_direct_function_saves_its_tensors_from_its_own_code() -> None:
    class Direct(torch_compat.DirectFunction):
        forward, backward = _Square.forward, _Square.backward

    x, codes = leaf(), list[Any]()
    with saved_tensors_hooks(lambda tensor: codes.append(sys._getframe(1).f_code) or tensor.detach(), _unpack):
        y = Direct.apply(x)
    y.sum().backward()
    assert codes == [torch_compat.DIRECT_APPLY]
    assert torch.equal(x.grad, 2 * x)  # type: ignore[arg-type]


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


def test_a_function_for_the_end_of_backward_runs_when_all_gradients_are_there() -> None:
    x, seen = leaf(), []
    x.register_hook(lambda _: torch_compat.at_the_end_of_backward(lambda: seen.append(x.grad is not None)))
    x.sum().backward()
    assert seen == [True]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_region_is_recognised_in_both_runs_or_in_backward(use_reentrant: bool) -> None:
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


def test_frames_of_checkpointing_one_in_the_other_are_one_call() -> None:
    """PyTorch 2.15 has two of them; this PyTorch may have one."""
    found: dict[str, Any] = {"__name__": checkpoint.__module__}
    exec("def inner(run): return run()\ndef outer(run): return inner(run)", found)
    outer = found["outer"]
    assert outer(torch_compat.calls_of_checkpointing) == 1
    assert outer(lambda: outer(torch_compat.calls_of_checkpointing)) == 2


def test_whether_fsdp_leaves_parameters_gathered() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        left = []
        for reshards in (False, True):
            sharded = fully_shard(torch.nn.Linear(2, 2), mesh=mesh, reshard_after_forward=reshards)
            hooks = [hook for each in torch_compat.module_hooks(sharded) for hook in each.values()]
            left.append(torch_compat.fsdp_leaves_gathered(sharded, hooks))
            assert torch_compat.fsdp_takes_back(sharded) is reshards
            assert hooks
            assert not torch_compat.fsdp_leaves_gathered(sharded, [*hooks, print])
    finally:
        torch.distributed.destroy_process_group()
    assert left == [True, False]
    assert not torch_compat.fsdp_leaves_gathered(torch.nn.Linear(2, 2), [])
    assert not torch_compat.fsdp_takes_back(torch.nn.Linear(2, 2))


def test_selective_checkpointing_is_distinguished_from_plain_checkpointing() -> None:
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
    assert torch_compat.unpack_hooks(hooked.grad_fn, "other") == [_unpack]
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
        "BmmBackward0": (lambda z: torch.bmm(z, z.mT), {}),
        "BaddbmmBackward0": (
            lambda z: torch.baddbmm(torch.ones(2, 4, 4), z, z.mT, beta=3, alpha=0.5),
            {"beta": 3, "alpha": 0.5},
        ),
        "NativeBatchNormBackward0": (
            lambda z: torch.batch_norm(z, None, None, None, None, True, 0.1, 0.5, False),
            {"eps": 0.5, "running_mean": None, "running_var": None, "training": True},
        ),
        "IndexBackward0": (lambda z: z[torch.tensor([1])], {"indices": (torch.tensor([1]),)}),
        "SelectBackward0": (lambda z: z.select(-1, -2), {"dim": 2**64 - 1, "index": 2**64 - 2}),
        "TransposeBackward0": (lambda z: z.transpose(0, -1), {"dim0": 0, "dim1": 2**64 - 1}),
        "PermuteBackward0": (lambda z: z.permute(2, 0, -2), {"dims": (2, 0, 2**64 - 2)}),
        "SliceBackward0": (lambda z: z[..., 1:-1:2], {"dim": 2, "start": 1, "end": 2**64 - 1, "step": 2}),
        "UnsqueezeBackward0": (lambda z: z.unsqueeze(-2), {"dim": 2**64 - 2}),
        "ExpandBackward0": (lambda z: z.expand(3, 2, 4, 6), {"self_sym_sizes": (2, 4, 6)}),
        "RollBackward0": (lambda z: z.roll(-1, -2), {"shifts": (2**64 - 1,), "dims": (2**64 - 2,)}),
        "FlipBackward0": (lambda z: z.flip(-1), {"dims": (2**64 - 1,)}),
        "RepeatBackward0": (lambda z: z.repeat(3, 1, 1), {"repeats": (3, 1, 1)}),
        "SplitBackward0": (lambda z: z.split(4, -1)[1], {"split_size": 4, "dim": 2**64 - 1}),
        "SplitWithSizesBackward0": (lambda z: z.split((2, 4), 2)[1], {"split_sizes": (2, 4), "dim": 2}),
        "UnbindBackward0": (lambda z: z.unbind(-1)[2], {"dim": 2**64 - 1}),
        "AddBackward0": (lambda z: torch.add(z, z, alpha=2), {"alpha": 2}),
        "SubBackward0": (lambda z: torch.sub(z, z, alpha=2), {"alpha": 2}),
        "DivBackward0": (lambda z: z / z, {}),
        "CatBackward0": (lambda z: torch.cat((z, z), -1), {"dim": 2**64 - 1}),
        "StackBackward0": (lambda z: torch.stack((z, z), -1), {"dim": 2**64 - 1}),
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
_ON_GPU |= {"CudnnBatchNormBackward0", "MiopenBatchNormBackward0"}


def test_every_field_has_a_canary() -> None:
    assert _nodes().keys() | _ON_GPU == torch_compat.SAVED_FIELDS.keys()
    assert all(torch_compat.shows_saved(name) for name in torch_compat.SAVED_FIELDS)
    assert not torch_compat.shows_saved("NoSuchBackward0")
    assert all(eps in torch_compat.SAVED_FIELDS[node] for node, eps in torch_compat.BATCH_NORMS.items())
    assert all(torch_compat.SAVED_FIELDS[node] == ("padding",) for node in torch_compat.PADS)


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
        if field in ("self", "other", "input"):
            assert torch.equal(shown, z)
        elif field in ("result1", "result2"):  # of the batch: mean and rstd
            mean, variance = z.mean((0, 2)), z.var((0, 2), correction=0)
            assert torch.allclose(shown, mean if field == "result1" else (variance + 0.5).rsqrt())
        elif field in ("result", "output"):
            assert torch.equal(shown, output)
        elif field in ("batch1", "batch2", "mat2"):
            assert torch.equal(shown if field == "batch1" else shown.mT, z)
        else:
            assert (tuple(shown) if isinstance(shown, (list, tuple)) else shown) == expected[field]


def test_tensor_hooks_are_those_of_register_hook() -> None:
    x = leaf()
    assert not torch_compat.tensor_hooks(x)
    x.register_hook(lambda gradient: gradient)
    assert torch_compat.tensor_hooks(x)


def test_the_descriptor_of_tensor_hooks_is_what_a_subclass_sees() -> None:
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__self__", None))
            return super().__torch_function__(func, types, args, kwargs or {})

    Watched([1.0])._backward_hooks  # noqa: B018
    assert torch_compat.tensor_hooks_slot in seen


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


def test_what_is_held_is_not_unpacked() -> None:
    x = torch.randn(3, requires_grad=True)
    assert torch_compat.held(x.sin().grad_fn, "self") is x
    with saved_tensors_hooks(lambda tensor: "packed", lambda packed: pytest.fail("it was unpacked")):
        node = x.sin().grad_fn
    assert torch_compat.held(node, "self") == "packed"
    assert torch_compat.held(node, "other") is None


def test_a_gradient_that_the_engine_passes_to_one_node_has_one_use() -> None:
    found: list[int] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            found.append(torch_compat.tensor_uses(gradient))
            return gradient * 2

    x = torch.ones(3, requires_grad=True)
    Looks.apply(x * 1).exp().sum().backward()  # type: ignore[no-untyped-call]
    assert found == [1]
