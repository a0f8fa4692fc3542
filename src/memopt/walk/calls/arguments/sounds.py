"""Sounds: waves and spectrograms, alone and with text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from memopt.walk.calls.arguments.documented import described
from memopt.walk.calls.arguments.images import in_text
from memopt.walk.calls.arguments.request import Kwargs, Request
from memopt.walk.calls.arguments.singles import complete

#: Names of spectrograms, likeliest first, and of the masks that come with them.
SPECTROGRAMS = ("input_features", "audio_mel", "audio_input_features")
_MASKS = ("input_features_mask", "feature_attention_mask", "audio_mel_mask", "audio_attention_mask")
WAVES = ("input_values", "audio_values")
#: Settings for the placeholder token of a sound's features in text.
AUDIO_TOKENS = ("audio_token_id", "audio_token_index")
_BINS = (
    "num_mel_bins",
    "n_mels",
    "n_mel_bins",
    "mel_bins",
    "input_feat_per_channel",
    "feature_size",
    "input_feat_size",
    "input_dim",
    "mel_dim",
)
#: Divisible by the strides and frames of most models that read waves.
_SAMPLES, _ROWS = 3840, 128
#: Samples and rows of a sound in a training step: ten seconds, at 16,000 samples and 100 rows a second.
_STEP_SAMPLES, _STEP_ROWS = 42 * _SAMPLES, 8 * _ROWS


def wave_and_spectrogram(request: Request) -> Iterator[tuple[str, Kwargs]]:
    """Wave and spectrogram together, for a codec with an acoustic and a semantic encoder."""
    spectrogram = next((name for name in SPECTROGRAMS if name in request.required), None)
    wave = next((name for name in WAVES if name in request.names), None)
    if spectrogram and wave:
        for samples in samples_of(request):
            frames = samples // request.whole("hop_length", default=320)
            for width in _widths(request):
                both = {
                    wave: request.normal(request.batch, 1, samples),
                    spectrogram: request.normal(request.batch, frames, width),
                }
                yield f"main:wave and {frames} rows", complete(request, both)


def sound(request: Request) -> Iterator[tuple[str, Kwargs]]:
    if "input_ids" not in request.required:
        for detail, kwargs in spectrograms(request):
            yield f"main:{detail}", complete(request, kwargs)
    for name in WAVES:
        if name in request.names:
            yield from _waves(request, name)


def sound_beside_text(request: Request) -> Iterator[tuple[str, Kwargs]]:
    """Two towers: text for one, a sound for the other."""
    if "input_ids" in request.names and not has_audio_token(request):
        for detail, kwargs in spectrograms(request):
            yield f"main:text and {detail}", complete(request, {"input_ids": request.ids(), **kwargs})


def sound_in_text(request: Request) -> Iterator[tuple[str, Kwargs]]:
    """A sound with text that has a placeholder token for each of its features."""
    if "input_ids" in request.names:
        yield from in_text(request, "audio", _unpadded, "get_audio_features", AUDIO_TOKENS)


def _unpadded(request: Request) -> Iterator[tuple[str, Kwargs]]:
    """Sounds of one length, so that each row has as many features."""
    request = replace(request, variant="plain")
    # A feature method often requires the mask that is optional in the forward.
    yield from sorted(spectrograms(request), key=lambda form: not any(name.endswith("mask") for name in form[1]))
    yield from _framed_waves(request)
    if (coded := described(request).get("audio_input_ids")) is not None:
        yield "codes", {"audio_input_ids": coded.value(request, "audio_input_ids")}


def has_audio_token(request: Request) -> bool:
    return request.setting(*AUDIO_TOKENS) is not None


def spectrograms(request: Request) -> Iterator[tuple[str, Kwargs]]:
    """(detail, arguments) of a spectrogram a row, in every layout, with its mask or its lengths."""
    name = next((name for name in SPECTROGRAMS if name in request.names), None)
    if name is None:
        return
    # `attention_mask` masks the text where there is text, else the sound.
    masks = (*_MASKS, *(() if "input_ids" in request.names else ("attention_mask",)))
    mask = next((name for name in masks if name in request.names), None)
    plain, masked = [], []
    for length in _lengths(request):
        for width in _widths(request):
            for layout, shape in (("frames", (width, length)), ("rows", (length, width))):
                form: Kwargs = {name: request.normal(request.batch, *shape)}
                if mask not in request.required:
                    plain.append((f"{length} {layout}", form))
                if mask is not None:
                    ones = request.ones(mask, request.batch, length)
                    if request.variant == "padded":
                        ones[-1, -length // 4 :] = 0
                    masked.append((f"{length} {layout} and mask", {**form, mask: ones}))
    yield from plain
    yield from masked
    length, bins = _lengths(request)[-1], _widths(request)[0]
    if "feature_lens" in request.names:
        lengths = torch.full((request.batch,), length)
        yield f"{length} packed", {name: request.normal(bins, request.batch * length), "feature_lens": lengths}
    yield f"{length} rows as an image", {name: request.normal(request.batch, 1, length, bins)}


def _widths(request: Request) -> list[int]:
    """Widths of a spectrogram: by the config, and by the first layer."""
    bins, first = request.whole(*_BINS, default=80), request.first_width
    return list(dict.fromkeys((bins, first if first > 1 else bins)))


def _lengths(request: Request) -> list[int]:
    positions = request.whole("max_source_positions", default=0)
    chunk = 2 * request.whole("n_window", default=1)
    stated = [2 * positions] if 0 < positions <= 1500 else []
    lengths = (_STEP_ROWS, _ROWS) if request.size else (_ROWS,)
    return list(dict.fromkeys((*stated, *(chunk * math.ceil(length / chunk) for length in lengths))))


def _framed_waves(request: Request) -> Iterator[tuple[str, Kwargs]]:
    samples = samples_of(request)[0]
    for name in WAVES:
        if name in request.names:
            masks = {n: request.ones(n, request.batch, samples) for n in ("padding_mask",) if n in request.names}
            yield "wave", {name: request.normal(request.batch, samples), **masks}
            yield "wave with channel", {name: request.normal(request.batch, 1, samples), **masks}


def samples_of(request: Request) -> list[int]:
    """Lengths of a wave, the likeliest first."""
    # Models that cut the wave into frames have the samples of a frame in their config, as a field or a property.
    frame = getattr(request.config, "samples_per_token", None) or getattr(request.config, "hop_length", None)
    frame = frame if isinstance(frame, int) and frame > 0 else 1
    odd = frame if request.variant == "odd" else 0
    lengths = (_STEP_SAMPLES, _SAMPLES) if request.size else (_SAMPLES,)
    return [frame * math.ceil(length / frame) + odd for length in lengths]


def _waves(request: Request, name: str) -> Iterator[tuple[str, Kwargs]]:
    for samples in samples_of(request):
        kwargs: Kwargs = {name: request.normal(request.batch, samples)}
        if request.variant == "padded" and "attention_mask" in request.names:
            kwargs["attention_mask"] = torch.ones(request.batch, samples, dtype=torch.long)
            kwargs["attention_mask"][-1, -1500:] = 0
        yield "main:wave", complete(request, kwargs)
        yield "main:wave with channel", complete(request, {name: request.normal(request.batch, 1, samples)})
    length = request.whole("max_length", default=1024)
    bins = request.whole("num_mel_bins", default=128)
    yield "main:spectrogram", complete(request, {name: request.normal(request.batch, length, bins)})
