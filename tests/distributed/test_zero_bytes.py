"""What ZeRO holds between two steps and in the optimizer's, by its tensors, against what `memopt report` predicts."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch

from memopt.prediction import sharding
from memopt.prediction.setup import Setup, Sharding
from memopt.trace.events import Parameter, Trace
from memopt.trace.training import Training
from tests.distributed.engines import Case, batch, zero_config
from tests.distributed.pair import RANKS, Pair

#: Adam's states are no part of a share, and are fp32.
STATES = 2 * 4
PLAIN = (torch.Tensor, torch.nn.Parameter)


def tensors() -> list[torch.Tensor]:
    return [each for each in gc.get_objects() if type(each) in PLAIN]


def held(before: set[int]) -> int:
    gc.collect()  # the graph of a step may be in circles, which the collector frees at any time
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors()}
    return sum(nbytes for address, nbytes in found.items() if address not in before)


def compared(rank: int, stage: int, precision: Any) -> tuple[float, float]:
    """Measured over predicted bytes: at rest, and where the optimizer steps."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    alive = tensors()  # which keeps their addresses taken
    before = {each.untyped_storage().data_ptr() for each in alive}
    kind: Any = f"zero{stage}"
    case = Case(kind, precision=precision, adam=True)
    model = case.model().train()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    parameters = tuple(
        Parameter(n, tuple(p.shape), dtype, dtype.itemsize * p.numel(), True) for n, p in model.named_parameters()
    )
    optimizer = case.optimizer(list(model.parameters()))
    in_step: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: in_step.append(held(before)))
    config = zero_config(case)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for number in range(2):
        engine.backward(engine(**batch(case, rank, number)).loss)
        engine.step()
    rest = held(before)
    engine.destroy()
    way: Sharding = kind
    zero = config["zero_optimization"]
    trace = Trace(Training(1, 1), parameters, 0, (), ())
    with mock.patch.multiple(sharding, _REDUCED=zero["reduce_bucket_size"], _PERSISTENT=0, _LIVE=0, _PREFETCHED=0):
        share = sharding.shard(trace, Setup(sharding=way, devices=RANKS))
    part = share.forms[0][0][0]
    predicted = sum(each.nbytes for each in share.resident) + STATES * part
    if stage < 3:  # the bucket lives in backward alone
        predicted -= zero["reduce_bucket_size"] * dtype.itemsize
    else:  # the part of the gradients lives throughout
        predicted += part * dtype.itemsize
    return rest / predicted, in_step[-1] / (predicted + sum(each.nbytes for each in share.copies))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.rotates(3)
def test_weights_states_and_buckets_are_those_of_the_formulas(pair: Pair, stage: int, precision: str) -> None:
    for rest, step in pair.call(compared, stage, precision):
        # The model's buffers and the batches are a hundredth of these weights.
        assert rest == pytest.approx(1, abs=0.02)
        assert step == pytest.approx(1, abs=0.02)
