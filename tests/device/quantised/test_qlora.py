"""LoRA on 4 bits and on 8, on the emulated device: as right as stock, with no more synchronisations.

Runs with the trainers' environment (`make test-train`): bitsandbytes and torchao compute by their CPU kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memopt.verification.gradient import compare_gradients
from tests.device.emulator.install import counting
from tests.device.scenarios import CHECKPOINTING, PRECISION, Way, checkpointed, patched, step
from tests.factories import tiny_inputs, tiny_model
from tests.support.compare import gradients_of
from tests.train.test_quantised import _WIDTH, KINDS, adapted

#: Of both libraries' linears on the device.
WAYS = [
    *(("bitsandbytes nf4", Way("llama", "qlora", each, "autocast outside")) for each in CHECKPOINTING),
    *(("bitsandbytes nf4", Way("llama", "qlora", "non-reentrant", each)) for each in PRECISION[1:]),
    ("torchao int8", Way("llama", "qlora", "levels", "bf16")),
    ("quanto int8", Way("llama", "qlora", "none", "bf16")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantised") / "llama"
    tiny_model("llama", torch.bfloat16, **_WIDTH).save_pretrained(out)
    return out


@pytest.mark.parametrize(("kind", "way"), WAYS, ids=lambda each: str(each))
@pytest.mark.rotates(3)
def test_a_step_on_quantised_linears_is_as_right_as_stock(kind: str, way: Way, folder: Path) -> None:
    inputs = {name: tensor.cuda() for name, tensor in tiny_inputs("llama", 2, 16).items()}

    def made(dtype: torch.dtype) -> Any:
        return adapted(KINDS[kind](folder, dtype)).to("cuda")

    exact = made(torch.float32)
    exact(**inputs).loss.backward()
    model = checkpointed(way, made(torch.bfloat16))

    def measured() -> tuple[float, dict[str, torch.Tensor], int]:
        for _ in range(2):
            model.zero_grad()
            with counting() as count:
                loss = step(way, model, inputs)
        return loss.item(), gradients_of(model), count.waits.total()

    stock_loss, stock, stock_waits = measured()
    patched(way, model)
    loss, found, waits = measured()
    assert_as_right(found, stock, exact, stock_loss, loss)
    assert waits <= stock_waits


def assert_as_right(
    found: dict[str, torch.Tensor], stock: dict[str, torch.Tensor], exact: nn.Module, stock_loss: float, loss: float
) -> None:
    checks = compare_gradients([found], [stock], gradients_of(exact), torch.bfloat16, "fp32", stock_loss, loss)
    assert all(check.status == "pass" for check in checks), checks
