"""Proposals for the arguments of a model's forward: token ids, masks, images, sounds, time series, features.

They are derived from the signature and the docstring of the forward, `main_input_name` and the config. For one more
kind of input, add a builder to `singles.py` (one argument), or a family (arguments that come together, or have several
possible shapes) in a file of its own and to `_FAMILIES` here. `memopt.walk.calls.inputs` tries the proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from memopt.walk.calls.arguments.codes import codes
from memopt.walk.calls.arguments.features import anything, as_documented, as_named, embedded
from memopt.walk.calls.arguments.images import image_alone, image_in_text
from memopt.walk.calls.arguments.request import Kwargs, Request, Size
from memopt.walk.calls.arguments.series import series
from memopt.walk.calls.arguments.sounds import sound, sound_beside_text, sound_in_text, wave_and_spectrogram
from memopt.walk.calls.arguments.text import text

_FAMILIES: tuple[Callable[[Request], Iterator[tuple[str, Kwargs]]], ...] = (
    text,
    image_alone,
    image_in_text,
    sound,
    sound_beside_text,
    sound_in_text,
    wave_and_spectrogram,
    series,
    codes,
    anything,
    embedded,
    as_documented,
    as_named,
)


def candidates(
    model: nn.Module, variant: str, seed: int, method: str = "", size: Size | None = None
) -> Iterator[tuple[str, Kwargs]]:
    """(``modality:detail``, kwargs) of every call of the model to try, the likeliest first.

    The modality is ``main`` for the argument `main_input_name`; tensors are on CPU, floating ones in fp32. With
    `method`, of every way to call that method: first with the arguments that it shares with the forward.
    """
    if method:
        request = Request.of(model, variant, seed, method, size)
        for name, kwargs in candidates(model, variant, seed, size=size):
            shared = {key: value for key, value in kwargs.items() if key in request.names}
            if request.main in shared and set(request.required) <= shared.keys():
                yield f"main:{name.partition(':')[2]}", shared
    else:
        request = Request.of(model, variant, seed, size=size)
    for family in _FAMILIES:
        # A config may have any value (a window of 0); a family that raises has no more proposals.
        try:
            yield from family(request)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if size and "can't allocate memory" in str(error):  # the size is too large, not the config odd
                raise
