"""Twins: small random models that run, with guessed inputs or with a user's batch.

Every parameter affects the outputs, so that a wrong rewrite shows there. Making a config small is
`memopt.walk.models.shrink`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.environment.generators import seed_cpu
from memopt.errors import InputsError, ModelError
from memopt.walk.calls.batch import Batch, fitting, placed
from memopt.walk.calls.inputs import runnable_calls
from memopt.walk.models.build import instantiate
from memopt.walk.models.shrink.config import shrunken

#: A weight matrix with a standard deviation below the first is scaled up to the second, at most by 4: with the usual
#: 0.02, a wrong fold could vanish in the residual stream.
_VISIBLE_STD, _RAISED_STD = 0.05, 0.08


def build_twin(config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A small random model of the config's class on CPU, in eval mode; its layers have the names of the real model. It
    is the first twin that runs with guessed inputs, or the first of all if none does. The same seed gives the same
    twin; torch's global generator is left as it was. Raises a ModelError if no shrunken form of the config builds."""
    first: PreTrainedModel | None = None
    for twin in random_twins(shrunken(config), seed, dtype):
        if runnable_calls(twin, variants=("plain",)):
            return twin
        first = first or twin
    if first is None:
        raise ModelError(f"No shrunken form of model type '{config.model_type}' can be built.")
    return first


def build_driven_twin(config: PreTrainedConfig, inputs: Batch) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A twin (`build_twin`, fp64) that runs with `inputs`, a batch for `config`, and the batch that fits it. Raises an
    InputsError with each error if no twin runs with them, and a ModelError if no shrunken form of the config builds."""
    errors: list[str] = []
    for twin in random_twins(shrunken(config, sizes=False), 0, torch.float64):
        for batch in fitting(inputs, config, twin.config):
            own = placed(batch, "cpu", torch.float64)
            calls = runnable_calls(twin, own)
            if calls:
                return twin, own
            errors += [error for _, error in calls.errors]
    raise InputsError(f"No small twin runs with these inputs ({'; '.join(dict.fromkeys(errors))}).")


def random_twins(configs: Iterator[PreTrainedConfig], seed: int, dtype: torch.dtype) -> Iterator[PreTrainedModel]:
    """A twin in eval mode for each config; the same seed gives the same weights, torch's generator is left alone."""
    for small in configs:
        with torch.random.fork_rng(devices=[]):
            seed_cpu(seed)
            twin = instantiate(small, device="cpu", dtype=torch.float32)
            _randomise(twin, torch.Generator().manual_seed(seed))
        yield nn.Module.to(twin, dtype).eval()


@torch.no_grad()
def _randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Give every floating parameter values that affect the outputs, in place, so that ties and names remain. New models
    hide wrong folds: norm weights are all 1, biases 0, LayerScale 1e-5, matrices as small as 0.02."""
    norm_like = {
        id(parameter): name.endswith("bias")
        for module in model.modules()
        if _is_norm_like(module)
        for name, parameter in module.named_parameters(recurse=False)
    }
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        values = parameter.to(torch.float64)
        if id(parameter) in norm_like:
            values = _random_affine(values, norm_like[id(parameter)], generator)
        elif parameter.dim() < 2 or values.std() < 1e-6:
            values = values + 0.1 * torch.randn(values.shape, generator=generator, dtype=torch.float64)
        elif values.std() < _VISIBLE_STD:
            values = values * min(4.0, _RAISED_STD / float(values.std()))
        parameter.copy_(values)


def _is_norm_like(module: nn.Module) -> bool:
    """A leaf whose only parameters are one or two vectors of one length: a scale, or a scale and a shift."""
    shapes = [parameter.shape for parameter in module.parameters(recurse=False)]
    leaf = next(module.children(), None) is None
    return leaf and 1 <= len(shapes) <= 2 and len(set(shapes)) == 1 and len(shapes[0]) == 1


def _random_affine(values: torch.Tensor, is_bias: bool, generator: torch.Generator) -> torch.Tensor:
    def uniform() -> torch.Tensor:
        return torch.rand(values.shape, generator=generator, dtype=torch.float64)

    if is_bias:
        return values + 0.6 * (uniform() - 0.5)
    # Move away from the initial value to either side, never near a zero scale (w or 1 + w); flip the sign of a quarter.
    moved = values + torch.where(uniform() < 0.5, -1.0, 1.0) * (0.2 + 0.3 * uniform())
    return torch.where((uniform() < 0.25) & (values.abs() > 0.5), -moved, moved)
