"""One training of `benchmarks.finetune`: a setting, a way and a seed become a run.

Knows no model and no data: a `Setting` brings them.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.finetune_task import Batch, Gradients
from benchmarks.measure import Memory, step_memory
from benchmarks.ways import STOCK, prepare

#: Points of the loss curve, beside the start.
CURVE = 10
#: The step whose memory is measured: the optimizer has its states, and compilers are done.
MEASURED = 2
LEAST_STEPS = MEASURED + 1


@dataclass(frozen=True)
class Score:
    """On held-out rows."""

    loss: float
    accuracy: float | None = None


@dataclass(frozen=True)
class Setting:
    """What is trained, on which device and how; a seed gives the same model and the same batches each time."""

    model: Callable[[int], nn.Module]
    """The stock model in train mode with its adapters, on the device; without dropout where gradients are compared."""
    batches: Callable[[int], Sequence[Batch]]
    """One a step."""
    score: Callable[[nn.Module], Score]
    rate: float
    """Of AdamW at the start; it falls to 0."""
    device: str = "cpu"
    autocast: torch.dtype | None = None
    in_fp64: bool = True
    """Whether a copy of the model in fp64 fits and runs: quantised weights have none."""


@dataclass(frozen=True)
class Run:
    """One training."""

    way: str
    seed: int
    accuracy: float | None
    loss: float
    """Accuracy and mean cross entropy on held-out rows, after the last step."""
    gradient_error: float
    """Of the gradient at the first step, relative to stock's."""
    kept: int
    """Bytes that a forward leaves for backward."""
    seconds: float
    """Of a step, the median."""
    train_loss: float | None = None
    """Mean loss of the steps of the last epoch, where that is asked for."""
    peak: int = 0
    """The most bytes of a step, beyond what lives between steps."""
    reserved: int | None = None
    """The most bytes that the CUDA allocator holds."""
    rounding: float | None = None
    """Of stock: the error of its gradient at the first step, relative to that in fp64."""
    curve: tuple[tuple[int, float], ...] = ()
    """(step, held-out loss), the last after the last step."""


def train(
    setting: Setting, way: str, seed: int, prepare: Callable[[str, nn.Module, int], Callable[..., Any]] = prepare
) -> Run:
    """Train the model of `seed`, as `way` does."""
    batches = setting.batches(seed)
    model = setting.model(seed)
    own = _first_gradients(model, model, batches[0], setting)
    rounding = _rounding(model, batches[0], setting, own) if way == STOCK and setting.in_fp64 else None
    run = prepare(way, model, seed)
    error = 0.0 if way == STOCK else relative_error(_first_gradients(model, run, batches[0], setting), own)
    del own
    torch.manual_seed(seed)  # what rounds at random
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=setting.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(batches))
    score = _scored(setting, model)
    curve, seconds, memory = [(0, score.loss)], [], Memory(0, 0, None)

    def finish(output: Any) -> None:
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for number, batch in enumerate(batches, 1):
        begun = time.perf_counter()
        if number == MEASURED:
            memory = step_memory(lambda: _forward(run, batch, setting), finish, setting.device)  # noqa: B023
        else:
            finish(_forward(run, batch, setting))
            if setting.device == "cuda":
                torch.cuda.synchronize()
            if number > MEASURED:
                seconds.append(time.perf_counter() - begun)
        schedule.step()
        if number == len(batches) or number % max(len(batches) // CURVE, 1) == 0:
            score = _scored(setting, model)
            curve.append((number, score.loss))
    return Run(
        way,
        seed,
        score.accuracy,
        score.loss,
        error,
        memory.kept,
        statistics.median(seconds),
        peak=memory.peak,
        reserved=memory.reserved,
        rounding=rounding,
        curve=tuple(curve),
    )


def relative_error(gradients: Gradients, reference: Gradients) -> float:
    """Norm of the difference of all gradients together / norm of the reference."""
    pairs = [(gradients[name].double(), g.double()) for name, g in reference.items()]
    difference = sum(float((one - other).square().sum()) for one, other in pairs)
    return math.sqrt(difference / sum(float(other.square().sum()) for _, other in pairs))


def _forward(run: Callable[..., Any], batch: Mapping[str, Tensor], setting: Setting) -> Any:
    with torch.autocast(setting.device, setting.autocast, enabled=setting.autocast is not None):
        return run(**batch)


def _scored(setting: Setting, model: nn.Module) -> Score:
    # In train mode: without dropout it is the same function, and bitsandbytes packs weights anew for inference.
    with torch.no_grad(), torch.autocast(setting.device, setting.autocast, enabled=setting.autocast is not None):
        return setting.score(model)


def _first_gradients(model: nn.Module, run: Callable[..., Any], batch: Batch, setting: Setting) -> Gradients:
    torch.manual_seed(0)  # the same masks where there is dropout
    _forward(run, batch, setting).loss.backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _rounding(model: nn.Module, batch: Batch, setting: Setting, own: Gradients) -> float:
    exact = copy.deepcopy(model).double()
    inputs = {name: each.double() if each.is_floating_point() else each for name, each in batch.items()}
    inputs["labels"] = batch["labels"]
    exact(**inputs).loss.backward()
    return relative_error(own, {n: p.grad for n, p in exact.named_parameters() if p.grad is not None})
