"""Inputs to run a model with: made from its forward's signature, its `main_input_name` and its config, no model named.

`dummy_inputs` gives the likeliest call, `runnable_calls` the ones that were tried and ran, `training_targets` the
labels that make a model return a loss. What arguments look like is `memopt.walk.arguments` and, for labels,
`memopt.walk.targets`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.errors import ModelError
from memopt.walk.arguments import candidates, forward_parameters, has_config, inner_model
from memopt.walk.config import one_line
from memopt.walk.preserve import preserved
from memopt.walk.targets import target_candidates

Variant = Literal["plain", "padded", "odd"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)

#: How a forward is run; a walk passes its own, to observe it.
Runner = Callable[[nn.Module, dict[str, Any]], Any]


@dataclass(frozen=True)
class Call:
    """One way to call a model's forward."""

    label: str
    kwargs: dict[str, Any]


class Calls(list[Call]):
    """The calls that ran, with what the others failed on."""

    def __init__(self, calls: Sequence[Call] = (), errors: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(calls)
        self.errors = tuple(errors)
        """(label, error) of every call that was tried and did not run."""


def dummy_inputs(
    model: nn.Module,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    variant: Variant = "plain",
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments for ``model.forward``, batch 2: no labels, no cache, no special tokens.

    ``plain`` has no padding, ``padded`` masks the end of one row (where the forward takes a mask), ``odd`` has an odd
    sequence length and an image side that no window divides. `dtype` is that of floating inputs; on ``meta`` there are
    shapes only. The same seed gives the same values; torch's global generator is not used.

    Raises:
        ModelError: the model has no transformers config, or nothing is known of what its forward takes.
    """
    for _, kwargs in candidates(model, variant, seed):
        return _moved(kwargs, torch.device(device), dtype)
    raise ModelError(
        f"No inputs can be made for {type(inner_model(model)).__name__} from its forward's signature.",
        "Pass a batch of your own.",
    )


def runnable_calls(
    model: nn.Module,
    inputs: Mapping[str, Any] | None = None,
    *,
    variants: Sequence[Variant] = VARIANTS,
    seed: int = 0,
    run: Runner | None = None,
) -> Calls:
    """For each variant, and each modality, the first call that runs in eval and in train mode; the rest as errors.

    Inputs are on the model's device, in its floating dtype. With `inputs` these are the only call tried. A call that
    runs only in the mode the model is in is taken when none runs in both. The model is left as it was: mode, buffers,
    and torch's global CPU generator.
    """
    if inputs is not None:
        tried = [("inputs", "inputs", dict(inputs))]
    elif has_config(model):
        tried = list(_tried(model, variants, seed))
    else:
        return Calls(errors=[("inputs", f"{type(model).__name__} has no transformers config: pass inputs")])
    calls: list[Call] = []
    errors: list[tuple[str, str]] = []
    for label in dict.fromkeys(label for label, _, _ in tried):
        fallback: Call | None = None
        for _, name, kwargs in (entry for entry in tried if entry[0] == label):
            here, there = _attempt(model, kwargs, run)
            if here is None and there is None:
                calls.append(Call(label, kwargs))
                break
            errors.append((name, here or f"in the other mode: {there}"))
            if here is None and fallback is None:
                fallback = Call(label, kwargs)
        else:
            if fallback is not None:
                calls.append(fallback)
    return Calls(calls, errors)


def training_targets(
    model: nn.Module, inputs: Mapping[str, Any], *, seed: int = 0, run: Runner | None = None
) -> dict[str, Any]:
    """What to add to `inputs` for the forward to return a loss, mostly ``labels``; ``{}`` where nothing does.

    The shape of the logits tells what labels look like: one class a token, a row, or a pixel; a number for one column.
    """
    config = getattr(inner_model(model), "config", None)
    problem_type = getattr(config, "problem_type", None)
    try:
        logits = getattr(_run_once(model, inputs, run), "logits", None)
        for targets in target_candidates(forward_parameters(model), logits, inputs, seed):
            if _gives_loss(model, {**inputs, **targets}, run):
                return targets
    except Exception:  # A model that does not run has no targets; runnable_calls says why it does not run.
        return {}
    finally:
        # Classification heads write the problem type that they guess from the labels into their config.
        if config is not None and hasattr(config, "problem_type"):
            config.problem_type = problem_type
    return {}


def _tried(model: nn.Module, variants: Sequence[Variant], seed: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(label, name, kwargs) of what to try; a variant that changes nothing for this model is left out."""
    device, dtype = _place(model)
    plain: dict[str, dict[str, Any]] = {}
    for variant in variants:
        for name, kwargs in candidates(model, variant, seed):
            modality = name.partition(":")[0]
            if variant == "plain":
                plain[name] = kwargs
            elif name in plain and _same_shapes(plain[name], kwargs):
                continue
            label = variant if modality == "main" else f"{variant} {modality}"
            detail = name.partition(":")[2]
            yield label, f"{label} ({detail})" if detail else label, _moved(kwargs, device, dtype)


def _same_shapes(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def shape(value: Any) -> Any:
        return value.shape if isinstance(value, torch.Tensor) else value

    masked = any(name.endswith("mask") and not bool(value.all()) for name, value in other.items())
    return not masked and {k: shape(v) for k, v in one.items()} == {k: shape(v) for k, v in other.items()}


def _place(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    parameters = list(model.parameters())
    device = parameters[0].device if parameters else torch.device("cpu")
    floating = (parameter.dtype for parameter in parameters if parameter.is_floating_point())
    return device, next(floating, torch.float32)


def _moved(kwargs: dict[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None)

    return {name: move(value) for name, value in kwargs.items()}


def _attempt(model: nn.Module, kwargs: dict[str, Any], run: Runner | None) -> tuple[str | None, str | None]:
    """Error in the mode the model is in, and in the other one; None for none."""
    here = _error_of(model, kwargs, run, model.training)
    return (here, None) if here is not None else (None, _error_of(model, kwargs, run, not model.training))


def _error_of(model: nn.Module, kwargs: dict[str, Any], run: Runner | None, training: bool) -> str | None:
    try:
        _run_once(model, kwargs, run, training)
    except Exception as error:  # Any failure means that these inputs do not fit.
        return f"{type(error).__name__}: {one_line(error)}"
    return None


def _run_once(model: nn.Module, kwargs: Mapping[str, Any], run: Runner | None, training: bool | None = None) -> Any:
    own = {
        name: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value) for name, value in kwargs.items()
    }
    with preserved(model), torch.no_grad(), _MetaReads():
        if training is not None and training != model.training:
            model.train(training)
        return run(model, own) if run else model(**own)


class _MetaReads(TorchDispatchMode):
    """Answers branches on values that meta tensors lack ("is all of the mask set?") with a plausible yes, or 1."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype == torch.bool else 1
        return func(*args, **(kwargs or {}))


def _gives_loss(model: nn.Module, kwargs: dict[str, Any], run: Runner | None) -> bool:
    try:
        loss = getattr(_run_once(model, kwargs, run), "loss", None)
    except Exception:
        return False
    return isinstance(loss, torch.Tensor) and loss.numel() == 1 and (loss.is_meta or bool(loss.isfinite()))
