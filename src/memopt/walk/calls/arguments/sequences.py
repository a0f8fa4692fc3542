"""Sequences of ids, of codes, of numbers and of hidden vectors, and other arguments that a docstring describes."""

from __future__ import annotations

import torch

from memopt.walk.calls.arguments.documented import described
from memopt.walk.calls.arguments.images import holds_images, image_forms, video_forms
from memopt.walk.calls.arguments.request import LENGTH, PADDING, PLACEHOLDERS, Forms, Kwargs, Request
from memopt.walk.calls.arguments.singles import box, context, features, value_of
from memopt.walk.calls.arguments.sounds import samples_of

_FLAT = "codes in batch rows"
#: Forms of images that are tried with text.
_FORMS = 4
#: Regions of an image, for models that take region features of another model.
_REGIONS = 6
#: Most steps in the first attempt: a model that cuts a series into patches takes fewer; the whole context comes last.
_LONG = 512
#: Arguments with a rule of their own, which `anything` and `as_named` do not make.
_KNOWN = ("input_ids", "pixel_values", "input_features", "input_values", "audio_values")
#: Settings for the width of a model's input, where it differs from the hidden size.
_WIDTHS = ("input_size", "input_dim", "feature_size", "mel_dim", "num_mel_bins")
#: Endings of names that are not given: labels, and arguments that replace others.
_NOT_GIVEN = ("labels", "inputs_embeds", "position_ids", "encoder_hidden_states", "encoder_attention_mask")


def text(request: Request) -> Forms:
    """Token ids, alone or with other arguments of text models."""
    if "input_ids" not in request.names:
        return
    # Models with a placeholder token take text without images; others (two towers) need both.
    alone = request.setting(*PLACEHOLDERS["image"], *PLACEHOLDERS["video"]) is not None
    beside = [] if alone else [*image_forms(request), *video_forms(request)][:_FORMS]
    if request.main != "input_ids" and "input_ids" not in request.required and not beside:
        return
    words = {"input_ids": request.ids(), **_region_features(request)}
    if "image_embeds_position_mask" in request.names:
        # The features of an image replace `taken` tokens, at any positions.
        taken = request.whole("latent_query_num", default=1)
        words["input_ids"] = request.ids(taken + request.length)
        words["image_embeds_position_mask"] = torch.zeros_like(words["input_ids"])
        words["image_embeds_position_mask"][:, :taken] = 1
    for detail, pixels in beside or [("", {})]:
        yield detail, {**words, **pixels}
    given = {**words, **(beside[0][1] if beside else {})}
    ids = given["input_ids"]
    # Some models require token types, or a mask, in train mode.
    typed = {name: torch.zeros_like(ids) for name in ("token_type_ids", "mm_token_type_ids") if name in request.names}
    if typed:
        yield "token types", {**given, **typed}
    if "attention_mask" in request.names and request.variant != "padded":
        yield "mask", {**given, **typed, "attention_mask": request.mask(ids.shape[-1])}
    if isinstance(end := request.setting("eos_token_id"), int):
        # Some heads read the position of the end of the sequence.
        ended = ids.clone()
        ended[:, -min(PADDING + 1, ended.shape[1])] = end
        yield "end of sequence", {**given, "input_ids": ended}
    yield "choices", {**given, "input_ids": ids.unsqueeze(1).expand(request.batch, 2, -1).contiguous()}
    if "bbox" in request.names:
        yield "boxes", {**given, "bbox": box(request)}


def _region_features(request: Request) -> Kwargs:
    """Features and positions of the regions of an image, from another model."""
    found: Kwargs = {}
    for name in ("visual_feats", "visual_embeds"):
        if name in request.names:
            width = request.whole("visual_feat_dim", "visual_embedding_dim", default=2048)
            found[name] = request.normal(request.batch, _REGIONS, width)
    if "visual_pos" in request.names:
        positions = request.normal(request.batch, _REGIONS, request.whole("visual_pos_dim", default=4))
        found["visual_pos"] = positions.sigmoid()
    return found


def flat_codes(request: Request) -> Forms:
    """Ids of several codebooks, one batch row for each, where a docstring says so. MusicGen also runs with other ids,
    which it reads as fewer or shorter rows."""
    name, books, beside = _codebooks(request)
    documented = described(request).get(name)
    if books > 1 and documented is not None and documented.shape[0] == request.batch * books:
        yield _FLAT, {**beside, name: request.tokens(request.batch * books, request.length)}


def codes(request: Request) -> Forms:
    """Ids of several codebooks at once: one column, one row, or one batch row for each codebook."""
    name, books, beside = _codebooks(request)
    if not name or books < 2:
        return
    batch, length = request.batch, request.length
    columns = {**beside, name: request.tokens(batch, length, books)}
    yield "codes in columns", columns
    if "encoder_hidden_states" in request.names:
        yield "codes and context", {**columns, "encoder_hidden_states": context(request)}
    yield "codes in rows", {**beside, name: request.tokens(batch, books, length)}
    yield _FLAT, {**beside, name: request.tokens(batch * books, length)}
    # A model that generates the codes of one frame one by one has as many positions as codebooks.
    frame: Kwargs = {"input_ids": request.tokens(batch, books)}
    if "last_hidden_state" in request.names:
        width = request.whole("input_size", default=request.hidden)
        frame["last_hidden_state"] = request.normal(batch, books, width)
    yield "codes of one frame", frame


def _codebooks(request: Request) -> tuple[str, int, Kwargs]:
    """The argument for ids of several codebooks, the number of codebooks, and the arguments beside it."""
    decoded = ("decoder_input_ids",) if request.config.is_encoder_decoder else ()
    name = request.first(*decoded, "input_ids")
    # In a model without images, channels are codebooks.
    channels = () if "pixel_values" in request.names else ("num_channels",)
    books = request.whole("num_codebooks", "n_codebooks", "num_code_groups", "num_vq", "n_vq", *channels, default=0)
    return name, books, {} if name == "input_ids" or books < 2 else {request.main: request.ids()}


def series(request: Request) -> Forms:
    """Time series: past values with their features, and future values and features."""
    if "past_values" not in request.names:
        return
    steps = request.whole("context_length", default=LENGTH)
    documented = described(request).get("past_values")
    dimensions = len(documented.shape) if documented else 3
    for length in dict.fromkeys((min(steps, _LONG), steps)):
        for channels in (dimensions == 3, dimensions != 3):
            form = "with channels" if channels else "of numbers"
            yield f"{length} steps {form}", _past_and_future(request, length, channels)


def _past_and_future(request: Request, length: int, channels: bool) -> Kwargs:
    width = (request.whole("num_input_channels", "input_size", default=1),) if channels else ()
    lags = request.setting("lags_sequence", default=()) if "past_time_features" in request.names else ()
    past = (request.batch, length + max(lags, default=0))
    future = (request.batch, request.whole("prediction_length", default=1))
    times = request.whole("num_time_features", default=0)
    given: Kwargs = {"past_values": request.normal(*past, *width)}
    observed = torch.ones(*past, *width)
    if request.variant == "padded":
        observed[-1, : length // 4] = 0
    if "past_time_features" in request.names:
        given |= {
            "past_time_features": request.normal(*past, times),
            "past_observed_mask": observed,
            "future_values": request.normal(*future, *width),
            "future_time_features": request.normal(*future, times),
        }
    elif request.variant == "padded":
        given |= {"past_observed_mask": observed, "observed_mask": observed}
    if categories := request.whole("num_static_categorical_features", default=0):
        given["static_categorical_features"] = torch.zeros(request.batch, categories, dtype=torch.long)
    if numbers := request.whole("num_static_real_features", default=0):
        given["static_real_features"] = request.normal(request.batch, numbers)
    given["past_values_padding"] = torch.zeros(past, dtype=torch.long)
    given["freq"] = torch.zeros(request.batch, 1, dtype=torch.long)
    return {name: value for name, value in given.items() if name in request.names}


def anything(request: Request) -> Forms:
    """Last resort: the main input, or the first required one, as a sequence of hidden vectors."""
    name = request.first(request.main, *request.required)
    if not name or name in _KNOWN:
        return
    batch, length, first = request.batch, request.length, request.first_width
    yield "features", {name: features(request)}
    if first == 1:
        yield "wave", {name: request.normal(batch, 1, samples_of(request)[0])}
    for width in dict.fromkeys(filter(None, (first, request.whole(*_WIDTHS, default=0)))):
        yield f"features of {width}", {name: request.normal(batch, length, width)}
        yield f"channels of {width}", {name: request.normal(batch, width, length)}


def embedded(request: Request) -> Forms:
    """Hidden vectors instead of token ids; then the main input with hidden vectors to attend to."""
    if "inputs_embeds" in request.names and "input_ids" not in request.required:
        yield "embedded", {"inputs_embeds": features(request)}
    main = request.first("input_ids", "inputs_embeds", *request.required)
    if "encoder_hidden_states" in request.names and main and not request.config.is_encoder_decoder:
        vectors = context(request)
        yield "with context", {main: value_of(request, main), "encoder_hidden_states": vectors}


def as_documented(request: Request) -> Forms:
    """Documented arguments: those not called optional, then these with any missing batch dimension added, then all."""
    more = {n: d for n, d in described(request).items() if not n.endswith(_NOT_GIVEN)}
    if request.step.side is not None:  # a document has images of the side in the config
        more = {n: d for n, d in more.items() if not holds_images([n])}
    wanted = {n: d for n, d in more.items() if not d.optional}
    rows = {n for n, d in wanted.items() if d.of_one_row}
    for detail, chosen, batched in (
        ("as documented", wanted, set[str]()),
        *([("as documented for a row", wanted, rows)] if rows else []),
        ("all that is documented", more, set[str]()),
    ):
        given = {name: description.value(request, name) for name, description in chosen.items()}
        given |= {name: given[name].expand(request.batch, *given[name].shape).clone() for name in batched}
        if request.main in request.names and (value := value_of(request, request.main)) is not None:
            given = {request.main: value, **given}
        if given:
            yield detail, given


def as_named(request: Request) -> Forms:
    """The main input, with other arguments whose names show their kind: counts, ids, hidden vectors."""
    endings = ("ids", "embeds", "features", "states")
    names = [name for name in request.names if name.startswith("num_") or name.endswith(endings)]
    more = {name: value_of(request, name) for name in names if not name.endswith((*_NOT_GIVEN, "input_ids", *_KNOWN))}
    if more and request.main in request.names:
        yield "as named", {request.main: value_of(request, request.main), **more}
