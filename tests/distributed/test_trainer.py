"""`memopt.TrainerCallback` in a Trainer of two processes: a run that is resumed goes bitwise where one that was not
interrupted goes, and both go where the stock one goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch import Tensor

import memopt
from memopt.patches.apply import is_patched
from tests.distributed.engines import ROWS, TOKENS, Case, Kind, whole_of, zero_config
from tests.distributed.pair import RANKS, Pair
from tests.factories import tiny_inputs, tiny_model
from tests.integrations.test_trainer import QUIET

STEPS, SAVED = 4, 2


class Sharding(transformers.Trainer):
    """A Trainer under FSDP2, which accelerate 1.15 leaves out on a CPU without a word."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"], state_dict_type="SHARDED_STATE_DICT",
            cpu_ram_efficient_loading=False,
        )  # fmt: skip
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state: Any = self.accelerator.state
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
        self.is_fsdp_enabled = True


def run(kind: Kind, folder: Path, *callbacks: Any, resume: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the steps after the one that is saved, and the weights after all."""
    AcceleratorState._reset_state(reset_partial_state=True)
    settings: dict[str, Any] = {**QUIET, "save_strategy": "steps", "save_steps": SAVED, "max_steps": STEPS}
    if kind == "zero2":
        settings |= {"deepspeed": zero_config(Case(kind)), "max_grad_norm": 0.0}
        # Shared memory beside gloo is compiled at first use, for minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / ("resumed" if resume else "whole")), per_device_train_batch_size=ROWS,
        ddp_backend="gloo", **settings,
    )  # fmt: skip
    data = tiny_inputs("llama", RANKS * ROWS * STEPS, TOKENS)
    rows: Any = [{name: value[row] for name, value in data.items()} for row in range(len(data["input_ids"]))]
    # Masks differ if generators are not where they were.
    model = tiny_model("llama", attention_dropout=0.2, use_cache=False)
    build = Sharding if kind == "fsdp2" else transformers.Trainer
    trainer = build(model=model, args=arguments, train_dataset=rows, callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=str(folder / f"whole/checkpoint-{SAVED}") if resume else None)
    assert is_patched(model) is bool(callbacks)
    wrapper = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPLlamaForCausalLM", "zero2": "DeepSpeedEngine"}[kind]
    assert type(trainer.model_wrapped).__name__ == wrapper
    whole = {n: whole_of(p).detach().clone() for n, p in model.named_parameters()}
    AcceleratorState._reset_state(reset_partial_state=True)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row][SAVED:], whole


def resumed(rank: int, kind: Kind, folder: str) -> None:
    (before, patched), (again, ours) = (
        run(kind, Path(folder), memopt.TrainerCallback(), resume=resume) for resume in (False, True)
    )
    assert len(before) == STEPS - SAVED
    assert again == before
    assert patched.keys() == ours.keys()
    assert all(torch.equal(patched[name], tensor) for name, tensor in ours.items())
    stock, _ = run(kind, Path(folder) / "stock")
    assert before == pytest.approx(stock, rel=1e-5)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero2"])
@pytest.mark.rotates(3)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(pair: Pair, kind: Kind, tmp_path: Path) -> None:
    pair.call(resumed, kind, str(tmp_path))
