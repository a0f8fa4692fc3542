"""The chunked loss where models are trained: Trainer, gradient checkpointing, DDP and FSDP2 with two gloo ranks."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import memopt
from memopt.patches.loss import plain
from memopt.patches.loss.lazy import LazyLogits
from memopt.plan.recipe import load_recipe
from tests.factories import tiny_inputs, tiny_model
from tests.patches.test_loss import LOSS_ONLY
from tests.support.compare import stock_and_patched
from tests.support.ranks import run_ranks

RECIPE = load_recipe("exact-unfolded", LOSS_ONLY)


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of other numbers of labels, so that a mean over the wrong number shows."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 67, (12,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index + 1] = -100
        return {"input_ids": ids, "labels": labels}


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_trainer(name: str, tmp_path: Path) -> None:
    found = []
    for model in stock_and_patched(lambda: tiny_model("llama"), RECIPE):
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, max_steps=3, learning_rate=1e-2, logging_steps=1, optim="sgd",
            report_to=[], save_strategy="no", use_cpu=True, eval_strategy="steps", eval_steps=3, **SETTINGS[name],
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
        trainer.train()
        logs = trainer.state.log_history
        found.append([row[key] for row in logs for key in ("loss", "eval_loss", "grad_norm") if key in row])
    assert len(found[0]) == 7
    assert found[1] == pytest.approx(found[0], rel=2e-3 if name == "bf16" else 1e-5)


def test_generate_is_stock() -> None:
    model, inputs = tiny_model("llama").eval(), {"input_ids": torch.tensor([[5, 6, 7]])}
    stock = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    memopt.patch(model, RECIPE)
    assert torch.equal(model.generate(**inputs, max_new_tokens=5, do_sample=False), stock)


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for n, g in found.items()}


def train(rank: int, folder: str, ways: list[str]) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    runs = {how: [_steps(rank, how, mesh, patched) for patched in (False, True)] for how in ways}
    torch.distributed.destroy_process_group()
    for how, (stock, ours) in runs.items():
        assert stock.keys() == ours.keys(), how
        for name, gradient in stock.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6, msg=f"{how}: {name}")


def _steps(rank: int, how: str, mesh: Any, patched: bool) -> dict[str, torch.Tensor]:
    """Gradients and loss after two steps."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    inputs = dict(tiny_inputs("llama", 2, 16))
    labels = inputs.pop("labels", inputs["input_ids"]).clone()
    labels[:, : 3 + 4 * rank] = -100  # each rank has another number of rows that count
    plain.Plain.is_at_once = "columns" not in how  # type: ignore[method-assign, assignment]
    model: Any = tiny_model("llama", tie_word_embeddings="tied" in how).train()
    if patched:
        memopt.patch(model, RECIPE)
    if "checkpointing" in how:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "fsdp" in how:
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        if "head" in how:
            fully_shard(model.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward="reshard" in how)
    else:
        model = DistributedDataParallel(model, find_unused_parameters="unused" in how)
    smoother = transformers.trainer_pt_utils.LabelSmoother(0.1)
    for _ in range(2):
        model.zero_grad()
        output = model(**inputs) if "outside" in how else model(**inputs, labels=labels)
        loss = smoother(output, labels, shift_labels=True) if "outside" in how else output.loss
        loss.backward()
    # A head that is sharded by itself has its weights for its own call alone, and is stock.
    is_stand_in = isinstance(output.logits, LazyLogits)
    assert is_stand_in is (patched and "head" not in how), how
    # DDP that looks for unused parameters gives its outputs a node of its own, which a loss outside has to go through.
    assert not is_stand_in or (output.logits.value is None) is (how != "ddp unused outside"), how
    return {**_gradients(model), "loss": loss.detach()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "ways",
    [
        ["ddp tied", "ddp unused", "ddp unused outside"],
        ["fsdp tied", "fsdp checkpointing", "fsdp outside", "fsdp head", "fsdp reshard", "fsdp reshard by columns"],
    ],
)
def test_two_ranks(ways: list[str], tmp_path: Path) -> None:
    run_ranks(train, str(tmp_path), ways)


def test_a_forward_that_was_put_around_the_head_is_said() -> None:
    """... as TRL does, whose losses read the head's weights themselves."""
    from accelerate.utils.operations import convert_outputs_to_fp32

    model = tiny_model("llama")
    memopt.patch(model, RECIPE)
    own = model.forward
    model.forward = types.MethodType(convert_outputs_to_fp32(own.__func__), model)
    assert "is left to it" not in str(memopt.summary(model))
    output = model(**tiny_inputs("llama"))
    assert isinstance(output.logits, LazyLogits)
    assert output.logits.value is None
    model.forward = types.MethodType(_fused, model)
    assert f"now one of {__name__}" in str(memopt.summary(model))


def test_a_forward_that_was_put_around_the_head_after_the_patch_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, inputs = memopt.patch(tiny_model("llama")), tiny_inputs("llama")
    model.forward = types.MethodType(_fused, model)
    wrapped = nn.Sequential(model)  # as DDP is around it
    caplog.clear()
    for _ in range(2):
        wrapped(inputs["input_ids"]).sum().backward()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"the forward of the model is now one of {__name__}"
    ]


def _fused(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return self.model(input_ids).last_hidden_state @ self.lm_head.weight.t()
