"""Batches that a model's own processor makes from synthetic data: an image, a second of noise, a short text.

They are for models whose inputs cannot be derived from the config, if the folder has a processor. A processor that
fails (it lacks a library, a file, a template) is no error: its batch is left out.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoProcessor

from memopt.walk.calls.arguments.request import BATCH, Request, forward_parameters
from memopt.walk.calls.arguments.singles import complete

_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_TEXT = "A boat leaves the harbour."
_SIDE = 224
_SAMPLING_RATE = 16_000


def has_processor(folder: Path) -> bool:
    """Whether `folder` has a processor, or a part of one."""
    return any((folder / name).is_file() for name in _FILES)


def processed_batches(model: nn.Module, folder: Path, *, trust_remote_code: bool = False) -> Iterator[dict[str, Any]]:
    """Batches for `model`, made by the processor in its folder; fullest first, equal in every call."""
    if not has_processor(folder):
        return
    names = forward_parameters(model)
    processor = _processor(folder, trust_remote_code)
    for arguments in _synthetic(processor) if callable(processor) else ():
        given: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # a processor may raise anything
            encoded = dict(processor(**arguments, return_tensors="pt"))
            given = {name: value for name, value in encoded.items() if name in names}
        if given:
            yield complete(Request.of(model, "plain", 0), given)


def _processor(folder: Path, trust_remote_code: bool) -> Any:
    """The processor, or the part of it that loads (a folder may lack a tokenizer), or None."""
    loaders: tuple[Any, ...] = (AutoProcessor, AutoFeatureExtractor, AutoImageProcessor)
    for auto in loaders:
        with contextlib.suppress(Exception):
            return auto.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return None


def _synthetic(processor: Any) -> Iterator[dict[str, Any]]:
    """Keyword arguments for `processor`: all kinds of data that it reads together, then text alone."""
    generator = np.random.default_rng(0)
    names = inspect.signature(processor.__call__).parameters
    data: dict[str, Any] = {}
    if image := next((name for name in ("images", "image") if name in names), None):
        data[image] = [generator.integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8) for _ in range(BATCH)]
    if sound := next((name for name in ("audio", "audios", "raw_speech", "raw_audio") if name in names), None):
        rate = _sampling_rate(processor)
        data[sound] = [generator.standard_normal(rate).astype(np.float32) for _ in range(BATCH)]
        data["sampling_rate"] = rate
    data = {name: value for name, value in data.items() if _reads(processor, name)}
    if "text" not in names or getattr(processor, "tokenizer", processor) is None:
        yield data
        return
    for text in dict.fromkeys(_texts(processor, image if image in data else None, sound if sound in data else None)):
        yield {"text": [text] * BATCH, "padding": True, **data}
    yield {"text": [_TEXT] * BATCH, "padding": True}


def _reads(processor: Any, name: str) -> bool:
    """Whether a part of `processor` reads `name`; the processor itself accepts all kinds of data in any case."""
    if not hasattr(processor, "tokenizer"):
        return True
    parts = ("image_processor",) if name.startswith("image") else ("feature_extractor", "audio_processor")
    return any(getattr(processor, part, None) is not None for part in parts)


def _sampling_rate(processor: Any) -> int:
    parts = (processor, *(getattr(processor, name, None) for name in ("feature_extractor", "audio_processor")))
    rates = (getattr(part, "sampling_rate", None) for part in parts)
    return next((rate for rate in rates if isinstance(rate, int)), _SAMPLING_RATE)


def _texts(processor: Any, image: str | None, sound: str | None) -> Iterator[str]:
    """The text with placeholders from the processor's chat template, then from its tokens, then without any."""
    kinds = [kind for kind, given in (("image", image), ("audio", sound)) if given]
    content = [*({"type": kind} for kind in kinds), {"type": "text", "text": _TEXT}]
    with contextlib.suppress(Exception):  # it has no template, or one that takes other messages
        yield str(processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False))
    holders = (processor, getattr(processor, "tokenizer", None))
    tokens = [next(filter(None, (getattr(h, f"{kind}_token", None) for h in holders)), "") for kind in kinds]
    yield "".join(map(str, tokens)) + _TEXT
    yield _TEXT
