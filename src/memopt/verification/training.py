"""Level "training": steps as people run them, patched against stock modules on the same weights and batches.

The situations (`memopt.verification.situations`) cover every pair of values of these factors: train or eval mode,
trained parameters, precision, rows, length, padding, one backward or two, an evaluation before, outlier channels. Both
models are small (`memopt.verification.pairs`), since the code of a module is the same in each block. Their weights are
rounded to bf16, so that every precision has the same weights.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import pickle
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from memopt.environment.generators import seed_all
from memopt.patches.checks import Check, limited, skipped, worst_of_each
from memopt.verification.gradient import compare_gradients
from memopt.verification.models import cast_inputs, floating_outputs
from memopt.verification.modules import LIMITS, Worst, compare_steps, culprit
from memopt.verification.pairs import Pair, with_pair
from memopt.verification.ratios import STOCK_RUNS, rms
from memopt.verification.situations import SITUATIONS, Precision, Situation, as_in, batches
from memopt.verification.stochastic import RandomRounding
from memopt.verification.trial import CheckpointTrial, Step, loss_of
from memopt.walk.aten.precision import precise
from memopt.walk.calls.preserve import preserved
from memopt.walk.models.config import one_line

_DTYPES: dict[Precision, torch.dtype] = {"autocast": torch.float32, "bf16": torch.bfloat16}
#: Step of a central difference, relative to a parameter's size, and the largest relative difference of its slope from
#: the gradient: rounding and higher-order terms are 1e-8 of the slope, and a ReLU at its kink adds as much.
_STEP, _SLOPE_LIMIT = 1e-6, 1e-5
#: Two correct runs may differ by twice the error of either, and one of them may be less accurate by a factor of 2.
_AMPLIFIED = 4.0
_NEW_TOKENS, _PROMPT = 3, 8


@dataclass(frozen=True)
class _Run:
    step: Step
    evaluated: Step
    """Outputs that the evaluation computed without gradients."""
    drawn: str
    """Hash of the states of the random generators after the run."""


def verify_training(trial: CheckpointTrial) -> list[Check]:
    """Run every situation, with sampling and approximation switched off."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of generate, and of PEFT
        found = with_pair(trial, _all, *trial.exact)
    return [_skipped("no more precise run than the model's own fits into memory")] if found is None else found


def _all(pair: Pair) -> list[Check]:
    found: list[Check] = []
    for situation in sorted(SITUATIONS, key=lambda each: each.trains == "lora"):
        if situation.trains == "lora" and not pair.adapt():
            pair.not_run[str(situation)] = "PEFT adapts none of its linears, or is not installed"
            continue
        found += _checks(pair, situation)
        for model in (pair.patched, pair.stock):
            model.zero_grad(set_to_none=True)
    if not found:
        return [_skipped(f"stock modules run in no situation: {next(iter(pair.not_run.values()))}")]
    return [*worst_of_each(found), _unproved(pair)]


def _checks(pair: Pair, situation: Situation) -> Iterator[Check]:
    """The checks of one situation; none if stock modules do not run in it."""
    exact = situation.precision == "exact"
    dtype = pair.wide if exact else _DTYPES[situation.precision]
    for tried in (situation, replace(situation, rows=0, padded=False)):
        given = batches(pair.patched, pair.probes, tried)
        run = functools.partial(_ran, pair, tried, given)
        try:
            truth = run(pair.stock, pair.wide)
            stock = truth if exact else run(pair.stock, dtype)
            if not math.isfinite(stock.step.loss):  # Deformable DETR's logarithms in bf16
                raise FloatingPointError("the loss of stock modules is not finite")
            break
        except Exception as error:  # packed images have no rows that could be repeated
            pair.not_run.setdefault(str(situation), f"{type(error).__name__}: {one_line(error)}")
    else:
        return
    pair.not_run.pop(str(situation), None)
    is_first, situation = situation == SITUATIONS[0], tried
    limit = LIMITS[pair.wide]
    patched_run = functools.partial(run, pair.patched, dtype)
    difference = _worst(patched_run, lambda it: _compared(it.step, stock.step))
    try:
        ran = patched_run()
    except Exception:
        yield _check("training.steps", pair, situation, difference(None), difference, limit)
        return
    if exact:
        worst = _compared(ran.step, truth.step)
        if (
            not worst.value <= limit
        ):  # a situation may amplify rounding: allow as much as in stock modules rounded at random
            others = [run(pair.stock, dtype, seed=seed).step for seed in range(1, 1 + STOCK_RUNS)]
            limit = max(limit, _AMPLIFIED * max(compare_steps(other, truth.step).value for other in others))
        yield _check("training.steps", pair, situation, worst, difference, limit)
    else:
        yield _rounding(pair, situation, run, ran, stock, truth, dtype)
    if situation.evaluates:
        worst = compare_steps(ran.evaluated, stock.evaluated)
        evaluation = _worst(patched_run, lambda it: compare_steps(it.evaluated, stock.evaluated))
        yield _check("training.evaluation", pair, situation, worst, evaluation, limit)
    draws = _worst(patched_run, lambda it: Worst(it.drawn != stock.drawn, ""))
    yield _check("training.random_numbers", pair, situation, Worst(ran.drawn != stock.drawn, ""), draws, 0.0)
    if is_first:
        yield from _dropout(pair, given[0])


def _ran(
    pair: Pair, situation: Situation, given: Sequence[dict[str, Any]], model: nn.Module, dtype: torch.dtype,
    patched: int | None = None, seed: int = 0,
) -> _Run:  # fmt: skip
    """One run of a situation, in its precision or in fp64; with another seed than 0 results are rounded at random."""
    pair.convert(model, dtype)
    casts = situation.precision == "autocast" and dtype == torch.float32 != pair.wide
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=casts)
    cast_batches = [cast_inputs(each, dtype) for each in given]
    rounded = dtype if dtype == torch.float64 else torch.bfloat16
    model.zero_grad(set_to_none=True)
    outputs: dict[str, Tensor] = {}
    with (
        preserved(model), as_in(situation, model, pair.blocks), precise(dtype),
        pair.with_stock(patched if model is pair.patched else None),
        # Results are rounded, not weights and buffers.
        RandomRounding(rounded, seed=seed) if seed else contextlib.nullcontext(),
    ):  # fmt: skip
        seed_all(seed)
        evaluated = _evaluated(model, cast_batches[0], autocast) if situation.evaluates else {}
        for batch in cast_batches:
            with autocast():
                output = model(**batch)
                loss = loss_of(output)
            loss.backward(retain_graph=situation.backward == "twice")
            if situation.backward == "twice":
                loss.backward()
            outputs = {name: each.detach() for name, each in floating_outputs(output).items()}
        gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
        step = Step(float(loss.detach()), outputs, gradients, frozenset())
        return _Run(step, Step(0.0, evaluated, {}, frozenset()), _generators())


def _evaluated(model: nn.Module, batch: dict[str, Any], autocast: Any) -> dict[str, Tensor]:
    """Outputs without gradients in eval mode, and the tokens that `generate` adds to a prompt."""
    mode = model.training
    model.eval()
    with torch.no_grad(), autocast():
        outputs = floating_outputs(model(**batch))
        ids, generates = batch.get("input_ids"), getattr(model, "can_generate", None)
        if isinstance(ids, Tensor) and ids.dim() == 2 and generates is not None and generates():
            prompt = ids[:, :_PROMPT]
            with contextlib.suppress(Exception):  # a model may need more than tokens (Voxtral); the other must, too
                made = cast(Any, model).generate(
                    input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=_NEW_TOKENS,
                    do_sample=False, pad_token_id=0,
                )  # fmt: skip
                outputs["generated"] = made.double()
    model.train(mode)
    return {f"{name} without gradients": each for name, each in outputs.items()}


def _compared(step: Step, truth: Step) -> Worst:
    """The largest difference of the two steps; it is infinite for a gradient that only one of them has."""
    alone = step.gradients.keys() ^ truth.gradients.keys()
    if alone:
        return Worst(float("inf"), f"the gradient of {min(alone)}, which only one of them has")
    return compare_steps(step, truth)


def _worst(run: Callable[[int | None], _Run], compare: Callable[[_Run], Worst]) -> Callable[[int | None], Worst]:
    """`compare` on the run with the first so many modules patched."""

    def worst(patched: int | None) -> Worst:
        try:
            return compare(run(patched))
        except Exception as error:  # an error of the patched modules: stock modules run
            return Worst(float("inf"), f"an error: {type(error).__name__}: {one_line(error)}")

    return worst


def _rounding(
    pair: Pair, situation: Situation, run: Callable[..., _Run], ran: _Run, stock: _Run, truth: _Run,
    dtype: torch.dtype,
) -> Check:  # fmt: skip
    """The check on the ratio of gradient errors in 16 bits; above its limit, runs rounded at random are added."""
    compared = functools.partial(
        compare_gradients, truth=truth.step.gradients, dtype=torch.bfloat16, reference="fp64 run of stock modules",
        stock_loss=stock.step.loss, patched_loss=ran.step.loss,
        bottleneck=min((each.numel() for each in truth.step.outputs.values()), default=2**63),
    )  # fmt: skip

    def far(ours: Sequence[_Run], theirs: Sequence[_Run]) -> Worst:
        checks = [*compared([each.step.gradients for each in ours], [each.step.gradients for each in theirs])]
        worst = max(checks[1:], key=lambda check: check.excess, default=checks[0])
        return Worst(worst.excess, f"the gradient of {worst.subject}: {worst.value or 0:.3g}, limit {worst.threshold}")

    one_of_them = ran.step.gradients.keys() ^ stock.step.gradients.keys()
    worst = far([ran], [stock]) if not one_of_them else _compared(ran.step, stock.step)
    if not worst.value <= 1 and not one_of_them:
        ours = [ran, *(run(pair.patched, dtype, seed=seed) for seed in (1, 2))]
        theirs = [stock, *(run(pair.stock, dtype, seed=seed) for seed in range(3, 2 + STOCK_RUNS))]
        worst = far(ours, theirs)
    again = _worst(functools.partial(run, pair.patched, dtype), lambda it: far([it], [stock]))
    return _check("training.rounding", pair, situation, worst, again, 1.0)


_METRICS = {
    "training.steps": ("largest relative difference of an output or gradient", "only roundings of fp64 may differ"),
    "training.rounding": ("worst RMS error / stock modules' own, over its limit", "as of gradient.worst_error_ratio"),
    "training.evaluation": ("largest relative difference without gradients", "stock code computes outputs there"),
    "training.random_numbers": ("random generators left in another state", "dropouts have p = 0"),
    "training.dropout": ("slope of the loss / slope from the gradient, less 1", "central differences in fp64"),
}


def _check(
    id: str, pair: Pair, situation: Situation | str, worst: Worst, run: Callable[[int], Worst], limit: float
) -> Check:
    """The check; if it fails, `run` with the first modules patched finds the one at fault."""
    metric, reason = _METRICS[id]
    subject = f"{len(pair.swapped)} modules" if worst.value <= limit else culprit(run, limit, pair.swapped)
    where = f"; most in {worst.where}" if worst.where else ""
    return limited(
        id, subject, float(worst.value), limit, metric, reason, "stock modules, same weights and batch",
        len(SITUATIONS), f"{situation}{where}",
    )  # fmt: skip


def _unproved(pair: Pair) -> Check:
    """A passed check that lists situations that did not run, and cases that no situation covers."""
    said = [pair.left_out] * bool(pair.left_out)
    said += [f"not run: {name} ({why})" for name, why in pair.not_run.items()]
    said += ["not compared: dropout's values (their gradients are), other lengths, compiled code, GPUs"]
    return Check(
        id="training.situations", level="training", subject=f"{len(SITUATIONS) - len(pair.not_run)} situations",
        status="pass", metric="situations in which stock modules ran", value=len(SITUATIONS) - len(pair.not_run),
        reference="stock modules", n=len(SITUATIONS), detail="; ".join(said),
    )  # fmt: skip


def _dropout(pair: Pair, batch: dict[str, Any]) -> Iterator[Check]:
    """Compare the slope of the loss along a random direction with the gradient, with dropouts on and seeds fixed."""
    model, given = pair.patched, cast_inputs(batch, pair.wide)
    if pair.wide != torch.float64:
        return

    def loss(seed: int) -> Tensor:
        seed_all(seed)
        return loss_of(model(**given))

    def slope(patched: int | None) -> Worst:
        with preserved(model), precise(pair.wide), pair.with_stock(patched):
            model.train()
            model.zero_grad(set_to_none=True)
            loss(0).backward()
            generator = torch.Generator().manual_seed(0)
            moved = [(each, each.data, each.grad) for each in model.parameters() if each.grad is not None]
            steps = [
                torch.randn(data.shape, generator=generator).to(data) * _STEP * (rms(data) or 1.0)
                for _, data, _ in moved
            ]
            slopes = torch.stack([(grad * step).sum() for (_, _, grad), step in zip(moved, steps, strict=True)])
            losses = []
            for sign in (1, -1, 0):
                for (each, data, _), step in zip(moved, steps, strict=True):
                    each.data = data + sign * step if sign else data
                losses.append(float(loss(0).detach()))  # with a graph: `loss_of` needs outputs that have one
            return Worst(
                abs((losses[0] - losses[1]) / 2 - float(slopes.sum())) / (rms(slopes) * len(slopes) ** 0.5), ""
            )

    with preserved(model), precise(pair.wide):
        model.train()
        draws = float(loss(0).detach()) != float(loss(1).detach())
    if draws:
        limit, found = _SLOPE_LIMIT, slope(None)
        if not found.value <= limit:  # where a loss jumps or is detached in part, stock modules miss its slope as well
            limit = max(limit, 2 * slope(0).value)
        yield _check("training.dropout", pair, "train mode, dropouts on", found, slope, limit)


def _generators() -> str:
    states = (torch.default_generator.get_state().numpy().tobytes(), random.getstate(), np.random.get_state())
    return hashlib.sha256(pickle.dumps(states)).hexdigest()


_skipped = functools.partial(skipped, "training.steps", "steps")
