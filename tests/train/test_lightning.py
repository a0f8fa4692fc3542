"""`MemoptCallback` under Lightning."""

from __future__ import annotations

import logging
from typing import Any

import lightning
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import memopt
from memopt.errors import NegativeVerdict
from memopt.integrations.lightning import MemoptCallback
from memopt.patches.apply import is_patched
from tests.factories import tiny_inputs, tiny_model

STEPS = 3


class Module(lightning.LightningModule):
    """A tiny model of `name`, whose losses it keeps."""

    def __init__(self, name: str, where: str = "init", by_hand: bool = False) -> None:
        super().__init__()
        self.kind, self.where, self.by_hand = name, where, by_hand
        self.losses: list[float] = []
        self.model: Any = self.build() if where == "init" else None

    def build(self) -> nn.Module:
        model: Any = tiny_model(self.kind)
        if self.kind == "bert":
            torch.manual_seed(0)
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["query"]))
        return memopt.patch(model) if self.by_hand else model

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**tiny_inputs(self.kind, seed=index)).loss
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(STEPS))  # type: ignore[arg-type]


def run(module: Module, *callbacks: lightning.Callback) -> list[float]:
    settings: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    lightning.Trainer(accelerator="cpu", max_epochs=1, callbacks=list(callbacks), **settings).fit(module)
    return module.losses


@pytest.mark.parametrize(("name", "where"), [("llama", "init"), ("bert", "init"), ("llama", "configure_model")])
def test_losses_are_those_of_patching_by_hand_and_of_the_stock_model(
    name: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = Module(name, where)
    with caplog.at_level(logging.INFO, "memopt"):
        losses = run(module, MemoptCallback())
    assert is_patched(module.model)
    assert caplog.text.count("patched") == 1
    assert len(losses) == STEPS
    assert losses == run(Module(name, where, by_hand=True))
    assert losses == pytest.approx(run(Module(name, where)), rel=1e-5)


def test_a_model_that_is_patched_already_is_left_alone() -> None:
    module = Module("llama", by_hand=True)
    run(module, MemoptCallback("exact-levels"))
    assert memopt.summary(module.model).recipe == "exact-unfolded"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(50, 16), nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return x


class OfNetworks(Module):
    """Has no forward of its own; its network, and a criterion in which nothing can be patched, are children."""

    def __init__(self) -> None:
        super().__init__("none", where="configure_model")
        self.net, self.criterion = Net(), nn.Bilinear(16, 16, 1)

    def configure_model(self) -> None: ...

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x = self.net(torch.arange(24).view(2, 12))
        loss = self.criterion(x, x).square().mean()
        self.losses.append(loss.item())
        return loss


@pytest.mark.filterwarnings("error:memopt")
@pytest.mark.parametrize("inputs", [None, {"ids": torch.arange(24).view(2, 12)}])
def test_networks_of_a_module_without_a_forward_are_patched(inputs: Any) -> None:
    module = OfNetworks()
    run(module, MemoptCallback(inputs=inputs))
    assert memopt.summary(module.net).modules >= 4
    assert not is_patched(module.criterion)


def test_a_module_with_nothing_to_patch_is_refused() -> None:
    module = OfNetworks()
    module.net = nn.Identity()
    with pytest.raises(NegativeVerdict):
        run(module, MemoptCallback())
