"""What the arguments of a model's forward look like: token ids, masks, images, sounds, time series, features.

Everything is derived from the names in the forward's signature, `main_input_name` and numbers in the config. For one
more kind of input, add a builder to `singles.py` (one argument), or a family (arguments that come together, or have
several possible shapes) in a file of its own and to `_FAMILIES` here. Trying what is proposed is `memopt.walk.inputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from memopt.walk.arguments.features import anything
from memopt.walk.arguments.images import image_alone, image_in_text
from memopt.walk.arguments.request import (
    BATCH,
    LENGTH,
    Kwargs,
    Request,
    forward_parameters,
    has_config,
    inner_model,
)
from memopt.walk.arguments.sounds import sound
from memopt.walk.arguments.text import text

__all__ = ["BATCH", "LENGTH", "candidates", "forward_parameters", "has_config", "inner_model"]

_FAMILIES: tuple[Callable[[Request], Iterator[tuple[str, Kwargs]]], ...] = (
    text,
    image_alone,
    image_in_text,
    sound,
    anything,
)


def candidates(model: nn.Module, variant: str, seed: int) -> Iterator[tuple[str, Kwargs]]:
    """(``modality:detail``, kwargs) of every way to call the model worth trying, the likeliest first.

    The modality is ``main`` for what `main_input_name` asks for; tensors are on CPU, floating ones in fp32.
    """
    request = Request.of(model, variant, seed)
    for family in _FAMILIES:
        yield from family(request)
