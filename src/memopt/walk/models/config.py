"""Loads the config of a folder or hub id, and finds the class for a config. No weights, no modules here.

The class comes from transformers' own registries (`architectures`, the auto mappings, `auto_map` for remote code), so
a model type that a later transformers adds needs no change here.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard, cast

import huggingface_hub
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model
from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME

from memopt.environment.files import (
    MAX_CONFIG_NESTS,
    check_folder,
    model_folder,
    parse_json,
    read_small,
    refuse_adapter,
)
from memopt.environment.hub import from_hub, hub_answers
from memopt.errors import ModelError
from memopt.walk.models.limits import check_counts, watched_build

CONFIG_FILE = "config.json"

#: Head preferred for a config that names no architecture, by transformers' task names. Sequence-to-sequence first and
#: masked before causal, because encoders and encoder-decoders are listed under causal LM as well.
_HEADS = (
    "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM",
    "ZERO_SHOT_IMAGE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION",
)  # fmt: skip


def load_config(
    source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """Config of the model in the folder, or under the hub id, `source`. Raises a ModelError that says which: the
    folder, file, id, revision or model type is missing, broken or not allowed."""
    folder = model_folder(source, revision)
    download = partial(huggingface_hub.hf_hub_download, str(source), CONFIG_FILE, revision=revision)
    path = from_hub(str(source), revision, CONFIG_FILE, download) if folder is None else _config_in_folder(folder)
    settings = _read(path, source)
    _check_known(settings, source, trust_remote_code)
    try:
        check_counts(settings)
    except ModelError as error:
        raise ModelError(f"The {CONFIG_FILE} of '{source}' describes no model. {error.message}", error.hint) from None
    remote = folder is None and trust_remote_code and "auto_map" in settings
    options = {"revision": revision, "local_files_only": not hub_answers(str(source), revision)} if remote else {}
    try:
        # If trust_remote_code is not passed, not even as False, transformers prompts on stdin.
        with watched_build():
            config = AutoConfig.from_pretrained(
                str(source) if remote else path.parent, trust_remote_code=trust_remote_code, **options
            )
        if folder is None:
            config._name_or_path = str(source)
    except Exception as error:
        if trust_remote_code and _has_code(settings):
            raise ModelError(f"The code that '{source}' carries cannot be loaded: {one_line(error)}.") from error
        raise ModelError(
            f"The config of '{source}' does not fit model type '{settings.get('model_type')}' of transformers "
            f"{transformers.__version__}: {one_line(error)}."
        ) from error
    assert isinstance(config, PreTrainedConfig)
    if trust_remote_code:
        trust_code(config)
    elif _lives_in_own_code(config):
        raise _needs_consent(source, config.model_type)
    return config


class _TrustedCode(dict[str, Any]):
    """An ``auto_map`` whose code the user allows to run. Copies of a config keep the class; no file can forge it."""


def trust_code(config: PreTrainedConfig) -> None:
    """Allow the code that ``config.auto_map`` points to; only after the user's consent."""
    if isinstance(references := getattr(config, "auto_map", None), dict):
        config.auto_map = _TrustedCode(references)


def is_own_code(cls: type) -> bool:
    """Whether `cls` was loaded from the Python files that come with a model."""
    return cls.__module__.startswith(f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}.")


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class named in ``config.architectures``, else the natural head class of the model type, else its base; a
    ModelError if there is none. Code that the model carries is used only with the user's consent: `load_config` was
    given it, or the config's own class is such code."""
    for candidate in model_classes(config):
        return candidate
    raise ModelError(
        f"transformers {transformers.__version__} has no model class for model type '{config.model_type}' "
        f"({type(config).__name__}).",
        "Name one that it has in the config's 'architectures'.",
    )


def named_classes(config: PreTrainedConfig) -> list[str]:
    """The names in the config's ``architectures``."""
    named = config.architectures
    return [name for name in named if isinstance(name, str)] if isinstance(named, list | tuple) else []


def config_nodes(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """`config` and every config nested in it, each once, parents first."""
    seen: set[int] = set()
    queue = [config]
    while queue:
        node = queue.pop(0)
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        queue.extend(value for value in vars(node).values() if isinstance(value, PreTrainedConfig))


def standard_name(node: PreTrainedConfig, name: str) -> str:
    """Name under which the standard field `name` is stored in `node` (``n_embd`` for ``hidden_size`` in GPT-2)."""
    return type(node).attribute_map.get(name, name)


def is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def integer_field(node: PreTrainedConfig, name: str) -> int | None:
    """The standard field `name` of `node`, if it is an integer."""
    value = vars(node).get(standard_name(node, name))
    return value if is_integer(value) else None


def integer_fields(node: PreTrainedConfig) -> list[tuple[str, int]]:
    """(name, value) of the integer fields of `node`."""
    return [(name, value) for name, value in vars(node).items() if is_integer(value) and not name.startswith("_")]


def one_line(error: BaseException) -> str:
    """The message of `error` as a phrase within a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".") or type(error).__name__


def _config_in_folder(folder: Path) -> Path:
    refuse_adapter(folder)
    path = folder / CONFIG_FILE
    if path.exists():
        check_folder(folder)
        return path
    raise ModelError(
        f"'{folder}' is not a model: it has no {CONFIG_FILE}.", "Give a folder written by save_pretrained, or a hub id."
    )


def _read(path: Path, source: str | Path) -> dict[str, Any]:
    try:
        settings = parse_json(read_small(path), nests=MAX_CONFIG_NESTS)
    except ValueError as error:
        raise ModelError(f"The {CONFIG_FILE} of '{source}' is not valid JSON: {error}.") from None
    except OSError as error:
        raise ModelError(f"The {CONFIG_FILE} of '{source}' cannot be read: {one_line(error)}.") from None
    if not isinstance(settings, dict):
        raise ModelError(f"The {CONFIG_FILE} of '{source}' is not a JSON object, so it describes no model.")
    return settings


def _check_known(settings: dict[str, Any], source: str | Path, trust_remote_code: bool) -> None:
    model_type = settings.get("model_type")
    if isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING:
        return
    has_code = _has_code(settings)
    if has_code and trust_remote_code:
        return
    if has_code:
        raise _needs_consent(source, model_type)
    if model_type is None:
        raise ModelError(
            f"The {CONFIG_FILE} of '{source}' has no 'model_type', so it is not a transformers model.",
            "Give a folder written by save_pretrained.",
        )
    raise ModelError(
        f"Model type '{model_type}' of '{source}' is unknown to transformers {transformers.__version__}.",
        "A newer transformers may know it: pip install --upgrade transformers",
    )


def _needs_consent(source: str | Path, model_type: object) -> ModelError:
    return ModelError(
        f"'{source}' (model type '{model_type}') needs code that it carries itself, which memopt does not run "
        "without your consent.",
        "Read that code, then pass --trust-remote-code (trust_remote_code=True).",
    )


def _has_code(settings: dict[str, Any]) -> bool:
    code = settings.get("auto_map")
    return isinstance(code, dict) and "AutoConfig" in code


def model_classes(config: PreTrainedConfig) -> Iterator[type[PreTrainedModel]]:
    """Classes that take `config`: those it names, then those of its model type, heads first. As in transformers, a
    class of the model's own code goes before the class that its Auto class has otherwise."""
    own = _own_code(config)
    meant = {key: reference for key, reference in own.items() if _is_meant(key, reference, config)}
    yield from _own_classes(config, meant)
    yield from _named_in_transformers(config)
    yield from _own_classes(config, {key: reference for key, reference in own.items() if key not in meant})
    yield from (each for each in _mapped_classes(config) if takes(each, config))
    yield from _unmapped_classes(config)
    yield from _borrowed_classes(config)


def _named_in_transformers(config: PreTrainedConfig) -> list[type[PreTrainedModel]]:
    """Classes that `config` names and transformers, or the module of the config's class, has."""
    names = named_classes(config)
    found = (getattr(transformers, name, None) or getattr(_modeling_module(config), name, None) for name in names)
    return [each for each in found if _is_model(each) and (takes(each, config) or each in _borrowed_classes(config))]


def _own_code(config: PreTrainedConfig) -> dict[str, str]:
    """Auto class -> reference to the model's own code, which the user allows to run."""
    if not (isinstance(getattr(config, "auto_map", None), _TrustedCode) or is_own_code(type(config))):
        return {}
    return {key: reference for key, reference in _references(config).items() if not _is_registered(key, config)}


def _references(config: PreTrainedConfig) -> dict[str, str]:
    """Auto class -> reference of the models in ``auto_map``: the named architecture first, the bare model last."""
    references, names = getattr(config, "auto_map", None), named_classes(config)
    if not isinstance(references, dict):
        return {}
    found = [(k, v) for k, v in references.items() if k.startswith("AutoModel") and isinstance(v, str)]
    return dict(sorted(found, key=lambda each: (_name(each[1]) not in names, each[0] == "AutoModel")))


def _is_meant(key: str, reference: str, config: PreTrainedConfig) -> bool:
    """Whether `config` names the class of `reference`, or a class of transformers in whose place it is."""
    if not type(config).__module__.startswith("transformers.") or _name(reference) in named_classes(config):
        return True
    return not {*_named_in_transformers(config)}.isdisjoint(_of_auto_class(key, config))


def _name(reference: str) -> str:
    return reference.rpartition(".")[2]


def _is_registered(key: str, config: PreTrainedConfig) -> bool:
    """Whether the user registered a class for `config`, which transformers prefers to the model's own code."""
    classes = _of_auto_class(key, config)
    return any(not is_own_code(each) and not each.__module__.startswith("transformers.") for each in classes)


def _lives_in_own_code(config: PreTrainedConfig) -> bool:
    """Whether the architecture of `config` is code of the model, and transformers has no class in its place."""
    names = named_classes(config)
    keys = [key for key, reference in _references(config).items() if _name(reference) in names]
    return bool(keys) and not _named_in_transformers(config) and not any(_of_auto_class(k, config) for k in keys)


def _own_classes(config: PreTrainedConfig, code: dict[str, str]) -> Iterator[type[PreTrainedModel]]:
    """The classes that `code` points to, changed as their Auto class does: they generate, and are saved with files."""
    for key, reference in code.items():
        revision = getattr(config, "_commit_hash", None)
        try:
            found: Any = get_class_from_dynamic_module(reference, config.name_or_path or "", revision=revision)
        except (OSError, ImportError, AttributeError) as error:
            raise ModelError(
                f"The code that '{config.name_or_path}' carries for '{reference}' cannot be loaded: {one_line(error)}."
            ) from error
        if "_auto_class" not in vars(found) and hasattr(transformers, key):
            found.register_for_auto_class(key)
        yield cast("type[PreTrainedModel]", add_generation_mixin_to_remote_model(found))


def _of_auto_class(key: str, config: PreTrainedConfig) -> tuple[type, ...]:
    return _entries(getattr(getattr(transformers, key, None), "_model_mapping", None), config)


def _entries(mapping: Any, config: PreTrainedConfig) -> tuple[type, ...]:
    """The classes for `config` in one of transformers' mappings."""
    if mapping is None or type(config) not in mapping:
        return ()
    try:
        entry = mapping[type(config)]
    except ValueError:  # the mapping names a class that this release of transformers lacks
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def _mapped_classes(config: PreTrainedConfig) -> Iterator[type[PreTrainedModel]]:
    names = [f"MODEL_FOR_{head}_MAPPING" for head in _HEADS] + ["MODEL_MAPPING"]
    others = [name for name in vars(modeling_auto) if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING")]
    for name in dict.fromkeys(names + others):
        yield from filter(_is_model, _entries(getattr(modeling_auto, name, None), config))


def _borrowed_classes(config: PreTrainedConfig) -> Iterator[type[PreTrainedModel]]:
    """Classes of other model types that an Auto class builds from `config` (Llama's for InternLM3), not from a part."""
    parts = list(config_nodes(config))
    yield from (each for each in _mapped_classes(config) if not any(takes(each, part) for part in parts))


def _unmapped_classes(config: PreTrainedConfig) -> Iterator[type[PreTrainedModel]]:
    """Classes that no auto class lists (towers, codecs): those whose ``config_class`` is the type of `config`."""
    found = [
        value
        for value in vars(_modeling_module(config)).values()
        if _is_model(value) and value.config_class is type(config)
    ]
    yield from sorted(found, key=lambda value: (len(value.__name__), value.__name__))


def _modeling_module(config: PreTrainedConfig) -> Any:
    name = type(config).__module__
    try:
        return importlib.import_module(name.replace(".configuration_", ".modeling_"))
    except ImportError:
        return importlib.import_module(name)


def _is_model(candidate: Any) -> TypeGuard[type[PreTrainedModel]]:
    """Whether `candidate` is a class of models that has a forward: of others the parts are called one by one."""
    is_model = inspect.isclass(candidate) and issubclass(candidate, PreTrainedModel)
    return is_model and candidate is not PreTrainedModel and candidate.forward is not PreTrainedModel.forward


def takes(candidate: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Whether `candidate` reads configs of the type of `config`; borrowed classes are given theirs."""
    expected = getattr(candidate, "config_class", None)
    return not inspect.isclass(expected) or isinstance(config, expected)
