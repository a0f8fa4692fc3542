"""What `benchmarks.finetune` trains: MiniLM on sentences, a Llama from scratch, and the settings of papers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from rich.table import Table

from benchmarks import convergence, finetune_task
from benchmarks.published import Predicted, predict, table
from benchmarks.settings import PAPERS, Paper, Size
from benchmarks.training import Score, Setting
from benchmarks.ways import BUDGET, CHECKPOINTING, COMPILE, LIGER, OFFLOAD, STOCK

#: The sentences of MiniLM's test.
TESTS = 512
APPROXIMATE = ("lowmemory-bp", "approx-2bit", "approx-4bit", "approx-8bit", "mesa", "int8")
PEERS = (CHECKPOINTING, OFFLOAD, COMPILE, BUDGET, LIGER)
RECIPES = ("exact-unfolded", "exact-levels", "int8")


@dataclass(frozen=True)
class Preset:
    """What is trained, by default by which ways, how often and how long."""

    about: str
    setting: Callable[[Size, int], Setting]
    """Of a size and a number of steps."""
    ways: tuple[str, ...]
    seeds: int = 2
    steps: int = 20
    paper: Paper | None = None
    sizes: tuple[Size, ...] = ("cpu", "paper")
    check: Callable[[], None] = lambda: None
    """Raises CannotRun where a model, data or a package is missing."""

    def device(self, size: Size) -> str:
        return "cpu" if size == "cpu" else "cuda"

    def predicted(self) -> list[Predicted]:
        """The steps of the paper's size, from its config alone."""
        assert self.paper is not None
        return predict(
            self.paper.config("paper"), self.paper.training, self.paper.points, self.paper.labels, self.paper.attention
        )

    def predicted_table(self, rows: list[Predicted]) -> Table:
        assert self.paper is not None
        return table(rows, f"{self.paper.training}", self.paper.source)


@cache
def _sentences() -> finetune_task.Task:
    return finetune_task.load_task(TESTS)


def _minilm(size: Size, steps: int) -> Setting:
    task = _sentences()
    return Setting(
        finetune_task.build,
        lambda seed: finetune_task.training_batches(task, steps, seed),
        lambda model: Score(*reversed(finetune_task.score(model, task.test))),
        finetune_task.LEARNING_RATE,
    )


def _of_paper(paper: Paper) -> Preset:
    trained = "full tuning" if paper.training.train == "full" else paper.training.train.replace("lora", "LoRA")
    asked = (*(point.way for point in paper.points if point.way != STOCK), *RECIPES, *PEERS)
    name = paper.source.split(",")[0]
    return Preset(f"{name}, {trained}", paper.setting, tuple(dict.fromkeys(asked)), paper=paper, check=paper.check)


PRESETS: dict[str, Preset] = {
    "minilm": Preset(
        "pretrained MiniLM-L6, LoRA, sentiment",
        _minilm,
        APPROXIMATE,
        seeds=5,
        steps=120,
        sizes=("cpu",),
        check=lambda: finetune_task.check(),
    ),
    "convergence": Preset(
        "a byte-level Llama from scratch, Python's language reference",
        lambda size, steps: convergence.setting(convergence.SHAPES[size], steps),
        ("exact-unfolded", "exact-levels", CHECKPOINTING, "int8"),
        seeds=5,
        steps=300,
        sizes=("cpu", "gpu"),
    ),
    **{name: _of_paper(paper) for name, paper in PAPERS.items()},
}
