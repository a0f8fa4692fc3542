"""Anything else, as a sequence of hidden vectors."""

from __future__ import annotations

from collections.abc import Iterator

from memopt.walk.arguments.request import Kwargs, Request
from memopt.walk.arguments.singles import complete, features


def anything(request: Request) -> Iterator[tuple[str, Kwargs]]:
    """Last resort: the main input, or the first required one, as a sequence of hidden vectors."""
    name = request.main if request.main in request.names else next(iter(request.required), None)
    if name is None or name in ("input_ids", "pixel_values", "input_features", "input_values", "audio_values"):
        return
    yield "main:features", complete(request, {name: features(request)})
