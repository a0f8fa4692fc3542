"""From a plan to operations on the tensors of the files."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from memopt.checkpoint.fold import Fill, FoldPlan, Scale, ScalePart, Shift, map_names
from memopt.checkpoint.sources.header import TensorInfo
from memopt.walk.sites import Consumer
from tests.checkpoint.builders import HIDDEN, plan_of, rms_norm, rms_plan, rms_tensors

Q, UP = "model.layers.0.q.weight", "model.layers.0.up.weight"


def infos(**changes: TensorInfo | None) -> dict[str, TensorInfo]:
    """Headers of `rms_tensors`, with some replaced or (None) removed."""
    found = {name: info(name, *tensor.shape) for name, tensor in rms_tensors().items()}
    return {name: value for name, value in (found | changes).items() if value is not None}


def info(name: str, *shape: int, dtype: str = "BF16") -> TensorInfo:
    return TensorInfo(name, "model.safetensors", dtype, shape, 0, 0)


def reason(folds: FoldPlan, norm: str = "model.layers.0.norm") -> str:
    return dict(folds.refused)[norm]


def test_a_fold_scales_every_consumer_and_makes_the_norm_the_identity() -> None:
    operations = FoldPlan.from_plan(rms_plan(1), infos()).operations()
    part = ScalePart("model.layers.0.norm.weight", 0, None)
    assert operations == {"model.layers.0.norm.weight": Fill(1.0), Q: Scale(1, (part,)), UP: Scale(1, (part,))}


def test_the_one_plus_weight_family_becomes_zero() -> None:
    folds = FoldPlan.from_plan(plan_of([rms_norm(0, offset=1)]), infos())
    assert folds.operations()["model.layers.0.norm.weight"] == Fill(0.0)


def test_a_norm_bias_goes_into_every_consumers_bias_and_becomes_zero() -> None:
    own = "model.layers.0.norm.bias"
    consumer = Consumer(Q, "q", axis=1, bias="model.layers.0.q.bias", scale=0.5)
    tensors = infos(**{own: info(own, HIDDEN), "model.layers.0.q.bias": info("model.layers.0.q.bias", HIDDEN)})
    folds = FoldPlan.from_plan(plan_of([rms_norm(0, bias=own, consumers=(consumer,))]), tensors)
    operations = folds.operations()
    assert operations[own] == Fill(0.0)
    shift = operations["model.layers.0.q.bias"]
    assert isinstance(shift, Shift)
    assert [(part.weight, part.beta, part.scale) for part in shift.parts] == [(Q, own, 0.5)]


def test_a_norm_without_bias_leaves_the_consumers_biases_alone() -> None:
    consumer = Consumer(Q, "q", axis=1, bias="model.layers.0.q.bias")
    tensors = infos(**{"model.layers.0.q.bias": info("model.layers.0.q.bias", HIDDEN)})
    folds = FoldPlan.from_plan(plan_of([rms_norm(0, consumers=(consumer,))]), tensors)
    assert "model.layers.0.q.bias" not in folds.operations()


def test_a_norm_that_the_plan_shares_is_not_folded() -> None:
    plan = plan_of([rms_norm(0)], "norms.fold=none")
    assert FoldPlan.from_plan(plan, infos()) == FoldPlan()


def test_one_missing_consumer_leaves_the_whole_norm_unfolded() -> None:
    folds = FoldPlan.from_plan(rms_plan(2), infos(**{UP: None}))
    assert [fold.norm for fold in folds.folds] == ["model.layers.1.norm"]
    assert UP in reason(folds)


@pytest.mark.parametrize("dtype", ["I8", "U8", "F8_E4M3", "F4", "I32"])
@pytest.mark.parametrize("name", [Q, "model.layers.0.norm.weight"])
def test_quantised_tensors_are_not_folded(name: str, dtype: str) -> None:
    shape = (HIDDEN,) if "norm" in name else (HIDDEN, HIDDEN)
    folds = FoldPlan.from_plan(rms_plan(1), infos(**{name: info(name, *shape, dtype=dtype)}))
    assert not folds.folds
    assert dtype in reason(folds)


@pytest.mark.parametrize(("name", "shape"), [(Q, (HIDDEN, 7)), (Q, (HIDDEN,)), ("model.layers.0.norm.weight", (7,))])
def test_another_shape_on_disk_is_not_folded(name: str, shape: tuple[int, ...]) -> None:
    folds = FoldPlan.from_plan(rms_plan(1), infos(**{name: info(name, *shape)}))
    assert "another shape" in reason(folds)


def test_a_tensor_that_shares_its_memory_is_not_folded() -> None:
    folds = FoldPlan.from_plan(rms_plan(1), infos(), {Q: ("model.embed.weight",)})
    assert "one tensor with model.embed.weight" in reason(folds)


def test_a_key_that_needs_no_bias_takes_the_scale_alone() -> None:
    beta = "model.layers.0.norm.bias"
    consumer = Consumer(Q, "q", axis=1, needs_bias=False)
    norm = rms_norm(0, bias=beta, consumers=(consumer,))
    folds = FoldPlan.from_plan(plan_of([norm]), infos(**{beta: info(beta, HIDDEN)}))
    assert set(folds.operations()) == {"model.layers.0.norm.weight", beta, Q}


@pytest.mark.parametrize("change", [{"bias": None}, {"accepts_bias": False}])
def test_a_norm_bias_without_a_place_to_go_is_not_folded(change: dict[str, object]) -> None:
    own, other = "model.layers.0.norm.bias", "model.layers.0.q.bias"
    consumer = dataclasses.replace(Consumer(Q, "q", axis=1, bias=other), **change)  # type: ignore[arg-type]
    tensors = infos(**{own: info(own, HIDDEN), other: info(other, HIDDEN)})
    folds = FoldPlan.from_plan(plan_of([rms_norm(0, bias=own, consumers=(consumer,))]), tensors)
    assert "cannot take the norm's bias" in reason(folds)


def test_two_norms_with_one_weight_are_not_folded() -> None:
    norms = [rms_norm(0), rms_norm(1, weight="model.layers.0.norm.weight")]
    folds = FoldPlan.from_plan(plan_of(norms), infos())
    assert not folds.folds
    assert len(folds.refused) == 2


def test_two_norms_may_fold_into_different_columns_of_one_weight() -> None:
    name = "model.both.weight"
    low = tuple(range(HIDDEN)) + (-1,) * HIDDEN
    norms = [
        rms_norm(0, consumers=(Consumer(name, "both", axis=1, channels=low),)),
        rms_norm(1, consumers=(Consumer(name, "both", axis=1, channels=low[::-1]),)),
    ]
    folds = FoldPlan.from_plan(plan_of(norms), infos(**{name: info(name, 5, 2 * HIDDEN)}))
    operation = folds.operations()[name]
    assert isinstance(operation, Scale)
    assert [part.gamma for part in operation.parts] == ["model.layers.0.norm.weight", "model.layers.1.norm.weight"]


def test_two_norms_on_the_same_columns_are_both_refused() -> None:
    consumer = (Consumer(Q, "q", axis=1),)
    folds = FoldPlan.from_plan(plan_of([rms_norm(0, consumers=consumer), rms_norm(1, consumers=consumer)]), infos())
    assert not folds.folds
    assert len(folds.refused) == 2


def test_a_weight_that_is_read_twice_in_the_same_way_is_scaled_once() -> None:
    consumer = Consumer(Q, "q", axis=1)
    folds = FoldPlan.from_plan(plan_of([rms_norm(0, consumers=(consumer, consumer))]), infos())
    operation = folds.operations()[Q]
    assert isinstance(operation, Scale)
    assert len(operation.parts) == 1


def test_a_weight_that_is_read_along_two_axes_is_refused() -> None:
    consumers = (Consumer(Q, "q", axis=1), Consumer(Q, "q", axis=0))
    assert not FoldPlan.from_plan(plan_of([rms_norm(0, consumers=consumers)]), infos()).folds


def test_a_norm_that_feeds_another_norms_weight_is_refused() -> None:
    weight = "model.layers.1.norm.weight"
    norms = [rms_norm(0, consumers=(Consumer(weight, "x", axis=0),)), rms_norm(1)]
    assert not FoldPlan.from_plan(plan_of(norms), infos()).folds


def test_refusing_one_fold_refuses_those_that_share_a_tensor_and_no_others() -> None:
    name = "model.both.weight"
    low = tuple(range(HIDDEN)) + (-1,) * HIDDEN
    norms = [
        rms_norm(0, consumers=(Consumer(name, "both", axis=1, channels=low),)),
        rms_norm(1, consumers=(Consumer(name, "both", axis=1, channels=low[::-1]),)),
        rms_norm(2),
    ]
    extra = {f"model.layers.2.{part}": info(f"model.layers.2.{part}", *shape) for part, shape in {
        "norm.weight": (HIDDEN,), "q.weight": (HIDDEN, HIDDEN), "up.weight": (3 * HIDDEN, HIDDEN)}.items()}  # fmt: skip
    folds = FoldPlan.from_plan(plan_of(norms), infos(**{name: info(name, 5, 2 * HIDDEN)}, **extra))
    left = folds.without({"model.layers.0.norm": "it overflows"})
    assert [fold.norm for fold in left.folds] == ["model.layers.2.norm"]
    assert reason(left) == "it overflows"
    assert name in reason(left, "model.layers.1.norm")


def test_a_refused_fold_is_shared_in_the_revised_plan_with_its_reason() -> None:
    plan = rms_plan(2)
    folds = FoldPlan.from_plan(plan, infos(**{UP: None}))
    entries = {entry.site: entry for entry in plan.without_folds(dict(folds.refused)).entries if entry.kind == "norm"}
    assert entries["model.layers.0.norm"].action == "share"
    assert UP in entries["model.layers.0.norm"].reason
    assert entries["model.layers.1.norm"].action == "fold"


def test_names_are_mapped_with_the_base_models_prefix_added_or_removed() -> None:
    names = {"model.a", "model.b", "head.w"}
    assert map_names(names, {"model.a", "model.b", "head.w"}) == {n: n for n in names}
    assert map_names(names, {"a", "b", "head.w"}) == {"model.a": "a", "model.b": "b", "head.w": "head.w"}
    assert map_names({"a", "b"}, {"model.a", "model.b"}) == {"a": "model.a", "b": "model.b"}


def test_a_prefix_that_the_files_have_is_not_removed() -> None:
    assert map_names({"encoder.norm.w"}, {"norm.w", "encoder.other.w"}) == {}


def test_a_prefix_that_the_model_has_is_not_added() -> None:
    assert map_names({"norm.w", "encoder.other.w"}, {"encoder.norm.w", "encoder.other.w"}) == {
        "encoder.other.w": "encoder.other.w"
    }


def test_checkpoint_without_the_base_prefix_is_folded() -> None:
    tensors = {name.removeprefix("model."): value for name, value in infos().items()}
    tensors = {name: dataclasses.replace(value, name=name) for name, value in tensors.items()}
    folds = FoldPlan.from_plan(rms_plan(1), tensors)
    assert folds.folds[0].touched == {"layers.0.norm.weight", "layers.0.q.weight", "layers.0.up.weight"}
    assert folds.folds[0].norm == "model.layers.0.norm"


def test_every_tensor_dtype_that_is_folded_is_a_torch_float() -> None:
    from memopt.checkpoint.sources.header import FLOAT_DTYPES, torch_dtype

    assert all(torch.finfo(torch_dtype(name)).bits >= 16 for name in FLOAT_DTYPES)
