"""Text with a placeholder token for each feature that a model computes from an image, a video or a sound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from memopt.errors import ModelError
from memopt.walk.aten.meta_reads import MetaReads
from memopt.walk.calls.arguments.images import FACTORS, image_forms, merge_of, side_of, video_forms
from memopt.walk.calls.arguments.request import PLACEHOLDERS, Forms, Kwargs, Request, parameters_of
from memopt.walk.calls.arguments.singles import complete
from memopt.walk.calls.arguments.sounds import sounds_of_one_length
from memopt.walk.calls.preserve import preserved

#: Forms of images that are tried with guessed numbers of features, where the model has no method that computes them.
_GUESSED_FORMS = 2
#: Forms that are tried with the number of features of an inner model.
_FORMS_OF_A_WRAPPER = 4


def image_in_text(request: Request) -> Forms:
    return _in_text(request, "image", image_forms)


def stated_images(request: Request) -> Forms:
    """Text with as many images as a step asks for; a ModelError if no token of the model stands for an image."""
    if not isinstance(request.setting(*PLACEHOLDERS["image"]), int):
        name = type(request.model).__name__
        raise ModelError(f"{name} has no token that stands for an image in text.", "Leave out --images.")
    return image_in_text(request)


def video_in_text(request: Request) -> Forms:
    """Text with a video, in the plain variant only: a video mostly runs the modules that an image runs."""
    if request.variant == "plain":
        only_videos = request.setting(*PLACEHOLDERS["image"]) is None
        yield from _in_text(request, "video", image_forms if only_videos else video_forms)


def sound_in_text(request: Request) -> Forms:
    return _in_text(request, "audio", sounds_of_one_length)


def _in_text(request: Request, modality: str, forms: Callable[[Request], Forms]) -> Forms:
    """Text with a placeholder for each feature that the model's method for `modality` computes from a form."""
    token = request.setting(*PLACEHOLDERS[modality])
    if "input_ids" not in request.names or not isinstance(token, int):
        return
    method = f"get_{modality}_features"
    tower = next((module for module in request.model.modules() if callable(getattr(module, method, None))), None)
    text, request = request, _a_row_for_each_image(request)
    measured = None if tower is None else _measured(request, tower, forms, method)
    if measured is not None:
        detail, pixels, features = measured
        # A wrapper's forward may take images in another form than the method of the inner model.
        others = [] if tower is request.model else list(islice(forms(request), _FORMS_OF_A_WRAPPER))
        for form, given in {detail: pixels, **{form: given for form, given in others if form != detail}}.items():
            if given := {name: value for name, value in given.items() if name in request.names}:
                yield form, _with_placeholders(text, given, token, modality, features)
    elif modality == "image":
        # If the method of a tower fails, a walk tries only the first guess: its error is reported.
        few = 1 if tower is not None and not request.step.images else None
        for detail, pixels in islice(forms(request), few or (None if request.step.images else _GUESSED_FORMS)):
            for count in _guesses(request, pixels)[:few]:
                if request.step.images and count >= text.length:
                    continue  # it cannot be the number: a row has too few tokens for it
                yield f"{detail} {count} features".lstrip(), _with_placeholders(text, pixels, token, modality, count)


def _a_row_for_each_image(request: Request) -> Request:
    """`request` with the images of all its rows as rows of their own, as models take them."""
    step = request.step
    return replace(request, size=replace(step, rows=step.rows * step.images, images=1)) if step.images else request


def _with_placeholders(request: Request, pixels: Kwargs, token: int, modality: str, features: int) -> Kwargs:
    """Text with `features` placeholders for each image, between the start and end tokens of an image, if there are any.
    A step's number of tokens counts them, if it says how many images there are: a ModelError if they are more."""
    opening, closing = (
        [value for value in [request.setting(f"{modality}_{end}", f"vision_{end}")] if isinstance(value, int)]
        for end in ("start_token_id", "end_token_id")
    )
    images, length = request.step.images, request.length
    middle = torch.tensor([*opening, *[token] * features, *closing] * max(1, images)).expand(request.batch, -1)
    if images:
        length -= middle.shape[1]
    if length < 1:
        raise ModelError(
            f"A row of {request.length} tokens is too short for images of {middle.shape[1]} tokens.",
            "Use a larger --seq, fewer --images or a smaller --image-side.",
        )
    ids = request.ids(length)
    ids = torch.cat([ids[:, :4], middle, ids[:, 4:]], 1)
    # Token types distinguish text, images and videos.
    types = (ids == token).long() * (2 if modality == "video" and "mm_token_type_ids" in request.names else 1)
    typed = {name: types for name in ("token_type_ids", "mm_token_type_ids") if name in request.names}
    return {"input_ids": ids, **pixels, **typed}


def _measured(
    request: Request, tower: nn.Module, forms: Callable[[Request], Forms], method: str
) -> tuple[str, Kwargs, int] | None:
    """(detail, arguments, features a row) of the first form with which `method` of `tower` runs."""
    accepted = parameters_of(tower, method)
    for detail, pixels in forms(replace(request, names={**accepted, **request.names})):
        # The method's first argument is the images, under any name.
        (name, values), *others = pixels.items()
        wanted = dict(list(accepted.items())[1:])
        given = complete(replace(request, names=wanted), {n: v for n, v in others if n in wanted or not accepted})
        try:
            features = _rows(_run(tower, method, values, given))
        except Exception:  # any failure means that this form does not fit
            continue
        if features and features % request.batch == 0:
            return detail, {name: values, **given}, features // request.batch
    return None


def _run(tower: nn.Module, method: str, values: torch.Tensor, kwargs: Kwargs) -> Any:
    weight = next((p for p in tower.parameters() if p.is_floating_point()), torch.empty(0))

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point():
            return value.to(weight)
        # The values of a grid are read, so it must not be on meta.
        return value if weight.is_meta else value.to(weight.device)

    given = {name: placed(value) for name, value in kwargs.items()}
    has_values = any(isinstance(value, torch.Tensor) and not value.is_meta for value in given.values())
    with preserved(tower), torch.no_grad(), MetaReads(keeps_values=has_values):
        return getattr(tower, method)(placed(values), **given)


def _rows(output: Any) -> int:
    """Number of feature vectors in the output of a feature method: one tensor, or one for each image."""
    for name in ("pooler_output", "last_hidden_state"):
        if (value := getattr(output, name, None)) is not None:
            output = value
            break
    tensors = output if isinstance(output, list | tuple) else [output]
    return sum(tensor.numel() // tensor.shape[-1] for tensor in tensors if isinstance(tensor, torch.Tensor))


def _guesses(request: Request, pixels: Kwargs) -> list[int]:
    """Likely numbers of features an image."""
    grids = [value for name, value in pixels.items() if name.endswith("grid_thw")]
    if grids:
        return [int(grids[0][0].prod()) // merge_of(request) ** 2]
    height, width = (pixels // request.patch_side for pixels in side_of(request))
    patches = height * width
    stated = request.setting("mm_tokens_per_image", "image_seq_length", "image_token_num", "num_image_tokens")
    merged = request.whole(*FACTORS, default=2)
    counts = [stated, patches, patches + 1, patches // merged**2, patches // 4, 1]
    return list(dict.fromkeys(count for count in counts if isinstance(count, int) and count > 0))
