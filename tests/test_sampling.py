"""Sampled linears that know how large each token's gradient was at its sample's last visit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import memopt
from memopt.errors import InputsError, ModelError
from memopt.kernels.sampled_linear.sampling import expected_error
from memopt.patches.sampled_linear.module import patch_sampled_linear
from memopt.patches.sampled_linear.slot import Sampling
from memopt.patches.sampled_linear.visits import Visits, patch_visits, visits_of
from memopt.patches.scope import ScopeRewrite, patch_scope
from memopt.sampling import INDEX, GradientMemory, IndexedDataset, remember_gradients
from tests.support.ranks import run_ranks

SAMPLES, LENGTH, WIDTH, OUT = 6, 8, 5, 4
#: bf16 has 8 bits of mantissa; |dY| itself is rounded in fp32, which is far less.
ROUNDING = 2.0**-8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale)  # nobody else holds the product


class Model(nn.Module):
    """The gradient of the linear's output at each token is `size` times a vector of norm 1."""

    def __init__(self, calls: int = 1) -> None:
        super().__init__()
        self.block, self.calls = Block(), calls

    def forward(self, x: Tensor, size: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        real = 1 if attention_mask is None else attention_mask[..., None]
        return sum((self.block(x) * (size[..., None] * real) / OUT**0.5).sum() for _ in range(self.calls))


def patched(budget: float = 0.5, calls: int = 1) -> Model:
    torch.manual_seed(0)
    model, visits = Model(calls), Visits()
    patch_sampled_linear(model.block.linear, Sampling("systematic", budget), visits, "block.linear")
    patch_scope(model.block, ScopeRewrite(frozenset()))
    patch_visits(model, visits)
    return model


def sizes(samples: int = SAMPLES, length: int = LENGTH) -> Tensor:
    """Heavy-tailed."""
    return torch.randn(samples, length, generator=torch.Generator().manual_seed(3)).mul(2).exp()


def batch(rows: list[int], length: int = LENGTH, left: bool = False, pad: int = 0) -> dict[str, Tensor]:
    """Samples of `length` tokens and `pad` of padding on one side."""
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(4))[rows, :length]
    size, mask = sizes()[rows, :length], torch.ones(len(rows), length, dtype=torch.int64)
    at = (pad, 0) if left else (0, pad)
    padded = {
        "x": nn.functional.pad(x, (0, 0, *at), value=1.0),
        "size": nn.functional.pad(size, at),
        "attention_mask": nn.functional.pad(mask, at),
    }
    return padded | {INDEX: torch.tensor(rows)}


def step(model: Model, given: dict[str, Tensor]) -> Tensor:
    model.zero_grad()
    model(**given).backward()
    return model.block.linear.weight.grad.clone()


def table(memory: GradientMemory) -> Tensor:
    """Of the first linear."""
    memory.flush()
    assert memory._table is not None
    return memory._table[:, :, 0].float()


# --- the data set ----------------------------------------------------------------------------------------------------


class Numbers(Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"value": index * index}


class Batched(Numbers):
    """As Hugging Face data sets: gives several samples at once."""

    asked = 0

    def __getitems__(self, indices: list[int]) -> list[dict[str, int]]:
        self.asked += 1
        return [self[index] for index in indices]


class Stream(IterableDataset[dict[str, int]]):
    def __iter__(self) -> Iterator[dict[str, int]]:
        yield {"value": 1}


def test_samples_say_which_they_are() -> None:
    data = IndexedDataset(Numbers())
    assert len(data) == 10
    assert data[3] == {"value": 9, INDEX: 3}
    assert data[-1] == {"value": 81, INDEX: 9}
    assert data[torch.tensor(2)][INDEX] == 2
    with pytest.raises(IndexError):
        data[10]


def test_a_batch_is_asked_for_at_once_where_the_data_set_gives_one() -> None:
    inner = Batched()
    for data in (IndexedDataset(inner), IndexedDataset(Numbers())):
        assert data.__getitems__([1, -2]) == [{"value": 1, INDEX: 1}, {"value": 64, INDEX: 8}]
    assert inner.asked == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_any_number_of_workers(workers: int) -> None:
    data = Subset(IndexedDataset(Batched()), [9, 3, 1, 4])
    loader = DataLoader(data, 2, shuffle=True, num_workers=workers)
    rows = torch.cat([torch.stack([given[INDEX], given["value"]], 1) for given in loader])
    assert sorted(rows.tolist()) == [[1, 1], [3, 9], [4, 16], [9, 81]]


def test_it_goes_through_a_pickle() -> None:
    assert pickle.loads(pickle.dumps(IndexedDataset(Numbers())))[3] == {"value": 9, INDEX: 3}


def test_streams_and_samples_without_names_are_refused_in_words() -> None:
    with pytest.raises(InputsError, match="samples of a stream have no number"):
        IndexedDataset(Stream())
    with pytest.raises(InputsError, match="already"):
        IndexedDataset(IndexedDataset(Numbers()))
    for data in ([(1, 2)], [torch.ones(2)]):
        with pytest.raises(InputsError, match="not a mapping"):
            IndexedDataset(data)[0]
    with pytest.raises(InputsError, match="of its own"):
        IndexedDataset([{INDEX: 1}]).__getitems__([0])


# --- what is remembered ----------------------------------------------------------------------------------------------


def test_the_memory_says_what_it_takes() -> None:
    memory = remember_gradients(patched(), 1000, 128)
    assert memory.nbytes == 2 * 1000 * 128 * 1
    assert "0.3 MB of the host in each process: 2 bytes for each of 1,000 samples x 128 tokens x 1 sampled" in str(
        memory
    )
    memory.forget()
    assert memory.nbytes == 0


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_a_gradient_is_remembered_under_its_sample_and_token_whatever_the_padding(left: bool) -> None:
    model = patched()
    memory = remember_gradients(model, SAMPLES, LENGTH)
    step(model, batch([4, 1], length=5, left=left, pad=3))
    step(model, batch([0, 3, 2], length=7, left=not left, pad=1))
    expected = torch.zeros(SAMPLES, LENGTH)
    expected[[4, 1], :5] = sizes()[[4, 1], :5]
    expected[[0, 3, 2], :7] = sizes()[[0, 3, 2], :7]
    assert torch.allclose(table(memory), expected, rtol=2 * ROUNDING, atol=0)
    step(model, batch([4], length=LENGTH))
    expected[4] = sizes()[4]
    assert torch.allclose(table(memory), expected, rtol=2 * ROUNDING, atol=0)


def test_without_a_mask_a_token_is_where_it_stands() -> None:
    model = patched()
    memory = remember_gradients(model, SAMPLES, LENGTH)
    given = batch([5, 2])
    del given["attention_mask"]
    step(model, given)
    assert torch.allclose(table(memory)[[5, 2]], sizes()[[5, 2]], rtol=2 * ROUNDING, atol=0)


def test_tokens_beyond_the_table_are_not_remembered() -> None:
    model = patched()
    memory = remember_gradients(model, SAMPLES, 3)
    step(model, batch([1, 2]))
    assert torch.allclose(table(memory)[[1, 2]], sizes()[[1, 2], :3], rtol=2 * ROUNDING, atol=0)
    step(model, batch([1, 2]))


def test_calls_of_one_linear_in_one_forward_are_taken_together() -> None:
    model = patched(calls=2)
    memory = remember_gradients(model, SAMPLES, LENGTH)
    step(model, batch([1, 2]))
    assert torch.allclose(table(memory)[[1, 2]], 2**0.5 * sizes()[[1, 2]], rtol=2 * ROUNDING, atol=0)


def test_two_forwards_before_their_backwards() -> None:
    model = patched()
    memory = remember_gradients(model, SAMPLES, LENGTH)
    losses = [model(**batch([1, 2])), model(**batch([3]))]
    for loss in losses:
        loss.backward()
    known = [1, 2, 3]
    assert torch.allclose(table(memory)[known], sizes()[known], rtol=2 * ROUNDING, atol=0)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model = patched()
    memory = remember_gradients(model, SAMPLES, LENGTH)
    step(model, batch([1]))
    before = table(memory)
    for value in (float("inf"), float("nan")):
        given = batch([1, 2])
        given["size"] = torch.full_like(given["size"], value)
        step(model, given)
        assert torch.equal(table(memory), before)


def test_evaluation_notes_nothing() -> None:
    model = patched()
    memory = remember_gradients(model, SAMPLES, LENGTH)
    with torch.no_grad():
        model(**batch([1, 2]))
    model(**batch([1, 2]))  # no backward
    assert not table(memory).any()
    given = batch([1, 2])
    del given[INDEX]
    step(model, given)
    assert not table(memory).any()


def test_a_sample_that_the_table_does_not_have_is_an_error() -> None:
    model = patched()
    remember_gradients(model, 3, LENGTH)
    with pytest.raises(InputsError, match="sample 5, but gradients are remembered for samples 0 to 2"):
        step(model, batch([1, 5]))


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_the_model_do_not_take_the_memory_along(how: str) -> None:
    model = patched()
    memory = remember_gradients(model, SAMPLES, LENGTH)
    step(model, batch([1]))
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert visits_of(other)[0].memory is None
    step(other, batch([2]))
    assert not table(memory)[2].any()


# --- what it is used for ---------------------------------------------------------------------------------------------


def importance(model: Model, given: dict[str, Tensor]) -> Tensor | None:
    """What the linear would weigh its rows with, were this the next batch."""
    visits = visits_of(model)[0]
    with visits.visit([given["attention_mask"]], given[INDEX]):
        call = visits.call(0, given["x"])
    assert call is not None
    return call.importance()


def test_nothing_is_claimed_where_nothing_is_known() -> None:
    model = patched()
    assert importance(model, batch([1, 2])) is None
    remember_gradients(model, SAMPLES, LENGTH)
    assert importance(model, batch([1, 2])) is None
    step(model, batch([3]))
    assert importance(model, batch([1, 2])) is None
    assert importance(model, batch([1, 3])) is not None


def test_a_linear_that_got_no_gradient_claims_nothing() -> None:
    memory, rows = GradientMemory(4, 3, linears=2), torch.tensor([1, 3])
    first = memory.begin(rows)
    assert first is not None
    places = first.places(2, 3, None, rows.device)
    first.record(1, places, torch.arange(1.0, 7.0))
    memory.flush()
    second = memory.begin(rows)
    assert second is not None
    assert second.recall(0, places) is None
    known = second.recall(1, places)
    assert known is not None
    assert known.tolist() == [1, 2, 3, 4, 5, 6]


def test_rows_never_visited_count_as_the_mean_of_the_known() -> None:
    model = patched()
    remember_gradients(model, SAMPLES, LENGTH)
    step(model, batch([1], length=6))
    known = sizes()[1, :6]
    weights = importance(model, batch([1, 2]))
    assert weights is not None
    expected = torch.full((2, LENGTH), known.mean())
    expected[0, :6] = known.clamp(min=0.05 * known.mean())
    assert torch.allclose(weights.view(2, LENGTH), expected, rtol=4 * ROUNDING, atol=0)


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_a_gradient_of_zero_keeps_no_row_out(scale: float) -> None:
    model = patched()
    remember_gradients(model, SAMPLES, LENGTH)
    given = batch([1, 2])
    given["size"] = given["size"] * scale
    given["size"][0, 3:] = 0
    step(model, given)
    weights = importance(model, given)
    assert weights is not None
    mean = given["size"].mean()
    assert torch.allclose(weights.view(2, LENGTH)[0, 3:], 0.05 * mean, rtol=4 * ROUNDING, atol=0)
    given["size"] *= 0
    step(model, given)
    weights = importance(model, given)
    assert weights is not None
    assert torch.equal(weights, weights[0].expand_as(weights))
    assert weights[0] > 0


def test_padding_that_is_left_out_stays_out() -> None:
    model = patched()
    remember_gradients(model, SAMPLES, LENGTH)
    given = batch([1, 2], length=5, pad=3)
    weights = []
    for _ in range(3):
        weights.append(importance(model, given))
        step(model, given)
    assert weights[0] is None
    assert weights[1] is not None
    assert bool((weights[1] > 0).all())
    assert weights[2] is not None
    assert torch.equal(weights[2] > 0, given["attention_mask"].flatten() > 0)


def test_concentrated_gradients_are_estimated_far_better_from_the_second_visit_on() -> None:
    """Against the errors that theory gives for scores |x| and |x| |dY|."""
    given, steps = batch(list(range(SAMPLES))), 300
    x, dy = given["x"].flatten(0, 1), given["size"].flatten()[:, None].expand(-1, OUT) / OUT**0.5
    exact, k = dy.T @ x, 15  # 30 % of 48
    remembered = given["size"].flatten().clamp(min=0.05 * given["size"].mean())
    squares = []
    for index, scores in ((False, x.norm(dim=1)), (True, x.norm(dim=1) * remembered)):
        model = patched(0.3)
        remember_gradients(model, SAMPLES, LENGTH)
        step(model, given)
        run = given if index else {name: value for name, value in given.items() if name != INDEX}
        errors = torch.stack([(step(model, run) - exact).norm() / exact.norm() for _ in range(steps)]).square()
        expected = expected_error(x, dy, scores, k, "systematic") ** 2
        assert abs(errors.mean() - expected) < 4 * errors.std() / steps**0.5 + 2 * ROUNDING * expected
        squares.append(errors.mean())
    assert squares[1] < 0.2**2 * squares[0]


def test_gradients_stay_right_on_average_with_a_stale_memory() -> None:
    model, given = patched(0.3), batch([0, 1, 2])
    memory = remember_gradients(model, SAMPLES, LENGTH)
    stale = given | {"size": given["size"].flip(1)}
    gradients = []
    for _ in range(300):
        step(model, stale)
        gradients.append(step(model, given))
    exact = (given["size"].flatten()[:, None].expand(-1, OUT) / OUT**0.5).T @ given["x"].flatten(0, 1)
    stacked = torch.stack(gradients)
    assert (stacked.mean(0) - exact).norm() < 4 * stacked.std(0).norm() / len(gradients) ** 0.5
    memory.forget()
    step(model, given)


# --- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_remembered_is_refused_in_words() -> None:
    from tests.factories import tiny_model  # transformers is slow to import, and the processes below import this file

    model = patched()
    with pytest.raises(InputsError, match=r"does not number its samples.*IndexedDataset"):
        remember_gradients(model, Numbers(), 8)  # type: ignore[arg-type]
    for samples, tokens in ((0, 8), (8, 0)):
        with pytest.raises(InputsError, match="at least one sample and one token"):
            remember_gradients(model, samples, tokens)
    for other in (tiny_model("bert"), memopt.patch(tiny_model("bert"))):
        with pytest.raises(ModelError, match="No linear of the model is sampled"):
            remember_gradients(other, 8, 8)
    with pytest.raises(ModelError, match="each of them"):
        remember_gradients(nn.ModuleList([patched(), patched()]), 8, 8)


def test_a_new_memory_takes_the_place_of_the_old_one() -> None:
    model = patched()
    old = remember_gradients(model, SAMPLES, LENGTH)
    new = remember_gradients(nn.ModuleList([model]), SAMPLES, LENGTH)
    step(model, batch([1]))
    assert not old.is_kept
    assert table(new)[1].all()


# --- processes -------------------------------------------------------------------------------------------------------


def _one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = patched()
    memory = remember_gradients(model, SAMPLES, LENGTH)
    parallel = nn.parallel.DistributedDataParallel(model)
    errors = []
    for _ in range(3):
        model.zero_grad()
        parallel(**batch([3 * rank, 3 * rank + 1, 3 * rank + 2])).backward()
        errors.append(model.block.linear.weight.grad.clone())
    torch.save((table(memory), torch.stack(errors)), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_under_ddp_each_process_remembers_what_it_saw(tmp_path: Any) -> None:
    run_ranks(_one_rank, str(tmp_path))
    tables, gradients = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(2)), strict=True)
    assert torch.equal(gradients[0], gradients[1])
    for rank in range(2):
        own = slice(3 * rank, 3 * rank + 3)
        # DDP's mean over the processes is taken of the weights' gradients, behind what is remembered.
        assert torch.allclose(tables[rank][own], sizes()[own], rtol=2 * ROUNDING, atol=0)
        assert int(tables[rank].count_nonzero()) == 3 * LENGTH
