"""Proposals for the arguments of a model's forward: token ids, masks, images, sounds, time series, features.

They are derived from the signature and the docstring of the forward, `main_input_name` and the config. For one more
kind of input, add a rule to `RULES`; for one more argument beside it, a line to `ARGUMENTS` in `singles.py`.
`python -m benchmarks.walk --inputs` prints how many model types each rule serves. `memopt.walk.calls.inputs` tries the
proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from memopt.walk.calls.arguments.images import image_alone
from memopt.walk.calls.arguments.in_text import image_in_text, sound_in_text, stated_images, video_in_text
from memopt.walk.calls.arguments.request import Forms, Kwargs, Request, Size
from memopt.walk.calls.arguments.sequences import (
    anything,
    as_documented,
    as_named,
    codes,
    embedded,
    flat_codes,
    series,
    text,
)
from memopt.walk.calls.arguments.singles import complete
from memopt.walk.calls.arguments.sounds import sound, sound_beside_text

#: (modality, the forms in which it may be given). The modality is ``main`` for the argument `main_input_name`.
RULES: tuple[tuple[str, Callable[[Request], Forms]], ...] = (
    ("main", flat_codes),
    ("main", text),
    ("main", image_alone),
    ("image", image_in_text),
    ("video", video_in_text),
    ("main", sound),
    ("main", sound_beside_text),
    ("audio", sound_in_text),
    ("main", series),
    ("main", codes),
    ("main", anything),
    ("main", embedded),
    ("main", as_documented),
    ("main", as_named),
)


def candidates(
    model: nn.Module, variant: str, seed: int, method: str = "", size: Size | None = None
) -> Iterator[tuple[str, Kwargs]]:
    """(``modality:detail``, kwargs) of every call of the model to try, the likeliest first. Tensors are on CPU,
    floating ones in fp32. With `method`, the calls are calls of that method, first with the arguments that it shares
    with the forward."""
    if method:
        request = Request.of(model, variant, seed, method, size)
        for name, kwargs in candidates(model, variant, seed, size=size):
            shared = {key: value for key, value in kwargs.items() if key in request.names}
            if request.main in shared and set(request.required) <= shared.keys():
                yield f"main:{name.partition(':')[2]}", shared
    else:
        request = Request.of(model, variant, seed, size=size)
    for modality, rule in (("image", stated_images),) if request.step.images else RULES:
        # A config may have any value (a window of 0); a rule that raises has no more proposals.
        try:
            for detail, given in rule(request):
                yield f"{modality}:{detail}", complete(request, given)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if size and "can't allocate memory" in str(error):  # the size is too large; the config is not at fault
                raise
