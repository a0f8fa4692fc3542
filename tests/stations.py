"""A small model whose inputs nobody can guess: nothing in its signature or config says what they look like.

Registered with transformers, so that every command finds it by its model type. Test vocabulary only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

SENSORS, STATIONS, CLASSES = 5, 7, 3


class StationsConfig(PreTrainedConfig):
    model_type = "memopt_test_stations"

    def __init__(self, breadth: int = 32, blocks: int = 2, **kwargs: Any) -> None:
        self.breadth, self.blocks = breadth, blocks
        super().__init__(**kwargs)


class StationsBlock(nn.Module):
    def __init__(self, config: StationsConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.breadth)
        self.up = nn.Linear(config.breadth, 4 * config.breadth)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * config.breadth, config.breadth)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return y


class StationsModel(PreTrainedModel):
    config_class = StationsConfig
    main_input_name = "weather_by_station"

    def __init__(self, config: StationsConfig) -> None:
        super().__init__(config)
        self.encode = nn.Linear(SENSORS, config.breadth)
        self.place = nn.Embedding(STATIONS, config.breadth)
        self.layers = nn.ModuleList(StationsBlock(config) for _ in range(config.blocks))
        self.head = nn.Linear(config.breadth, CLASSES)
        self.post_init()

    def forward(
        self, weather_by_station: dict[str, Tensor], *, labels: Tensor | None = None
    ) -> SequenceClassifierOutput:
        if not isinstance(weather_by_station, dict):
            raise TypeError("weather_by_station holds readings and station")
        x = self.encode(weather_by_station["readings"]) + self.place(weather_by_station["station"])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x.mean(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


AutoConfig.register(StationsConfig.model_type, StationsConfig, exist_ok=True)


def stations_batch(rows: int = 2, hours: int = 12) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    readings = torch.randn(rows, hours, SENSORS, generator=generator)
    station = torch.randint(0, STATIONS, (rows, hours), generator=generator)
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return {"weather_by_station": {"readings": readings, "station": station}, "labels": labels}


def save_stations(folder: Path) -> tuple[Path, Path]:
    """(folder of the model, file of a batch) below `folder`."""
    torch.manual_seed(0)
    model = StationsModel(StationsConfig())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder / "stations")
    torch.save(stations_batch(), folder / "batch.pt")
    return folder / "stations", folder / "batch.pt"
