"""A user's batch for a small twin of the model: token ids are mapped into its vocabulary, the rest is unchanged.

Such a twin has the real sizes of images and sounds (`shrunken(..., sizes=False)`) and a smaller vocabulary.
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
#: Rows of the first attempt: a twin runs many times.
_ROWS = 2


def fitting(batch: Batch, config: PreTrainedConfig, small: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """`batch` for a model of `small`: its first rows, which do not always run alone, then all of it."""
    whole = fitted(batch, config, small)
    rows = rows_of(whole)
    if rows > _ROWS:
        yield {
            name: value[:_ROWS] if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows else value
            for name, value in whole.items()
        }
    yield whole


def fitted(batch: Batch, config: PreTrainedConfig, small: PreTrainedConfig) -> dict[str, Any]:
    """`batch`, for a model of `config`, changed for a model of `small`, one of its `shrunken` configs.

    A special token id (a placeholder for an image) becomes the corresponding one; an id that is outside of the small
    vocabulary, or special there, becomes an ordinary one, the same wherever it occurs.
    """
    moved = dict(_moved_ids(config, small))
    limit = min(_vocabularies(config, small), default=None)
    if limit is None:
        return dict(batch)
    pool = torch.tensor(ordinary_ids(small))

    def fit(ids: Tensor) -> Tensor:
        special = torch.tensor(list(moved.values()), dtype=ids.dtype)
        taken = (ids >= limit) | torch.isin(ids, special)
        fitting = torch.where(taken, pool.to(ids.dtype)[ids.clamp_min(0).long() % len(pool)], ids)
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
