"""Forwards that change tensors of their module in ways that no version shows, and run twice or not at all."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.patches.unseen import Values
from tests.support.compare import gradients_of

WIDTH = 32
IDS = torch.arange(24).view(2, 12) * 7 % 50
#: More elements than are copied in case a forward changes them.
LARGE, SMALL = (1 << 20) // WIDTH + 1, 4
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "in place": lambda state, mean: state.data.mul_(0.9).add_(mean),
    "another tensor": lambda state, mean: setattr(state, "data", state.data * 0.9 + mean),
    "in NumPy": lambda state, mean: state.is_meta or state.detach().numpy().__iadd__(mean.numpy()),
    "one row": lambda state, mean: state.data[0].add_(mean),
    "another order": lambda state, mean: setattr(state, "data", state.data.roll(1, 0)),
}


class _Block(nn.Module):
    def __init__(self, rows: int, place: str, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        values = torch.randn(rows, WIDTH) / 10
        if place == "buffer":
            self.register_buffer("state", values)
        else:
            self.state = nn.Parameter(values, requires_grad=place == "parameter")
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.state, x.detach().mean((0, 1)) / 10)
        return x + self.down(torch.tanh(self.up(self.norm(x) * (1 + self.state[0]))))


class _Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _pair(block: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    stock = _Model(block)
    patched = memopt.patch(copy.deepcopy(stock), "exact-levels", inputs={"input_ids": IDS})
    return stock, patched


def _step(model: nn.Module) -> dict[str, Tensor]:
    return gradients_of(model, torch.nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()))


def _assert_same(stock: nn.Module, patched: nn.Module) -> None:
    for _ in range(3):
        expected, found = _step(stock), _step(patched)
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    for (name, ours), theirs in zip(patched.named_buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_checkpointed_block_changes_its_buffers_once(write: Callable[[Tensor, Tensor], object]) -> None:
    _assert_same(*_pair(lambda: _Block(SMALL, "buffer", write)))


@pytest.mark.parametrize("place", ["buffer", "parameter", "frozen parameter"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_checkpointed_block_that_changes_what_is_not_copied_is_an_error(
    write: Callable[[Tensor, Tensor], object], place: str
) -> None:
    _, patched = _pair(lambda: _Block(LARGE, place, write))
    found = r"'state' .* has other values at the same version \d+, .*leave the block out of checkpointing"
    with pytest.raises(RuntimeError, match=found):
        _step(patched)


def test_a_block_that_sets_its_weights_to_the_same_values_again_runs_twice() -> None:
    """... as an initialisation by the first batch does, which both runs see."""

    def initialise(state: Tensor, mean: Tensor) -> None:
        state.data[:] = torch.ones(WIDTH)

    _assert_same(*_pair(lambda: _Block(SMALL, "parameter", initialise)))


class _Counting(nn.Linear):
    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__(WIDTH, 64)
        self.register_buffer("state", torch.zeros(SMALL, WIDTH))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.state, x.detach().mean((0, 1)))
        return torch.nn.functional.linear(x, self.weight, self.bias)


class _Counted(nn.Module):
    def __init__(self, write: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.norm, self.act, self.down = nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(64, WIDTH)
        self.up = _Counting(write)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_linear_that_counts_its_calls_does_not_run_again(write: Callable[[Tensor, Tensor], object]) -> None:
    stock, patched = _pair(lambda: _Counted(write))
    assert "output recomputed" in str(memopt.summary(patched))
    _assert_same(stock, patched)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("count", [0, 1, 5000, 300_001])
def test_one_element_shows(dtype: torch.dtype, count: int) -> None:
    tensor = torch.zeros(count).to(dtype)
    values = Values([tensor, torch.zeros(3)])
    assert not values.changed()
    tensor.data[count // 2 :][:1] = 1
    assert values.changed() == ([0] if count else [])


def test_tensors_without_values_are_left_out() -> None:
    freed = torch.zeros(4)
    values = Values([torch.empty(3, device="meta"), freed, torch.ones(2, 3).T.conj()])
    freed.untyped_storage().resize_(0)
    assert not values.changed()
    freed.data = torch.ones(2)
    assert not values.changed()
