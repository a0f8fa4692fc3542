"""Anything else: as a sequence of hidden vectors, and as the forward's docstring describes it."""

from __future__ import annotations

from collections.abc import Iterator

from memopt.walk.calls.arguments.documented import described
from memopt.walk.calls.arguments.request import Kwargs, Request
from memopt.walk.calls.arguments.singles import complete, features, value_of
from memopt.walk.calls.arguments.sounds import samples_of

_KNOWN = ("input_ids", "pixel_values", "input_features", "input_values", "audio_values")
#: Settings for the width of a model's input, where it differs from the hidden size.
_WIDTHS = ("input_size", "input_dim", "feature_size", "mel_dim", "num_mel_bins")
#: Labels, and arguments that replace others; also with a prefix.
_NOT_GIVEN = ("labels", "inputs_embeds", "position_ids", "encoder_hidden_states", "encoder_attention_mask")


def anything(request: Request) -> Iterator[tuple[str, Kwargs]]:
    """Last resort: the main input, or the first required one, as a sequence of hidden vectors."""
    name = request.main if request.main in request.names else next(iter(request.required), None)
    if name is None or name in _KNOWN:
        return
    yield "main:features", complete(request, {name: features(request)})
    if request.first_width == 1:
        yield "main:wave", complete(request, {name: request.normal(request.batch, 1, samples_of(request)[0])})
    for width in dict.fromkeys(filter(None, (request.first_width, request.whole(*_WIDTHS, default=0)))):
        yield (
            f"main:features of {width}",
            complete(request, {name: request.normal(request.batch, request.length, width)}),
        )
        yield (
            f"main:channels of {width}",
            complete(request, {name: request.normal(request.batch, width, request.length)}),
        )


def embedded(request: Request) -> Iterator[tuple[str, Kwargs]]:
    """Hidden vectors instead of token ids, and with others to attend to."""
    if "inputs_embeds" in request.names and "input_ids" not in request.required:
        yield "main:embedded", complete(request, {"inputs_embeds": features(request)})
    main = next((name for name in ("inputs_embeds", *request.required) if name in request.names), None)
    main = "input_ids" if "input_ids" in request.names else main
    if "encoder_hidden_states" in request.names and main is not None and not request.config.is_encoder_decoder:
        states = request.normal(request.batch, request.length, request.context_width)
        yield "main:with context", complete(request, {main: value_of(request, main), "encoder_hidden_states": states})


def as_documented(request: Request) -> Iterator[tuple[str, Kwargs]]:
    """Arguments that the docstring does not call optional; the same with a batch dimension where it has none; all."""
    descriptions = described(request)
    wanted = {n: d for n, d in descriptions.items() if not d.optional and not n.endswith(_NOT_GIVEN)}
    more = {n: d for n, d in descriptions.items() if not n.endswith(_NOT_GIVEN)}
    for detail, chosen, batched in (
        ("as documented", wanted, False),
        ("as documented for a row", wanted, True),
        ("all that is documented", more, False),
    ):
        rows = {name for name, description in chosen.items() if batched and description.of_one_row}
        if batched and not rows:
            continue
        given = {name: description.value(request, name) for name, description in chosen.items()}
        given |= {name: given[name].expand(request.batch, *given[name].shape).clone() for name in rows}
        if request.main in request.names and (value := value_of(request, request.main)) is not None:
            given = {request.main: value, **given}
        if given:
            yield f"main:{detail}", complete(request, given)


def as_named(request: Request) -> Iterator[tuple[str, Kwargs]]:
    """Other arguments, by what such names mean: counts, ids, hidden vectors."""
    endings = ("ids", "embeds", "features", "states")
    names = [name for name in request.names if name.startswith("num_") or name.endswith(endings)]
    more = {name: value_of(request, name) for name in names if not name.endswith((*_NOT_GIVEN, "input_ids", *_KNOWN))}
    if more and request.main in request.names:
        yield "main:as named", complete(request, {request.main: value_of(request, request.main), **more})
