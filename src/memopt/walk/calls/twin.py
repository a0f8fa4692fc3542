"""Twins: small random models that run, with guessed inputs or with a user's batch."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.errors import InputsError, ModelError
from memopt.walk.calls.batch import Batch, placed
from memopt.walk.calls.fit import fitting
from memopt.walk.calls.inputs import runnable_calls
from memopt.walk.models.shrink.config import shrunken
from memopt.walk.models.twins import random_twins


def build_twin(config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A small random model of the config's class on CPU, in eval mode; the names of its layers are the real ones.

    The first that runs with guessed inputs, or the first of all if none does. Every parameter is random
    (`memopt.walk.models.twins`), so that a wrong rewrite shows in the outputs. The same seed gives the same twin;
    torch's global generator is left as it was.

    Raises:
        ModelError: no shrunken form of the config builds.
    """
    first: PreTrainedModel | None = None
    for twin in random_twins(shrunken(config), seed, dtype):
        if runnable_calls(twin, variants=("plain",)):
            return twin
        first = first or twin
    if first is None:
        raise ModelError(f"No shrunken form of model type '{config.model_type}' can be built.")
    return first


def build_driven_twin(config: PreTrainedConfig, inputs: Batch) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A twin (`build_twin`, fp64) that runs with `inputs`, a batch for `config`, and the batch that fits it.

    Raises:
        InputsError: none runs; says what each failed on.
        ModelError: no shrunken form of the config builds.
    """
    errors: list[str] = []
    for twin in random_twins(shrunken(config, sizes=False), 0, torch.float64):
        for batch in fitting(inputs, config, twin.config):
            own = placed(batch, "cpu", torch.float64)
            calls = runnable_calls(twin, own)
            if calls:
                return twin, own
            errors += [error for _, error in calls.errors]
    raise InputsError(f"No small twin runs with these inputs ({'; '.join(dict.fromkeys(errors))}).")
