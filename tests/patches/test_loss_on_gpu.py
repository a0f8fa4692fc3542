"""The loss as a GPU computes it, on the CPU: its chunks, its sums, ignored rows that count 0, nothing that waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.patches.loss import plain, readers, rows
from memopt.patches.loss.module import patch_head
from memopt.torch_compat import TorchDispatchMode
from tests.triton.accuracy import assert_as_accurate

ROWS, WIDTH, CLASSES = 96, 32, 520


def wide(product: Any) -> Any:
    """A product in another dtype than its operands, which the CPU has not."""

    def run(*args: Tensor, out: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        if out_dtype is not None:
            assert out_dtype == out.dtype == torch.float32
            assert {each.dtype for each in args[-2:]} <= {torch.bfloat16, torch.float16}
            args = tuple(each.to(out_dtype) for each in args)
        found: Tensor = product(*args, out=out)
        return found

    return run


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which ways were taken; chunks are as small as the tensors here."""
    for module in (rows, plain, readers):
        monkeypatch.setattr(module, "is_on_gpu", lambda x: True)
    for name, value in (("SMALLEST_CHUNK", 2**12), ("GPU_CHUNK", 2**14), ("TILE", 16)):
        monkeypatch.setattr(rows, name, value)
    monkeypatch.setattr(plain, "ROWS", 16)
    monkeypatch.setattr(plain, "COLUMNS", 32)
    ways: list[str] = []
    for name in ("loss_at_once", "losses_by_blocks", "_by_rows"):
        function = getattr(readers, name)
        monkeypatch.setattr(readers, name, lambda *a, f=function, n=name: (ways.append(n), f(*a))[1])
    on_device = {**vars(torch), "mm": wide(torch.mm), "addmm": wide(torch.addmm)}
    monkeypatch.setattr(plain, "torch", SimpleNamespace(**on_device))
    return ways


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    weight = 3 * torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64) * WIDTH**-0.5
    target = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    target[::7] = -100
    return x, weight, target


class Adapted(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head, self.up = head, nn.Linear(WIDTH, CLASSES, bias=False, dtype=next(head.parameters()).dtype)
        nn.init.constant_(self.up.weight, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x) + self.up(x)
        return y


CLASS_WEIGHTS = torch.linspace(0.5, 1.5, CLASSES)
OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "a loss a row": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "weights": {"weight": CLASS_WEIGHTS},
    "smoothed weights": {"weight": CLASS_WEIGHTS, "label_smoothing": 0.1},
}


def gradients(
    dtype: torch.dtype, options: dict[str, Any], *, autocast: bool = False, cap: bool = False, frozen: bool = False,
    tied: bool = False, adapted: bool = False, room: int = 0, patched: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Of x, of the weight where it is trained, of a bias and of an adapter."""
    x, weight, target = drawn()
    own = torch.float32 if autocast else dtype
    linear = nn.Linear(WIDTH, CLASSES, dtype=own)
    linear.weight.data, linear.bias.data = weight.to(own), torch.linspace(-1, 1, CLASSES).to(own)
    linear.requires_grad_(not frozen)
    head: nn.Module = Adapted(linear) if adapted else linear
    x = x.to(own).requires_grad_()
    if patched:
        patch_head(head, WIDTH, CLASSES, room=room)
    typed = {
        k: v.to(torch.promote_types(own, torch.float32)) if isinstance(v, Tensor) else v for k, v in options.items()
    }
    read = x + linear.weight[: len(x)] if tied else x * 1  # as an embedding that reads the same weight
    with torch.autocast("cpu", dtype, enabled=autocast):
        y = head(read)
        y = torch.tanh(y / 30) * 30 if cap else y
        loss = F.cross_entropy(y if dtype == torch.float64 else y.float(), target, **typed)
    loss = (loss * torch.linspace(0.5, 1.5, ROWS, dtype=loss.dtype)).sum() if loss.dim() else loss
    return list(torch.autograd.grad(loss, [x, *(each for each in head.parameters() if each.requires_grad)]))


def compare(dtype: torch.dtype, options: dict[str, Any], *, room: int = 0, **how: Any) -> None:
    """As close to fp64 as stock."""
    truth = gradients(torch.float64, options, **{**how, "autocast": False})
    stock, ours = gradients(dtype, options, **how), gradients(dtype, options, room=room, patched=True, **how)
    assert len(ours) == len(stock) == len(truth)
    for one, other, true in zip(ours, stock, truth, strict=True):
        assert_as_accurate(one, other, true)


DTYPES = [(torch.float32, False), (torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)]
every_dtype = pytest.mark.parametrize(("dtype", "autocast"), DTYPES, ids=lambda value: str(value))
#: Bytes: none beyond the default; the weight's gradient, and two chunks; all.
ROOMS = {"by blocks": 0, "at once, two chunks": ROWS // 2 * CLASSES * 4, "at once": 2**20}


@every_dtype
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_as_close_to_fp64_as_stocks(
    name: str, room: str, dtype: torch.dtype, autocast: bool, on_gpu: list[str]
) -> None:
    compare(dtype, OPTIONS[name], autocast=autocast, room=ROOMS[room])
    at_once = room != "by blocks" and dtype != torch.float16 and name != "a loss a row"
    assert on_gpu == ["loss_at_once" if at_once else "losses_by_blocks"]


@every_dtype
@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("how", ["cap", "frozen", "tied", "adapted"])
def test_heads_of_every_kind_are_as_close(how: str, room: str, dtype: torch.dtype, autocast: bool) -> None:
    compare(dtype, OPTIONS["smoothed weights"], autocast=autocast, room=ROOMS[room], **{how: True})


def test_two_chunks_are_summed_in_16_bits_and_more_in_32() -> None:
    head = nn.Linear(WIDTH, CLASSES, bias=False, dtype=torch.bfloat16)
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    for chunks, dtype in ((1, torch.bfloat16), (2, torch.bfloat16), (3, torch.float32)):
        patched = nn.Linear(WIDTH, CLASSES, bias=False, dtype=torch.bfloat16)
        patched.weight = head.weight
        patch_head(patched, WIDTH, CLASSES, room=ROWS // chunks * CLASSES * 2)
        logits: Any = patched(x)
        assert plain.Plain(logits.source, plain.LossArguments()).sum_dtype(head.weight) == dtype


class Waits(TorchDispatchMode):
    """An error for what a GPU has to be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (
            torch.ops.aten.nonzero, torch.ops.aten._local_scalar_dense, torch.ops.aten.masked_select,
            torch.ops.aten.equal, torch.ops.aten.is_nonzero, torch.ops.aten.repeat_interleave,
        ), func  # fmt: skip
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_waits_for_the_device(name: str, adapted: bool, room: str) -> None:
    with Waits():
        gradients(torch.bfloat16, OPTIONS[name], adapted=adapted, room=ROOMS[room], patched=True)


@pytest.mark.parametrize("room", ROOMS)
def test_a_batch_without_labels_is_nan_and_has_no_gradient(room: str) -> None:
    head = nn.Linear(WIDTH, CLASSES)
    patch_head(head, WIDTH, CLASSES, room=ROOMS[room])
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    loss = F.cross_entropy(head(x), torch.full((ROWS,), -100))
    assert loss.isnan()
    found = torch.autograd.grad(loss, (x, head.weight))
    expected = torch.autograd.grad(
        F.cross_entropy(F.linear(x, head.weight, head.bias), torch.full((ROWS,), -100)), (x, head.weight)
    )
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("room", ROOMS)
def test_a_loss_may_be_added_to_in_place(room: str) -> None:
    head = nn.Linear(WIDTH, CLASSES)
    patch_head(head, WIDTH, CLASSES, room=ROOMS[room])
    x, _, target = drawn()
    loss = F.cross_entropy(head(x.float().requires_grad_()), target)
    loss += 1.0
    loss.backward()
    assert head.weight.grad is not None


@pytest.mark.parametrize(
    ("count", "tiles"), [(0, 1), (1, 1), (3, 2), (16, 16), (43, 32), (47, 32), (48, 48), (4185, 4176)]
)
def test_chunks_are_whole_tiles(count: int, tiles: int) -> None:
    assert rows.in_tiles(count) == tiles
