"""Samplers of rows: right on average, as good as their formulas, exact where they can be, and that a fault shows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.kernels.sampled_linear import sampling as room
from memopt.kernels.sampled_linear.sampling import METHODS, Method, expected_error, rows_kept, sample_rows
from tests.support.sampling_cases import KEPT, LIMIT, Case, Sampler, cases, draw, outcome, scored

CASES = cases()
DRAWS = 400
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
every_method = pytest.mark.parametrize("method", METHODS)
every_case = pytest.mark.parametrize("name", CASES)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def heavy_scores(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=seeded(seed)).mul(2).exp()


def is_unbiased(case: Case, method: Method, sampler: Sampler = sample_rows, draws: int = DRAWS) -> bool:
    return outcome(case, method, draw(case, method, draws, seeded(1), sampler=sampler)).unbiased


@pytest.mark.parametrize(
    ("rows", "budget", "k"),
    [
        (10, 0.3, 3), (10, 0.1 + 0.2, 3), (100, 0.07, 7), (3, 0.1, 1), (256, 0.3, 77), (11, 0.3, 4), (1, 0.01, 1),
        (10, 1.0, 10), (0, 0.3, 0), (2**24, 0.3, 5033165), (1000, 1e-6, 1), (7, 0.999999, 7), (7, 1 / 7, 1),
    ],
)  # fmt: skip
def test_rows_kept_is_the_budget_rounded_up(rows: int, budget: float, k: int) -> None:
    assert rows_kept(rows, budget) == k


@pytest.mark.parametrize(("rows", "budget"), [(5, 0.0), (5, -0.1), (5, 1.01), (5, math.nan), (-1, 0.5)])
def test_rows_kept_refuses_what_is_no_budget(rows: int, budget: float) -> None:
    with pytest.raises(ValueError, match="budget must be"):
        rows_kept(rows, budget)


@every_case
@every_method
@pytest.mark.rotates(3)
def test_the_mean_of_many_draws_is_the_gradient(method: Method, name: str) -> None:
    assert is_unbiased(CASES[name], method)


def with_weights(change: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> Sampler:
    """The sampler, with its weights made wrong from (scores, rows, weights, k)."""

    def faulty(scores: Tensor, k: int, method: Method, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows, weights = sample_rows(scores, k, method, generator)
        return rows, change(scores, rows, weights, k)

    return faulty


def scale_dropped(scores: Tensor, rows: Tensor, weights: Tensor, k: int) -> Tensor:
    return torch.ones_like(weights)


def epsilon_inside(scores: Tensor, rows: Tensor, weights: Tensor, k: int) -> Tensor:
    return weights * (scores / (scores + 1e-8))[rows]


def duplicates_once(scores: Tensor, rows: Tensor, weights: Tensor, k: int) -> Tensor:
    is_first = (rows[:, None] == rows[None, :]).int().argmax(1) == torch.arange(k)
    return weights * is_first


def without_replacement_as_with(
    scores: Tensor, k: int, method: Method, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    p = (scores / scores.sum()).double()
    rows = p.multinomial(k, replacement=False, generator=generator)
    return rows, 1 / (k * p[rows])


def unscaled_top_k(scores: Tensor, k: int, method: Method, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return scores.topk(k).indices, torch.ones(k)


FAULTS: list[tuple[str, Sampler, Method, str]] = [
    *(("scale dropped", with_weights(scale_dropped), method, name)
      for method in METHODS for name in ("heavy-tailed", "flat", "empty cache", "1e-9-scaled", "part-zero")),
    *(("epsilon inside p", with_weights(epsilon_inside), method, "1e-9-scaled")
      for method in METHODS if method != "uniform"),
    *(("duplicates once", with_weights(duplicates_once), method, name)
      for method in ("crs", "wta-crs") for name in ("flat", "empty cache")),
    ("duplicates once", with_weights(duplicates_once), "crs", "heavy-tailed"),
    *(("replacement", without_replacement_as_with, "crs", name) for name in ("heavy-tailed", "part-zero")),
    *(("unscaled top-k", unscaled_top_k, "crs", name) for name in ("heavy-tailed", "flat", "empty cache")),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "sampler", "method", "name"), FAULTS, ids=lambda value: str(value)[:16])
@pytest.mark.rotates(3)
def test_a_faulty_sampler_fails_the_same_assertion(fault: str, sampler: Sampler, method: Method, name: str) -> None:
    # One row in seven is drawn twice where all are alike: little enough to need more draws.
    assert not is_unbiased(CASES[name], method, sampler, draws=4000 if fault == "duplicates once" else 1000)


@every_method
def test_an_epsilon_inside_the_probability_shows_at_small_scores_only(method: Method) -> None:
    assert is_unbiased(CASES["heavy-tailed"], method, with_weights(epsilon_inside))


@pytest.mark.parametrize("name", ["heavy-tailed", "flat", "empty cache", "part-zero"])
@every_method
def test_the_measured_error_is_the_expected_one(method: Method, name: str) -> None:
    result = outcome(CASES[name], method, draw(CASES[name], method, DRAWS, seeded(2)))
    assert abs(result.ratio - 1) < LIMIT * result.spread


@every_case
def test_winners_take_all_is_no_worse_than_crs_and_equal_where_scores_are(name: str) -> None:
    case = CASES[name]
    wta, crs = (expected_error(case.x, case.dy, case.scores, KEPT, method) for method in ("wta-crs", "crs"))
    assert wta <= crs
    if name == "flat":
        assert wta == pytest.approx(crs, rel=1e-12)
        first, second = (sample_rows(case.scores, KEPT, method, seeded(0)) for method in ("wta-crs", "crs"))
        assert all(map(torch.equal, first, second))


def best_number_of_winners(scores: Tensor, k: int) -> int:
    ordered = scores.double().sort(descending=True).values
    return min(range(k), key=lambda c: float(ordered[c:].sum()) / (k - c))


def number_drawn_for_sure(scores: Tensor, k: int) -> int:
    """Takes out rows whose probability would be above 1 until there are none."""
    left, certain = scores.double(), 0
    while len(over := left[left * (k - certain) >= left.sum()]):
        left, certain = left[left * (k - certain) < left.sum()], certain + len(over)
    return certain


@pytest.mark.parametrize(("n", "k"), [(50, 10), (50, 49), (300, 90), (1000, 10)])
@pytest.mark.parametrize("seed", range(3))
def test_the_certain_rows_are_the_largest_and_as_many_as_a_search_finds(n: int, k: int, seed: int) -> None:
    scores = heavy_scores(n, seed)
    for method, certain in (
        ("wta-crs", best_number_of_winners(scores, k)),
        ("systematic", number_drawn_for_sure(scores, k)),
        ("crs", 0),
    ):
        rows, weights = sample_rows(scores, k, method, seeded(seed))
        largest = scores.argsort(descending=True)[:certain]
        assert rows[:certain].tolist() == largest.tolist()
        assert (weights[:certain] == 1).all()
        rest = scores.double().sum() - scores[largest].double().sum()
        expected = rest / ((k - certain) * scores.double()[rows[certain:]])
        torch.testing.assert_close(weights[certain:].double(), expected, rtol=1e-6, atol=0)
        assert not set(rows[:certain].tolist()) & set(rows[certain:].tolist())


@pytest.mark.parametrize(("n", "k"), [(5, 4), (100, 30), (100, 99), (4096, 1229), (4096, 4095)])
@pytest.mark.parametrize("kind", ["heavy", "flat", "nearly flat", "two levels"])
def test_systematic_and_uniform_draw_no_row_twice(kind: str, n: int, k: int) -> None:
    scores = {
        "heavy": heavy_scores(n),
        "flat": torch.ones(n),
        "nearly flat": 1 + torch.rand(n, generator=seeded(0), dtype=torch.float64) * 1e-9,
        "two levels": torch.where(torch.arange(n) % 3 == 0, 1.0, 3.0),
    }[kind]
    for seed in range(20):
        for method in ("systematic", "uniform"):
            rows, _ = sample_rows(scores, k, method, seeded(seed))
            assert len(rows.unique()) == k


@every_method
@pytest.mark.parametrize("count", [0, 1, 5, KEPT - 1, KEPT])
def test_rows_that_all_fit_are_taken_as_they_are(count: int, method: Method) -> None:
    scores = torch.zeros(256)
    counted = torch.randperm(256, generator=seeded(count))[:count]
    scores[counted] = heavy_scores(count)
    rows, weights = sample_rows(scores, KEPT, method, seeded(0))
    assert sorted(rows[weights > 0].tolist()) == sorted(counted.tolist())
    assert set(weights.tolist()) <= {0.0, 1.0}
    assert ((rows >= 0) & (rows < 256)).all()


@every_method
@pytest.mark.parametrize(("n", "k"), [(4, 4), (4, 7), (1, 1), (1, 3), (0, 0), (4, 0)])
def test_as_many_slots_as_rows_or_more_are_legal_and_so_are_none(n: int, k: int, method: Method) -> None:
    scores = torch.arange(float(n))  # row 0 has no score
    rows, weights = sample_rows(scores, k, method, seeded(0))
    assert rows.shape == weights.shape == (k,)
    assert (rows.dtype, weights.dtype) == (torch.int32, torch.float32)
    if k:
        total = torch.zeros(n).index_add_(0, rows, weights)
        assert total.tolist() == (scores > 0).float().tolist()


@every_method
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("k", [1, 30, 100, 120])
def test_what_is_no_score_makes_every_weight_nan_and_no_index_wrong(k: int, wrong: float, method: Method) -> None:
    for place in (0, 57, 99):
        scores = heavy_scores(100)
        scores[place] = wrong
        rows, weights = sample_rows(scores, k, method, seeded(0))
        assert weights.isnan().all()
        assert ((rows >= 0) & (rows < 100)).all()
    assert sample_rows(torch.full((100,), wrong), k, method)[1].isnan().all()


@every_method
def test_a_row_without_a_score_never_has_a_weight(method: Method) -> None:
    for seed in range(200):
        scores = heavy_scores(60, seed) * (torch.rand(60, generator=seeded(seed)) < 0.7)
        rows, weights = sample_rows(scores, 20, method, seeded(seed))
        assert (scores[rows][weights > 0] > 0).all()
        assert (weights[scores[rows] > 0] > 0).all()


@pytest.mark.parametrize("method", ["crs", "wta-crs", "systematic"])
@pytest.mark.parametrize("n", [100, 5000, 2**18])
def test_weighted_scores_add_up_to_their_sum_in_every_draw(n: int, method: Method) -> None:
    scores = heavy_scores(n)
    rows, weights = sample_rows(scores, n // 3, method, seeded(0))
    total = (weights.double() * scores.double()[rows]).sum() / scores.double().sum()
    # Weights are rounded to fp32, and scores to n / 2**48 of the largest.
    assert float(total) == pytest.approx(1, abs=2**-24 + n * n / 2**48)


@every_method
def test_scores_of_every_scale_give_finite_weights_and_a_mean_that_is_right(method: Method) -> None:
    case = CASES["heavy-tailed"]
    scores = torch.logspace(-30, 0, 256)[torch.randperm(256, generator=seeded(0))]
    size = scores[:, None].double() / (case.x.norm(dim=1) * case.dy.norm(dim=1))[:, None]
    wide = scored("wide", case.x, case.dy * size)
    assert is_unbiased(wide, method)
    assert sample_rows(wide.scores, KEPT, method, seeded(0))[1].isfinite().all()


@pytest.mark.parametrize(("method", "weight"), [("wta-crs", 19 / 2), ("systematic", 19 / 2), ("uniform", 20 / 3)])
def test_a_score_that_is_tiny_beside_another_still_counts(method: Method, weight: float) -> None:
    scores = torch.full((20,), 1e-25)
    scores[7] = 1.0
    rows, weights = sample_rows(scores, 3, method, seeded(0))
    torch.testing.assert_close(weights[rows != 7], torch.full(((rows != 7).sum(),), weight))
    assert len(weights[weights == weight]) >= 2


def test_a_point_between_two_rows_is_the_next_row_that_has_a_score() -> None:
    scores = torch.tensor([0.0, 3.0, 0.0, 2.0, 0.0])
    rows = room._rows_under(torch.tensor([0.0, 2.9, 3.0, 4.9, 5.0]), scores.cumsum(0), scores)
    assert rows.tolist() == [1, 1, 3, 3, 3]


def test_one_slot_at_least_is_left_to_draw_in() -> None:
    for method in ("wta-crs", "systematic", "crs"):
        assert room._split(torch.tensor([8.0, 4.0, 0.0, 0.0, 0.0]), 2, method)[1] < 2


def test_a_row_that_rounding_could_draw_twice_is_certain() -> None:
    others, first = torch.full((100,), float((2**50 - 2**44) // 100), dtype=torch.float64), 2.0**44 - 1
    others[0] += 2**50 - first - others.sum()
    scores = torch.cat((torch.tensor([first], dtype=torch.float64), others))
    assert scores.sum() == 2**50 == scores.max() * 64 + 64
    assert room._split(scores, 64, "systematic")[1] == 1


def test_sums_of_scores_are_exact_in_every_order() -> None:
    w, _ = room._scaled(heavy_scores(5000))
    assert torch.equal(w, w.round())
    assert 2**48 > w.sum() == w.sort().values.sum() == w.flip(0).cumsum(0)[-1]


@every_method
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_of_every_dtype_and_scale_are_taken_as_they_are(dtype: torch.dtype, method: Method) -> None:
    scores = heavy_scores(200).clamp(max=1e3).to(dtype)
    expected = sample_rows(scores.double(), 60, method, seeded(0))
    for other in (scores, scores.double() * 2.0**-100, scores.double() * 2.0**100, scores.clone().requires_grad_()):
        rows, weights = sample_rows(other, 60, method, seeded(0))
        assert torch.equal(rows, expected[0])
        assert torch.equal(weights, expected[1])
        assert not weights.requires_grad


@every_method
def test_the_generator_moves_on_alike_whatever_the_scores_are(method: Method) -> None:
    states = []
    for scores in (heavy_scores(100), torch.ones(100), torch.zeros(100), torch.full((100,), math.nan)):
        generator = seeded(0)
        sample_rows(scores, 30, method, generator)
        states.append(generator.get_state())
    assert all(torch.equal(state, states[0]) for state in states)
    torch.manual_seed(5)
    first = sample_rows(heavy_scores(100), 30, method)
    torch.manual_seed(5)
    assert all(map(torch.equal, first, sample_rows(heavy_scores(100), 30, method)))


def test_uniform_cannot_coincide_with_a_period_of_the_rows() -> None:
    case = CASES["flat"]
    periodic = Case("periodic", case.x, case.dy * (torch.arange(256) % 4 == 0)[:, None], torch.ones(256))
    result = outcome(periodic, "uniform", draw(periodic, "uniform", DRAWS, seeded(0), k=64), k=64)
    assert result.unbiased
    assert abs(result.ratio - 1) < LIMIT * result.spread


class NoLook(TorchDispatchMode):
    """Refuses what would have to wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "index"), name
        return func(*args, **(kwargs or {}))


@every_method
@pytest.mark.parametrize("k", [1, 30, 100, 130])
def test_nothing_looks_at_a_value_while_rows_are_drawn(k: int, method: Method) -> None:
    scores, expected = heavy_scores(100), sample_rows(heavy_scores(100), k, method, seeded(0))
    with NoLook():
        made = sample_rows(scores, k, method, seeded(0))
    assert all(map(torch.equal, made, expected))
    with FakeTensorMode():
        fake = sample_rows(torch.empty(100), k, method)
    for tensors in (fake, sample_rows(scores.to("meta"), k, method)):
        assert [(t.shape, t.dtype) for t in tensors] == [((k,), torch.int32), ((k,), torch.float32)]


@every_method
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.rotates(4)
def test_the_sampler_compiles_into_one_graph(dynamic: bool, method: Method) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda scores: sample_rows(scores, rows_kept(len(scores), 0.3), method),
        backend="aot_eager", fullgraph=True, dynamic=dynamic,
    )  # fmt: skip
    for n in (100, 130):
        torch.manual_seed(0)
        made = compiled(heavy_scores(n))
        torch.manual_seed(0)
        assert all(map(torch.equal, made, sample_rows(heavy_scores(n), rows_kept(n, 0.3), method)))


def small_case(n: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(n, 3, generator=seeded(0), dtype=torch.float64)
    dy = torch.randn(n, 2, generator=seeded(1), dtype=torch.float64)
    return x, dy, heavy_scores(n, 2)


def test_the_error_of_uniform_is_the_mean_over_all_subsets() -> None:
    x, dy, scores = small_case(7)
    truth, errors = dy.t() @ x, []
    for rows in itertools.combinations(range(7), 3):
        errors.append((7 / 3 * dy[list(rows)].t() @ x[list(rows)] - truth).square().sum())
    expected = float((torch.stack(errors).mean() / truth.square().sum()).sqrt())
    assert expected_error(x, dy, scores, 3, "uniform") == pytest.approx(expected, rel=1e-9)


def test_the_error_of_crs_is_the_mean_over_all_draws() -> None:
    x, dy, scores = small_case(5)
    truth, p, mean = dy.t() @ x, scores.double() / scores.double().sum(), 0.0
    for rows in itertools.product(range(5), repeat=3):
        index = list(rows)
        estimate = (dy[index] / (3 * p[index])[:, None]).t() @ x[index]
        mean += float(p[index].prod() * (estimate - truth).square().sum())
    expected = math.sqrt(mean / float(truth.square().sum()))
    assert expected_error(x, dy, scores, 3, "crs") == pytest.approx(expected, rel=1e-9)


def test_offsets_that_are_few_give_the_error_of_systematic_sampling_to_a_few_percent(monkeypatch) -> None:
    x = torch.randn(2000, 12, generator=seeded(0), dtype=torch.float64)
    dy = torch.randn(2000, 10, generator=seeded(1), dtype=torch.float64) * heavy_scores(2000)[:, None].sqrt()
    scores = x.norm(dim=1) * dy.norm(dim=1)
    sampled = expected_error(x, dy, scores, 600, "systematic")
    monkeypatch.setattr(room, "_OFFSETS", 10**6)
    assert sampled == pytest.approx(expected_error(x, dy, scores, 600, "systematic"), rel=0.03)


@every_method
def test_parts_of_the_rows_give_the_error_of_all_at_once(monkeypatch, method: Method) -> None:
    case = CASES["part-zero"]
    whole = expected_error(case.x, case.dy, case.scores, KEPT, method)
    monkeypatch.setattr(room, "_ROWS", 50)
    assert expected_error(case.x, case.dy, case.scores, KEPT, method) == pytest.approx(whole, rel=1e-9)
    in_bf16 = expected_error(case.x.bfloat16(), case.dy.bfloat16(), case.scores, KEPT, method)
    assert in_bf16 == pytest.approx(whole, rel=0.02)


@every_method
def test_the_expected_error_is_0_where_nothing_is_drawn_and_nan_where_scores_are_not_sound(method: Method) -> None:
    x, dy, scores = small_case(20)
    assert expected_error(x, dy, scores, 20, method) == 0
    assert expected_error(x, torch.zeros_like(dy), scores, 5, method) == 0
    assert math.isnan(expected_error(x, dy, scores.log(), 5, method))


@every_method
def test_rows_that_can_never_be_drawn_count_as_error(method: Method) -> None:
    case = CASES["heavy-tailed"]
    blind = Case("blind", case.x, case.dy, case.scores * (torch.arange(256) % 3 > 0))
    result = outcome(blind, method, draw(blind, method, DRAWS, seeded(0)))
    assert abs(result.ratio - 1) < LIMIT * result.spread
    assert not result.unbiased
    missing = case.dy[::3].t() @ case.x[::3]
    alone = expected_error(case.x, case.dy, blind.scores, 256, method)
    assert alone == pytest.approx(float(missing.norm() / (case.dy.t() @ case.x).norm()), rel=1e-9)


@pytest.mark.parametrize(
    ("scores", "k", "method"),
    [
        (torch.ones(4, 1), 2, "crs"),
        (torch.ones(4, dtype=torch.int64), 2, "crs"),
        (torch.ones(4), 2, "top-k"),
        (torch.ones(4), -1, "crs"),
        (torch.ones(0), 1, "crs"),
    ],
)
def test_other_arguments_are_refused(scores: Tensor, k: int, method: Method) -> None:
    with pytest.raises(ValueError, match=r"must be|cannot be drawn"):
        sample_rows(scores, k, method)
    with pytest.raises(ValueError, match="must"):
        expected_error(torch.ones(3, 2), torch.ones(4, 2), torch.ones(4), 2, "crs")
