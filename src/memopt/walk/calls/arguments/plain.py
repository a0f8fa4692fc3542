"""Token ids for a model without a transformers config, from its signature and its embeddings."""

from __future__ import annotations

import inspect
import re

import torch
from torch import nn

from memopt.walk.calls.arguments.request import BATCH, LENGTH, ODD_LENGTH, Forms, parameters_of

_TARGETS = re.compile(r"(.*_)?(targets?|labels?|y)")
_LENGTHS = {"plain": LENGTH, "odd": ODD_LENGTH}


def token_ids(model: nn.Module, variant: str, seed: int) -> Forms:
    """Ids for every required argument of the forward, or for its first argument; then also for its targets, if any.

    Forms with one detail are alternatives: rows of tokens, then tokens without a dimension for rows.
    """
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    parameters = parameters_of(model)
    length = _LENGTHS.get(variant)
    if not tables or not parameters or length is None:
        return
    wanted = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty] or list(parameters)[:1]
    targets = [name for name in parameters if _TARGETS.fullmatch(name) and name not in wanted]
    generator = torch.Generator().manual_seed(seed)
    for detail, names in (("", wanted), ("with targets", [*wanted, *targets])) if targets else (("", wanted),):
        for shape in ((BATCH, length), (length,)):
            yield detail, {name: torch.randint(0, min(tables), shape, generator=generator) for name in names}
