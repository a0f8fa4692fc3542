"""Arguments of a model without a transformers config, from the names in its signature and from its layers.

The name of an argument gives its kind of tensor (`ARGUMENTS`); for the main argument, the first layers do (`MAIN`), and
for token ids the embeddings. `fitted` takes the width of a tensor from the layer that refuses another width.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from memopt.torch_compat import BATCH_NORM_CLASSES
from memopt.walk.calls.arguments.request import BATCH, LENGTH, ODD_LENGTH, Forms, Kwargs, parameters_of

#: Widths that no layer has: one of them in a layer's input shows which argument it comes from.
_UNKNOWN = (5, 37, 41, 43, 47, 53, 59, 61)
#: Arguments for the labels of a loss; lengths of token ids by variant.
_TARGETS = re.compile(r"(.*_)?(targets?|labels?|y)")
_LENGTHS = {"plain": LENGTH, "odd": ODD_LENGTH}
#: Text beside an image, in tokens.
_TEXT, _ODD_TEXT = 8, 7
#: Frames of a video; side of an image in tokens, where it is a sequence of patches.
_FRAMES, _ROWS = 2, 4
#: Fields and attributes that hold the side of an image, in pixels; further sides that are tried.
_SIDES = ("img_size", "image_size", "sample_size", "input_size")
_USUAL_SIDES = (64, 224)
#: Sides of models of one size that no attribute states, tried after all forms with the sides above.
_OTHER_SIDES = (32, 256, 384, 128, 96, 512, 28)
_MOST_REPAIRS = 12


@dataclass(frozen=True)
class Foreign:
    """A model whose arguments are guessed."""

    model: nn.Module
    names: Mapping[str, inspect.Parameter]
    settings: Mapping[str, Any]
    """Fields of its ``config``, which may be a mapping, a dataclass or any object."""
    text: int
    generator: torch.Generator

    @classmethod
    def of(cls, model: nn.Module, variant: str, seed: int) -> Foreign:
        config = getattr(model, "config", None)
        settings = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
        text = _ODD_TEXT if variant == "odd" else _TEXT
        return cls(model, parameters_of(model), settings, text, torch.Generator().manual_seed(seed))

    @property
    def required(self) -> list[str]:
        return [name for name, parameter in self.names.items() if parameter.default is inspect.Parameter.empty]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def whole(self, name: str, default: int) -> int:
        value = self.settings.get(name)
        return value if isinstance(value, int) else default


Run = Callable[[Kwargs], Any]
Build = Callable[[Foreign], Any]

#: Type of a first layer -> builders of the main argument: images, frames of a video, a sequence, a wave.
MAIN: dict[type[nn.Module], tuple[Callable[[Foreign, int], Tensor], ...]] = {
    nn.Conv3d: (lambda it, side: it.normal(BATCH, _UNKNOWN[0], _FRAMES, side, side),),
    nn.Conv2d: (
        lambda it, side: it.normal(BATCH, _UNKNOWN[0], side, side),
        lambda it, side: it.normal(BATCH, _FRAMES, _UNKNOWN[0], side, side),
    ),
    nn.Conv1d: (lambda it, side: it.normal(BATCH, _UNKNOWN[0], side),),
    nn.Linear: (
        lambda it, side: it.normal(BATCH, _FRAMES * _ROWS**2, _UNKNOWN[0]),
        lambda it, side: it.normal(BATCH, _UNKNOWN[0]),
        lambda it, side: it.normal(BATCH, _UNKNOWN[0], side, side),
    ),
}


def _axes(it: Foreign) -> int:
    sizes = it.settings.get("axes_dims_rope")
    return len(sizes) if isinstance(sizes, tuple | list) else 3


def _conditions(it: Foreign) -> dict[str, Any]:
    """Conditions of UNets and DiTs besides the text: a pooled text and sizes, or no resolution and aspect ratio."""
    if it.settings.get("addition_embed_type") != "text_time":
        return {"resolution": None, "aspect_ratio": None}
    times = 6 * it.whole("addition_time_embed_dim", 256)
    width = max(1, it.whole("projection_class_embeddings_input_dim", times + 1) - times)
    return {"text_embeds": it.normal(BATCH, width), "time_ids": torch.ones(BATCH, 6)}


def _ids(it: Foreign) -> Tensor | None:
    """Token ids of a text beside an image, as long as the model's ``context_length``; None where it embeds none."""
    tables = [module.num_embeddings for module in it.model.modules() if isinstance(module, nn.Embedding)]
    stated = getattr(it.model, "context_length", None)
    shape = (BATCH, stated if isinstance(stated, int) and 0 < stated <= 1024 else it.text)
    return torch.randint(0, min(tables), shape, generator=it.generator) if tables else None


#: Pattern of a name -> builder of the argument; the first pattern that matches counts. Arguments without a match are
#: left out.
ARGUMENTS: tuple[tuple[re.Pattern[str], Build], ...] = tuple(
    (re.compile(pattern), build)
    for pattern, build in (
        (r"(img|image)_ids", lambda it: torch.ones(_FRAMES * _ROWS**2, _axes(it))),
        (r"(txt|text)_ids", lambda it: torch.ones(it.text, _axes(it))),
        (r"(img|image)_shapes", lambda it: [[(_FRAMES, _ROWS, _ROWS)]] * BATCH),
        (r"num_frames", lambda it: _FRAMES),
        (r"height|width", lambda it: _ROWS),
        (r"added_cond_kwargs", _conditions),
        (
            r"(encoder_(hidden_states|attention)|text|prompt|caption)\w*mask",
            lambda it: torch.ones(BATCH, it.text).long(),
        ),
        (
            r"encoder_hidden_states|context|(text|prompt|caption)_(embeds|states)",
            lambda it: it.normal(BATCH, it.text, 1),
        ),
        (r"pooled_(projections|embeds)\w*", lambda it: it.normal(BATCH, 1)),
        (r"(time_?steps?|times?|t|sigmas?)", lambda it: torch.ones(BATCH).long()),
        (r"guidance", lambda it: torch.ones(BATCH) if it.settings.get("guidance_embeds", True) else None),
        (r"texts?|captions?|text_(tokens|ids)", _ids),
        (r"class_labels|labels|y", lambda it: torch.zeros(BATCH).long()),
    )
)


def foreign(model: nn.Module, variant: str, seed: int, run: Run) -> Forms:
    """Forms in which to call a model without a transformers config; forms with one detail are alternatives.
    `run` calls the model: to fit widths, and to find the first image or sequence that runs."""
    it = Foreign.of(model, variant, seed)
    reads_images = any(isinstance(module, nn.Conv2d | nn.Conv3d) for module in model.modules())
    yield from _of_the_model_inside(it, variant, seed)
    if not reads_images:
        yield from _token_ids(it, variant, seed)
    first: Kwargs | None = None
    for given in _tensors(it) if variant in ("plain", "odd") else ():
        if fitted(model, given, run):
            yield "", given
            break
        first = first or given
    else:
        if first is not None:
            yield "", first
    if reads_images:
        yield from _token_ids(it, variant, seed)


def _token_ids(it: Foreign, variant: str, seed: int) -> Forms:
    """Ids for every required argument of the forward, or for its first argument; then also for its targets, if any.
    Forms with one detail are alternatives: rows of tokens, then tokens without a dimension for rows."""
    tables = [module.num_embeddings for module in it.model.modules() if isinstance(module, nn.Embedding)]
    length = _LENGTHS.get(variant)
    if not tables or not it.names or length is None:
        return
    wanted = it.required or list(it.names)[:1]
    targets = [name for name in it.names if _TARGETS.fullmatch(name) and name not in wanted]
    generator = torch.Generator().manual_seed(seed)
    for detail, names in (("", wanted), ("with targets", [*wanted, *targets])) if targets else (("", wanted),):
        for shape in ((BATCH, length), (length,)):
            yield detail, {name: torch.randint(0, min(tables), shape, generator=generator) for name in names}


def _tensors(it: Foreign) -> Iterator[Kwargs]:
    """The main argument from the first layers, with all other arguments by their names, then with the required ones."""
    main = next(iter(it.names), "")
    if not main:
        return
    tried = set[tuple[object, ...]]()
    for sides in (_sides(it), _OTHER_SIDES):
        for chosen in dict.fromkeys((tuple(it.names), tuple(it.required))):
            for build, side in product(_main_kinds(it.model), sides):
                value = build(it, side)
                if (chosen, value.shape) not in tried:
                    tried.add((chosen, value.shape))
                    yield {main: value, **_others(it, [name for name in chosen if name != main])}


def _others(it: Foreign, names: list[str]) -> Kwargs:
    found: Kwargs = {}
    unknown = iter(_UNKNOWN[1:])
    for name in names:
        build = next((build for pattern, build in ARGUMENTS if pattern.fullmatch(name)), None)
        value = build(it) if build else None
        if isinstance(value, Tensor) and value.shape[-1] == 1 and value.is_floating_point():
            value = it.normal(*value.shape[:-1], next(unknown))
        if value is not None:
            found[name] = value
    return found


def _of_the_model_inside(it: Foreign, variant: str, seed: int) -> Forms:
    """Arguments of a transformers model inside: as named arguments of its wrapper, or as one mapping."""
    from memopt.walk.calls.arguments import candidates

    inner = next((each for each in it.model.modules() if isinstance(each, PreTrainedModel)), None)
    for name, kwargs in candidates(inner, variant, seed) if inner is not None else ():
        if not name.startswith("main:"):
            continue
        kwargs.pop("use_cache", None)
        own = {key: value for key, value in kwargs.items() if key in it.names}
        if own and set(it.required) <= own.keys():
            yield "", own
        elif len(it.required) == 1 and not own:
            ids = kwargs.get("input_ids")
            mask = {} if ids is None else {"attention_mask": torch.ones_like(ids)}
            yield "", {it.required[0]: {**mask, **kwargs}}


def _main_kinds(model: nn.Module) -> Iterator[Callable[[Foreign, int], Tensor]]:
    """Builders of the main argument, those of the first layer first."""
    for kind in dict.fromkeys(kind for module in model.modules() for kind in MAIN if isinstance(module, kind)):
        yield from MAIN[kind]


def _sides(it: Foreign) -> Sequence[int]:
    """Sides of an image, the likeliest first."""
    holders: list[Any] = [vars(module) for module in it.model.modules()]
    holders += [it.settings, getattr(it.model, "pretrained_cfg", None) or {}]
    stated = [holder[name] for holder in holders for name in _SIDES if name in holder]
    sides = [value[-1] if isinstance(value, tuple | list) and value else value for value in stated]
    found = [side for side in sides if isinstance(side, int) and 0 < side <= 1024]
    return list(dict.fromkeys([*found, *_USUAL_SIDES]))


# --- widths ---------------------------------------------------------------------------------------------------------


class _Refused(BaseException):
    """A layer's input has another width than the layer takes. No handler of `Exception` in a model swallows it."""

    def __init__(self, met: int, wanted: int) -> None:
        super().__init__(met, wanted)
        self.met, self.wanted = met, wanted


def fitted(model: nn.Module, given: Kwargs, run: Run) -> bool:
    """Whether `model` runs with `given`; unknown widths in it are replaced by the widths that layers take: a forward
    stops at the first layer that refuses a width. Concatenated pixels or arguments give a multiple of one."""
    with ExitStack() as hooks:
        for module in model.modules():
            for dimension, width in _wanted(module):
                refuse = partial(_refuse, dimension=dimension, wanted=width)
                hooks.enter_context(module.register_forward_pre_hook(refuse))
        for _ in range(_MOST_REPAIRS):
            try:
                run(given)
            except _Refused as refusal:
                if not _repair(given, refusal):
                    return False
            except Exception:  # a model may raise anything for wrong inputs
                return False
            else:
                return True
    return False


#: Modules whose weight has a number for each channel in dimension 1, not for the last dimension.
_OVER_CHANNELS = (*BATCH_NORM_CLASSES, nn.GroupNorm, nn.PReLU)


def _wanted(module: nn.Module) -> Iterator[tuple[int, int]]:
    """(dimension, width) that the input of `module` needs."""
    weight, own = module._parameters.get("weight"), [each for each in module._parameters.values() if each is not None]
    if isinstance(module, nn.Linear):
        yield -1, module.in_features
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        yield 1 - module.weight.dim(), module.in_channels
    elif weight is not None and weight.dim() == 1 and not isinstance(module, _OVER_CHANNELS):
        yield -1, weight.shape[0]
    elif weight is None and isinstance(module, nn.LayerNorm | nn.RMSNorm):
        yield -1, module.normalized_shape[-1]
    elif own and all(each.dim() > 2 and 1 < each.numel() == each.shape[1] for each in own):
        yield 1 - own[0].dim(), own[0].shape[1]  # a norm over channels: its weight has the shape (1, channels, 1, 1)


def _refuse(module: nn.Module, args: tuple[Any, ...], dimension: int, wanted: int) -> None:
    if args and isinstance(args[0], Tensor) and args[0].dim() >= -dimension and args[0].shape[dimension] != wanted:
        raise _Refused(args[0].shape[dimension], wanted)


def _repair(given: Kwargs, refusal: _Refused) -> bool:
    """Give an argument the width that the layer takes; False if no argument has an unknown width of that size."""
    for name, value in given.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        for dimension, width in enumerate(value.shape):
            times, rest = divmod(refusal.met, width)
            if width in _UNKNOWN and not rest and refusal.wanted % times == 0:
                shape = [*value.shape[:dimension], refusal.wanted // times, *value.shape[dimension + 1 :]]
                given[name] = torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))
                return True
    return False
