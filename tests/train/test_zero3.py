"""`memopt.TrainerCallback` where DeepSpeed's ZeRO-3 partitions the model while it is loaded."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import transformers

import memopt
from memopt.errors import ModelError
from tests.factories import tiny_model
from tests.integrations.test_trainer import QUIET, losses, samples
from tests.support.ranks import run_ranks

ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def trainer(folder: Path, *callbacks: Any, wrap: Any = None) -> Any:
    # First the arguments: from then on models are partitioned when they are loaded.
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        **QUIET,
        max_steps=2,
        per_device_train_batch_size=1,
        optim="sgd",
        deepspeed=dict(ZERO3),
    )

    def build() -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert {tuple(parameter.shape) for parameter in model.parameters()} == {(0,)}
        return model

    built: dict[str, Any] = {"model": build()} if wrap is None else {"model_init": wrap(build)}
    return transformers.Trainer(args=arguments, train_dataset=samples("llama"), callbacks=list(callbacks), **built)


def train(rank: int, folder: Path, port: int) -> None:
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in launched.items()}, DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", CCL_BACKEND="gloo")
    import deepspeed

    # Shared memory beside gloo is compiled at first use, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    stock = losses(trainer(folder))
    callback = memopt.TrainerCallback()
    run = trainer(folder, callback)
    assert losses(run) == pytest.approx(stock, rel=1e-5)
    whole = memopt.patch(tiny_model("llama"))
    assert memopt.summary(run.model).modules >= memopt.summary(whole).modules
    with pytest.raises(ModelError, match=r"model_init=callback\.model_init"):
        trainer(folder, callback, wrap=lambda build: build).train()
    assert losses(trainer(folder, callback, wrap=callback.model_init)) == pytest.approx(stock, rel=1e-5)


@pytest.mark.rotates(3)
def test_a_model_that_was_partitioned_while_it_was_loaded_trains_as_the_stock_one(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_ranks(train, tmp_path, port)
