"""What the linears of a pretrained model see in one step, and how well each sampler would estimate their gradients.

256 tokens of plain English: 16 sentences cut to 16 tokens, so that no row is padding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn

from memopt.kernels.sampled_linear.sampling import METHODS, Method, expected_error, rows_kept

#: Folder in models/, and the class that computes its loss.
MODELS = {
    "all-MiniLM-L6-v2": transformers.AutoModelForSequenceClassification,
    "SmolLM2-135M-Instruct": transformers.AutoModelForCausalLM,
}
BUDGETS = (0.3, 0.1)
BOTH, INPUT = "|x| |dy|", "|x|"
TOKENS = 16
_FOLDER = Path(__file__).resolve().parents[2] / "models"
_SENTENCES = """\
The ferry left the harbour an hour late because fog had settled over the whole bay before sunrise that day.
Most of the recipes in her grandmother's notebook were written in pencil and had faded almost beyond reading.
When the river rose again in spring, the farmers moved their cattle to the old fields above the church.
He repaired clocks for forty years, and in all that time he never once owned a watch that kept good time.
The committee agreed that the bridge was safe, but nobody on it had walked across the bridge in years.
A small museum near the station shows how glass was blown, cut and sold in this valley for three centuries.
I thought the film was far too long, although the last half hour was as good as anything she has made.
If the temperature drops below freezing tonight, cover the young lemon trees and bring the pots indoors.
Their team won the match in the final minute with a goal that even their own supporters found hard to believe.
The new library opens on Sundays, which matters most to those who have to work on every other day of the week.
Bread made with this flour rises slowly, keeps for almost a week and tastes best when it is slightly toasted.
After the storm, volunteers counted more than two hundred birds that had been blown onto the northern beaches.
The court ruled that the letter was no contract, since neither side had signed it or acted as if they had.
She learned to sail on a lake so narrow that you had to turn the boat around every two or three minutes.
Prices for copper fell sharply in March, recovered during the summer and ended the year about where they began.
The children asked why the moon followed the train, and no one in the carriage had an answer ready for them."""


@dataclass(frozen=True)
class Errors:
    """Median over the linears of a model of the relative root mean square error of dW."""

    model: str
    linears: int
    scores: str
    budget: float
    errors: dict[Method, float]


def measure() -> list[Errors]:
    """For every model that is there."""
    return [row for name in MODELS if (_FOLDER / name / "config.json").is_file() for row in measure_model(name)]


def measure_model(name: str) -> list[Errors]:
    captured = list(capture(name))
    rows = []
    for scores_of in (BOTH, INPUT):
        for budget in BUDGETS:
            found: dict[Method, list[float]] = {method: [] for method in METHODS}
            for x, dy in captured:
                scores = x.norm(dim=1) * (dy.norm(dim=1) if scores_of == BOTH else 1)
                for method in METHODS:
                    found[method].append(expected_error(x, dy, scores, rows_kept(len(x), budget), method))
            medians = {method: median(errors) for method, errors in found.items()}
            rows.append(Errors(name, len(captured), scores_of, budget, medians))
    return rows


def capture(name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Matrices with the inner products of x and dy of each linear of the blocks; errors depend on no more of them."""
    _, seen = step(name)
    for tensors in seen.values():
        yield _fewer_columns(tensors["x"]), _fewer_columns(tensors["dy"])


def step(name: str) -> tuple[nn.Module, dict[str, dict[str, Tensor]]]:
    """The model with its gradients, and x (n, in) and dy (n, out) of each linear of the blocks."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)  # MiniLM's head is new
    model = MODELS[name].from_pretrained(_FOLDER / name, dtype=torch.float32).train(False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(_FOLDER / name)
    ids = torch.tensor([tokenizer(sentence)["input_ids"][:TOKENS] for sentence in _SENTENCES.splitlines()])
    seen: dict[str, dict[str, Tensor]] = {}
    for place, module in model.named_modules():
        if isinstance(module, nn.Linear) and (".layer." in place or ".layers." in place):
            _watch(module, seen.setdefault(place, {}))
    is_classifier = MODELS[name] is transformers.AutoModelForSequenceClassification
    labels = torch.arange(len(ids)) % 2 if is_classifier else ids
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss.backward()
    return model, seen


def _watch(module: nn.Module, seen: dict[str, Tensor]) -> None:
    def forward(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen["x"] = inputs[0].detach().reshape(-1, inputs[0].size(-1))
        output.register_hook(backward)

    def backward(dy: Tensor) -> None:
        seen["dy"] = dy.detach().reshape(-1, dy.size(-1))

    module.register_forward_hook(forward)


def _fewer_columns(rows: Tensor) -> Tensor:
    """Rows with the inner products of `rows` (n, d), in fp64 and with n columns at most."""
    return torch.linalg.qr(rows.double().t(), mode="r").R.t()
