"""The situations in which steps are compared: few, but they cover every pair of factor values; and their batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memopt.torch_compat import tree_leaves, tree_map
from memopt.verification.inputs import Probes
from memopt.walk.calls.batch import rows_of, tokens_of
from memopt.walk.calls.inputs import IGNORED, MASKS, masked

Trains = Literal["all", "even", "odd", "lora"]
Precision = Literal["exact", "autocast", "bf16"]
Backward = Literal["once", "second", "twice"]

SHORT, LONG = 24, 265
"""Tokens in a row: an even number and an odd one, longer than any call of the walk."""
#: Elements from which 16-bit tensors are computed in parts (`memopt.kernels.base.pieces`); tokens of the largest batch.
_LARGE, _MOST_TOKENS = 2**18, 4096
#: Every 29th row of each matrix is scaled by 64, a power of two, so that undoing it is exact.
_EVERY, _FACTOR = 29, 64.0


@dataclass(frozen=True)
class Situation:
    """One way to run a step."""

    training: bool
    """The flag of the modules; dropouts have p = 0."""
    trains: Trains
    """All parameters, every second parameter, or LoRA adapters only."""
    precision: Precision
    """fp64, fp32 weights under autocast to bf16, or bf16 weights."""
    rows: int
    """0: the model's own batch, in its own size, for models that run in no other."""
    tokens: int
    padded: bool
    """A row ends in padding, another begins with it; labels in padding and at the start of each row are ignored."""
    backward: Backward
    """``second``: the gradients of two batches are summed; ``twice``: the graph is retained and run again."""
    evaluates: bool
    """A forward without gradients and `generate` run before the step."""
    outliers: bool
    """Some channels of every matrix in the blocks are scaled up, so that gates saturate."""

    def __str__(self) -> str:
        trains = {"all": "", "lora": "LoRA"}.get(self.trains, "every second parameter frozen")
        backward = {"once": "", "second": "second batch without zeroing", "twice": "backward twice"}[self.backward]
        precision = "fp64" if self.precision == "exact" else self.precision
        size = f"{self.rows} x {self.tokens} tokens" if self.rows else "the batch as it is"
        mode = "train mode" if self.training else "eval mode"
        said = (mode, trains, precision, size, "padded" * self.padded, backward, "after an evaluation" * self.evaluates)
        return ", ".join(filter(None, (*said, "outlier channels" * self.outliers)))


#: Each pair of values of two factors is in a situation. Outliers are in fp64 only: in 16 bits rounding hides errors.
_ROWS: tuple[tuple[Any, ...], ...] = (
    (True, "all", "exact", 3, SHORT, False, "once", True, False),
    (True, "odd", "exact", 1, SHORT, True, "twice", False, True),
    (True, "even", "exact", 1, LONG, False, "once", True, True),
    (True, "all", "exact", 1, SHORT, True, "second", False, True),
    (False, "even", "exact", 3, SHORT, False, "twice", False, True),
    (False, "odd", "autocast", 3, SHORT, False, "second", True, False),
    (False, "all", "autocast", 1, LONG, True, "once", False, False),
    (True, "even", "autocast", 1, SHORT, False, "once", True, False),
    (False, "even", "bf16", 1, SHORT, True, "second", False, False),
    (False, "all", "bf16", 1, SHORT, False, "twice", True, False),
    (False, "odd", "bf16", 1, LONG, True, "once", False, False),
    (False, "lora", "exact", 1, SHORT, False, "once", False, True),
    (False, "lora", "exact", 1, LONG, False, "second", True, True),
    (False, "lora", "exact", 3, LONG, True, "twice", False, True),
    (True, "lora", "autocast", 1, SHORT, True, "twice", True, False),
    (True, "lora", "bf16", 3, SHORT, True, "once", False, False),
)
SITUATIONS = tuple(Situation(*row) for row in _ROWS)


def batches(model: nn.Module, probes: Probes, situation: Situation) -> list[dict[str, Any]]:
    """The batches of a situation, with labels, made from the batch of `probes`; no row exceeds the model's context."""
    count = 2 if situation.backward == "second" else 1
    if not situation.rows:
        return [{**probes.batches[0], **probes.targets[0]}] * count
    rows, tokens = situation.rows, min(situation.tokens, _longest(model))
    if situation.precision == "bf16" and situation.tokens == LONG:
        widths = (getattr(config, "hidden_size", None) for config in _configs(model))
        width = next((width for width in widths if isinstance(width, int) and width > 0), _LARGE)
        rows = max(rows, min(_LARGE // (width * tokens) + 1, -(-_MOST_TOKENS // tokens)))
    made = (_batch(probes, rows, tokens, seed) for seed in range(count))
    return [_padded(model, each) if situation.padded else each for each in made]


def _batch(probes: Probes, rows: int, tokens: int, seed: int) -> dict[str, Any]:
    """The probe in `rows` rows of `tokens` tokens, with random ids after its end; other inputs only get `rows` rows."""
    given = {**probes.batches[0], **probes.targets[0]}
    own_rows, own_tokens = rows_of(given), tokens_of(given)
    tensors = [value for value in tree_leaves(given) if isinstance(value, Tensor)]
    if own_tokens is None or any(value.dim() < 2 or value.shape[1] != own_tokens for value in tensors):
        tokens = own_tokens = 0

    def resized(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and len(value) == own_rows:
            value = value[(torch.arange(rows) + seed) % own_rows]
            if tokens and own_tokens:
                value = _lengthened(value, tokens, own_tokens, seed)
        return value

    made: dict[str, Any] = tree_map(resized, given)
    return made


def _lengthened(value: Tensor, tokens: int, own_tokens: int, seed: int) -> Tensor:
    longer = value[:, (torch.arange(tokens) + 5 * seed) % own_tokens]
    if longer.dim() == 2 and not longer.is_floating_point() and int(value.max()) > 8:
        # Tokens of all kinds, so that each expert is chosen. The seed gives labels the ids that the inputs have.
        generator = torch.Generator().manual_seed(seed)
        random = torch.randint(4, int(value.max()) + 1, longer.shape, generator=generator)
        longer[:, own_tokens:] = random[:, own_tokens:]
    return longer


def _padded(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """`batch` with the first row's end and the last row's start masked; labels there and in a prompt are ignored."""
    made = masked(model, batch)
    for mask, ids in MASKS.items():
        if isinstance(made.get(mask), Tensor) and made[mask].dim() == 2 and isinstance(made.get(ids), Tensor):
            keeps = made[mask].clone()
            part = keeps.shape[1] // 3
            if len(keeps) > 1:
                keeps[-1, :part] = 0
            keeps[0, -part:] = 0
            made[mask] = keeps
            labels = made.get("labels")
            if isinstance(labels, Tensor) and labels.shape == keeps.shape and not labels.is_floating_point():
                ignored = labels.masked_fill(keeps == 0, IGNORED)
                ignored[:, : part // 2] = IGNORED
                made["labels"] = ignored
    return made


def _longest(model: nn.Module) -> int:
    limits = (getattr(config, "max_position_embeddings", None) for config in _configs(model))
    longest = min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=LONG)
    return longest - (longest % 2 == 0 and longest > SHORT)


def _configs(model: nn.Module) -> Iterable[Any]:
    found = (getattr(module, "config", None) for module in model.modules())
    return {id(each): each for each in found if each is not None}.values()


@contextlib.contextmanager
def as_in(situation: Situation, model: nn.Module, blocks: Iterable[str]) -> Iterator[None]:
    """Inside, the model has the mode, the trained parameters and the outlier channels of the situation."""
    trained = [each for each in model.parameters() if each.requires_grad]
    inside = [each for name in blocks for each in _submodule(model, name).parameters()] or list(model.parameters())
    scaled = [each for each in dict.fromkeys(inside) if each.dim() > 1] if situation.outliers else []
    mode = model.training
    model.train(situation.training)
    if situation.trains in ("even", "odd"):
        for place, each in enumerate(trained):
            each.requires_grad_(place % 2 == (situation.trains == "odd"))
    _scale(scaled, _FACTOR)
    try:
        with without_dropout(model):
            yield
    finally:
        _scale(scaled, 1 / _FACTOR)
        model.train(mode)
        for each in trained:
            each.requires_grad_(True)


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, the probabilities of all dropouts are 0."""
    owners = [*model.modules(), *_configs(model)]
    changed = [
        (vars(owner), key, value)
        for owner in owners
        for key, value in vars(owner).items()
        if isinstance(value, float)
        and 0 < value <= 1
        and ("drop" in key or (key == "p" and isinstance(owner, nn.Module)))
    ]
    for table, key, _ in changed:
        table[key] = 0.0
    try:
        yield
    finally:
        for table, key, value in changed:
            table[key] = value


def _submodule(model: nn.Module, name: str) -> nn.Module:
    """The submodule `name` of the model, or of the model inside its adapters."""
    return dict(model.named_modules()).get(name) or model.get_submodule(f"base_model.model.{name}")


@torch.no_grad()
def _scale(parameters: Iterable[Tensor], factor: float) -> None:
    for each in parameters:
        each.data[..., ::_EVERY, :] *= factor
