"""Check whether the tensors in the files belong to the model of the config, by name and shape, and which is which.

The loader of transformers runs on the meta device with the names and shapes of the headers, so its renamings,
conversions, ties and lists of ignored names apply as in a real load. No weight is read.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from memopt.checkpoint.sources.header import FLOAT_DTYPES
from memopt.checkpoint.sources.source import CheckpointSource
from memopt.errors import ModelError, first_of
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import model_class, model_classes, named_classes, one_line
from memopt.walk.models.limits import MAX_PARTS, bounded_build, watched_build

Shape = tuple[int, ...]
#: Prefixes of dtypes of 8 bits and fewer, whose values are codes of quantised weights.
_CODES = ("F8_", "F6_", "F4")
#: The most differences that a message names.
SHOWN = 3
#: A model may have 4 parts for each tensor in the files and 4 times their elements, plus these for a head.
_SPARE_PARTS, _SPARE_ELEMENTS = 5_000, 10**9


@dataclass(frozen=True)
class Names:
    """How the files differ from the model of the config, in the model's names."""

    model: str
    """Name of the model's class."""
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[tuple[str, Shape, Shape], ...] = ()
    """(name, shape in the files, shape in the model)."""
    random: tuple[str, ...] = ()
    """Missing tensors of a head or an optional part, which is no error; transformers draws them at random."""
    unread: tuple[str, ...] = ()
    """Tensors in the files that belong to another head, or lie beside the weights of a complete model, which is no
    error; this class does not load them."""

    @property
    def wrong(self) -> tuple[str, ...]:
        """A phrase for every difference that shows that the files are another model's."""
        return (
            *(f"{name} is missing" for name in self.missing),
            *(f"{name} is not in the model" for name in self.unexpected),
            *(f"{name} is {_text(found)} in the files and {_text(right)} in the model"
              for name, found, right in self.reshaped),
        )  # fmt: skip

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences that are no errors but that a user should know."""
        found = []
        if self.random:
            found.append(f"the files have no weights for {first_of(self.random, SHOWN)}: a load draws them at random")
        if self.unread:
            found.append(f"{self.model} does not read {first_of(self.unread, SHOWN)}, which are copied as they are")
        return tuple(found)


def check_names(source: CheckpointSource, config: PreTrainedConfig) -> Names:
    """Compare the files with the model of `config`; a ModelError if they are of another model, or quantised."""
    check_stored(source)
    names = compare_names(source, config)
    if names.wrong:
        raise ModelError(
            f"The tensors in '{source.model}' are not those of {names.model}, which its config.json describes: "
            f"{first_of(names.wrong, SHOWN, '; ')}.",
            "Give the files and the config.json of one model, or name the class that was saved in 'architectures'.",
        )
    return names


def with_renamed(source: CheckpointSource, model: PreTrainedModel) -> CheckpointSource:
    """`source` with the names under which its files hold the parameters of `model`, which may be on meta. Multimodal
    models and vision transformers are often stored under names of older releases. A parameter that a load makes of
    several tensors, or of one by a computation, has no name in the files."""
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    state, found = model.state_dict(), dict[str, list[str]]()
    for key in sorted(source.tensors, key=dot_natural_key):  # some renamings depend on those before them
        name, converter = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state:
            name, converter = rename_source_key(key, [], [], model.base_model_prefix, state)
        if converter is None and name in state and tuple(state[name].shape) == tuple(source.tensors[key].shape):
            found.setdefault(name, []).append(key)
    return replace(
        source, renamed={name: keys[0] for name, keys in found.items() if len(keys) == 1 and keys[0] != name}
    )


def made_by_load(model: PreTrainedModel) -> frozenset[str]:
    """The parameters of `model`, which may be on meta, that the files of `save_pretrained` have under no name: a load
    makes each of several tensors (experts), or of one by a computation."""
    state = model.state_dict()
    kept = {id(tensor) for tensor in revert_weight_conversion(model, dict(state)).values()}
    return frozenset(name for name, tensor in state.items() if id(tensor) not in kept)


def check_stored(source: CheckpointSource) -> None:
    """Refuse weights that are codes with scales, which can be neither folded nor trained."""
    hint = "Give the model that it was quantised from."
    for key in ("quantization_config", "compression_config"):
        for settings in (source.config, *(value for value in source.config.values() if isinstance(value, dict))):
            if settings.get(key):
                method = settings[key].get("quant_method") if isinstance(settings[key], dict) else None
                raise ModelError(f"'{source.model}' is quantised ({ascii(method or key)[1:40].rstrip(chr(39))}).", hint)
    for name, info in source.tensors.items():
        if info.dtype.startswith(_CODES):
            raise ModelError(f"'{source.model}' is quantised: tensor '{name}' is stored as {info.dtype}.", hint)


#: Names of buffers that older releases stored, and of scales of a KV cache: stock loads ignore them.
_BESIDE = (
    "masked_bias", "mask", "inv_freq", "position_ids", "num_batches_tracked", "k_scale", "v_scale", "kv_scale",
    "q_scale",
)  # fmt: skip


def compare_names(source: CheckpointSource, config: PreTrainedConfig) -> Names:
    """The differences between the files of `source` and the model of `config`. Raises a ModelError if no model can be
    built from the config, or the tensors cannot be converted to its own."""
    cls = model_class(config)
    shapes = {name: info.shape for name, info in source.tensors.items()}
    model, found = _load(cls, config, shapes, source.model)
    for name, info in source.tensors.items():
        stored = info.dtype in FLOAT_DTYPES or not _tensor(model, name).is_floating_point()
        if not stored:
            raise ModelError(f"'{source.model}' stores the weight '{name}' as {info.dtype}.", "Give it in floats.")
    part = _Parts(model)
    head = {name for name in found.missing if not part.in_base(name)} if not named_classes(config) else set()
    optional = _of_optional_parts(cls, config, shapes, found) if set(found.missing) - head else set()
    random = {name for name in head | optional if not part.is_partly(name, found.missing)} | optional
    other = {name for name in found.unexpected if part.is_of_another_head(name)}
    buffers = {name for name, _ in model.named_buffers()}
    other |= buffers & set(found.unexpected)
    missing = tuple(name for name in found.missing if name not in random)
    rest = set(found.unexpected) - other
    if not missing and not found.reshaped:
        beside = {name for name in rest if part.is_beside_weights(name, shapes[name])}
        other, rest = other | beside, rest - beside
    if rest:
        other |= rest - _unknown_to_all(cls, config, shapes, rest)
    return Names(
        cls.__name__,
        missing,
        tuple(name for name in found.unexpected if name not in other),
        found.reshaped,
        tuple(sorted(random)),
        tuple(sorted(other - buffers)),
    )


class _Parts:
    """Tells whether a name belongs to the base model or to a head."""

    def __init__(self, model: PreTrainedModel) -> None:
        prefix = model.base_model_prefix
        self._model = model
        self._prefix = f"{prefix}." if prefix else ""
        self._has_base = bool(prefix) and isinstance(getattr(model, prefix, None), nn.Module)

    def in_base(self, name: str) -> bool:
        return name.startswith(self._prefix) if self._has_base else True

    def is_of_another_head(self, name: str) -> bool:
        """Whether no module of this model could hold the tensor, so that it belongs to a head of another class."""
        if self._has_base:
            return not self.in_base(name) and not self._has(name.rpartition(".")[0])
        inner = name.removeprefix(self._prefix)
        return inner == name and not self._has(name.partition(".")[0])

    def is_partly(self, name: str, missing: Collection[str]) -> bool:
        """Whether the module of the tensor has another, untied tensor that is in the files."""
        owner = name.rpartition(".")[0]
        leaves = {leaf for leaf, _ in self._model.get_submodule(owner).named_parameters(owner, recurse=False)}
        return bool(leaves.difference(missing, self._model.all_tied_weights_keys))

    def is_beside_weights(self, name: str, shape: Shape) -> bool:
        """Whether the tensor is a buffer of old releases, or a scale of a KV cache, in a module that the model has."""
        owner, _, leaf = name.rpartition(".")
        is_mask = leaf == "bias" and len(shape) > 2  # GPT-2's causal mask
        return (is_mask or leaf in _BESIDE) and (self._has(owner) or self._has(f"{self._prefix}{owner}"))

    def _has(self, module: str) -> bool:
        try:
            return bool(module) and self._model.get_submodule(module) is not None
        except AttributeError:
            return False


def _of_optional_parts(
    cls: type[PreTrainedModel], config: PreTrainedConfig, shapes: Mapping[str, Shape], found: Names
) -> set[str]:
    """Missing names of parts that the class can be built without (``add_pooling_layer``)."""
    optional: set[str] = set()
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if isinstance(parameter.default, bool):
            with contextlib.suppress(ModelError):
                other = _load(cls, config, shapes, "", **{name: not parameter.default})[1]
                if set(other.unexpected) <= set(found.unexpected) and other.reshaped == found.reshaped:
                    optional |= set(found.missing) - set(other.missing)
    return optional


def _unknown_to_all(
    cls: type[PreTrainedModel], config: PreTrainedConfig, shapes: Mapping[str, Shape], names: set[str]
) -> set[str]:
    """The `names` that no other class of the model type has either."""
    for other in dict.fromkeys(model_classes(config)):
        if names and other is not cls:
            with contextlib.suppress(ModelError):
                names = names & set(_load(other, config, shapes, "")[1].unexpected)
    return names


def _load(
    cls: type[PreTrainedModel], config: PreTrainedConfig, shapes: Mapping[str, Shape], source: str, **options: bool
) -> tuple[PreTrainedModel, Names]:
    """The model on meta, and the differences that transformers' loader reports for these names and shapes."""
    parts = min(MAX_PARTS, 4 * len(shapes) + _SPARE_PARTS)
    elements = 4 * sum(map(prod, shapes.values())) + _SPARE_ELEMENTS
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        with _silent(), watched_build(), bounded_build(parts, elements):
            # Not the class's own, which may take the result for a model (`DecisionMixin` of transformers).
            model, info = PreTrainedModel.from_pretrained.__func__(  # type: ignore[attr-defined]
                cls,
                None,
                config=config,
                state_dict=state,
                device_map="meta",
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                local_files_only=True,
                **options,
            )
    except ModelError as error:
        raise ModelError(f"The config.json of '{source}' does not fit its files. {error.message}", error.hint) from None
    except Exception as error:  # constructors and conversions raise anything
        build_meta(config)  # raises its own error if the config alone is at fault
        raise ModelError(
            f"The tensors in '{source}' cannot be loaded into {cls.__name__}, which its config.json describes: "
            f"{type(error).__name__}: {one_line(error)}.",
            "Give the files and the config.json of one model.",
        ) from error
    reshaped = sorted((name, tuple(one), tuple(other)) for name, one, other in info["mismatched_keys"])
    return model, Names(
        cls.__name__, tuple(sorted(info["missing_keys"])), tuple(sorted(info["unexpected_keys"])), tuple(reshaped)
    )


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    """The parameter or buffer of this name; an empty integer tensor if there is none."""
    owner, _, leaf = name.rpartition(".")
    with contextlib.suppress(AttributeError):
        found = getattr(model.get_submodule(owner), leaf, None)
        if isinstance(found, torch.Tensor):
            return found
    return torch.empty(0, dtype=torch.int64, device="meta")


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Inside, transformers logs nothing and shows no progress bar."""
    from transformers.utils import logging as reports

    level, shown = reports.get_verbosity(), reports.is_progress_bar_enabled()
    reports.set_verbosity(logging.CRITICAL)
    reports.disable_progress_bar()
    try:
        yield
    finally:
        reports.set_verbosity(level)
        if shown:
            reports.enable_progress_bar()


def _text(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "a number"
