"""A user's batch for a small twin of the model: token ids that the twin has, everything else as it is.

The twin keeps the sizes that inputs are measured in (`shrunken(..., sizes=False)`); its vocabulary is cut all the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from memopt.walk.calls.arguments.request import ordinary_ids
from memopt.walk.calls.batch import Batch, rows_of
from memopt.walk.models.config import config_nodes, integer_fields, is_integer
from memopt.walk.models.shrink.config import TOKEN_ID

_IDS = re.compile(r"(.*_)?(ids|labels|codes|tokens)")
_NOT_IDS = re.compile(r".*(position|type|segment).*")


#: Rows that a twin is run with where it can be: its attention grows with every one, and two show what all do.
_ROWS = 2


def fitting(batch: Batch, config: PreTrainedConfig, small: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """`batch` for a model of `small`: its first rows, which is not always one, then all of it."""
    whole = fitted(batch, config, small)
    rows = rows_of(whole)
    if rows > _ROWS:
        yield {
            name: value[:_ROWS] if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows else value
            for name, value in whole.items()
        }
    yield whole


def fitted(batch: Batch, config: PreTrainedConfig, small: PreTrainedConfig) -> dict[str, Any]:
    """`batch`, made for `config`, for a model of `small`, which `shrunken` made of it.

    An id that has a meaning (a placeholder for an image) becomes the one with that meaning; another that the small
    vocabulary lacks, or gave a meaning to, becomes an ordinary one, the same everywhere.
    """
    moved = dict(_moved_ids(config, small))
    limit = min(_vocabularies(config, small), default=None)
    if limit is None:
        return dict(batch)
    pool = torch.tensor(ordinary_ids(small))

    def fit(ids: Tensor) -> Tensor:
        meanings = torch.tensor(list(moved.values()), dtype=ids.dtype)
        homeless = (ids >= limit) | torch.isin(ids, meanings)
        fitting = torch.where(homeless, pool.to(ids.dtype)[ids.clamp_min(0).long() % len(pool)], ids)
        for old, new in moved.items():
            fitting = torch.where(ids == old, new, fitting)
        return fitting

    def holds_ids(name: str, value: Any) -> bool:
        whole = isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)
        return whole and _IDS.fullmatch(name) is not None and _NOT_IDS.fullmatch(name) is None

    return {name: fit(value) if holds_ids(name, value) else value for name, value in batch.items()}


def _moved_ids(config: PreTrainedConfig, small: PreTrainedConfig) -> Iterator[tuple[int, int]]:
    for old, new in zip(config_nodes(config), config_nodes(small), strict=False):
        for name, value in vars(old).items():
            if name.startswith("_") or not TOKEN_ID.fullmatch(name):
                continue
            pairs = zip(_listed(value), _listed(vars(new).get(name)), strict=False)
            yield from ((a, b) for a, b in pairs if is_integer(a) and is_integer(b) and a != b)


def _vocabularies(config: PreTrainedConfig, small: PreTrainedConfig) -> Iterator[int]:
    """Sizes of the vocabularies that became smaller."""
    for old, new in zip(config_nodes(config), config_nodes(small), strict=False):
        sizes = dict(integer_fields(old))
        for name, size in integer_fields(new):
            if "vocab_size" in name and size < sizes.get(name, 0):
                yield size


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
