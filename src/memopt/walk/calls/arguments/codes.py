"""Ids of several codebooks at once: audio codes, one column, one row, or one batch row for each codebook."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memopt.walk.calls.arguments.request import Kwargs, Request, ordinary_ids
from memopt.walk.calls.arguments.singles import complete


def codes(request: Request) -> Iterator[tuple[str, Kwargs]]:
    name = "decoder_input_ids" if request.config.is_encoder_decoder else "input_ids"
    name = name if name in request.names else "input_ids"
    count = codebooks(request)
    if name not in request.names or count < 2:
        return
    beside = {} if name == "input_ids" else {request.main: request.ids()}
    columns = {**beside, name: _codes(request, request.batch, request.length, count)}
    yield "main:codes in columns", complete(request, columns)
    if "encoder_hidden_states" in request.names:
        states = request.normal(request.batch, request.length, request.context_width)
        yield "main:codes and context", complete(request, {**columns, "encoder_hidden_states": states})
    yield (
        "main:codes in rows",
        complete(request, {**beside, name: _codes(request, request.batch, count, request.length)}),
    )
    yield (
        "main:codes in batch rows",
        complete(request, {**beside, name: _codes(request, request.batch * count, request.length)}),
    )
    # A model that generates the codes of one frame one by one has as many positions as codebooks.
    frame: Kwargs = {"input_ids": _codes(request, request.batch, count)}
    if "last_hidden_state" in request.names:
        frame["last_hidden_state"] = request.normal(
            request.batch, count, request.whole("input_size", default=request.hidden)
        )
    yield "main:codes of one frame", complete(request, frame)


def codebooks(request: Request) -> int:
    """Number of codebooks; 0 or 1 for a model without codebooks."""
    # In a model without images, channels are codebooks.
    channels = () if "pixel_values" in request.names else ("num_channels",)
    return request.whole("num_codebooks", "n_codebooks", "num_code_groups", "num_vq", "n_vq", *channels, default=0)


def _codes(request: Request, *shape: int) -> torch.Tensor:
    pool = torch.tensor(ordinary_ids(request.config))
    return pool[torch.randint(0, len(pool), shape, generator=request.generator)]
