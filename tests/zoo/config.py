"""The config of any model type of transformers, complete enough to build the model, as a checkpoint's config.json is.

The library's defaults leave fields empty that every checkpoint fills. `default_config` takes the defaults; `complete`
watches which empty field a failed build stumbled over and fills it by what its name says. No model is known here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from memopt.walk.models.build import instantiate
from memopt.walk.models.config import config_nodes, integer_field, integer_fields
from memopt.walk.models.shrink.depth import with_depth

_ABSENT = re.compile(r"'(\w+)' object has no attribute '(\w+)'")
_READ_BY_RUNS = r".*(top_?k.*|experts_per_tok)|n_group|clip_.*"
_READ_BY_SOME_RUNS = rf"{_READ_BY_RUNS}|sliding_window"
_EMPTY = re.compile(r"None|needs to be (given|specified)|does not define|must be|empty\(\)")


def default_config(model_type: str) -> PreTrainedConfig:
    """The config of `model_type` with the library's defaults; parts that must be given get theirs."""
    cls = CONFIG_MAPPING[model_type]
    try:
        config = cls()
    except Exception:
        parts = {name: _default_part(model_type, name, part) for name, part in _parts(cls).items()}
        if not parts:
            raise
        config = cls(**parts)
    _join_towers(config)
    return config


def _join_towers(config: PreTrainedConfig) -> None:
    """Let towers hand over vectors as wide as the text model's, as in every checkpoint; the defaults may disagree."""
    for node in config_nodes(config):
        try:
            text = node.get_text_config()
        except ValueError:  # it has several, an encoder's and a decoder's
            continue
        width = integer_field(text, "hidden_size")
        for tower in vars(node).values():
            if isinstance(tower, PreTrainedConfig) and tower is not text and text is not node and width:
                handed_over = "hidden_size" if {"embed_dim", "spatial_merge_size"} <= vars(tower).keys() else ""
                for name in ("out_hidden_size", handed_over):
                    if vars(tower).get(name):
                        setattr(tower, name, width)


def _parts(cls: type) -> dict[str, type]:
    return dict(getattr(cls, "sub_configs", {}))


def _default_part(model_type: str, name: str, part: type) -> dict[str, Any]:
    if part is not AutoConfig:
        config = part()
    else:
        # "text_config" of "family_role" is a "family_text" where there is one; else a part of any type is a text model.
        words, role = model_type.split("_"), name.removesuffix("_config")
        family = (f"{'_'.join(words[:count])}_{role}" for count in range(len(words), 0, -1))
        config = CONFIG_MAPPING[next((found for found in family if found in CONFIG_MAPPING), "bert")]()
    return dict(config.to_dict())


def complete(config: PreTrainedConfig, failure: str) -> bool:
    """Fill, in place, the field of `config` for want of which its model did not build; False if none is found.

    Args:
        config: a config whose model cannot be built.
        failure: what building it said.
    """
    nodes = list(config_nodes(config))
    if "timm library" in failure:
        return _each(nodes, _native_backbones)
    for found in _ABSENT.finditer(failure):
        owners = [node for node in nodes if type(node).__name__ == found[1]]
        if _each(owners, lambda node: _fill(node, found[2], nodes)):  # noqa: B023 - called at once
            _each(nodes, _fill_what_runs_need)
            return True
    with _reads_of_nothing() as reads:
        error = _building_error(config)
    if error is None:
        return False
    if isinstance(error, KeyError):
        return _each(nodes, lambda node: _rotary_by_kind(node, str(error.args[0])))
    if 'not "tuple"' in str(error):
        return _each(nodes, _as_read_from_a_file)
    if not _EMPTY.search(str(error)) or not reads:
        return False
    # What was read last is the likeliest cause, unless nothing says what it holds (a padding token may be absent).
    for owner, name in reversed(reads[-3:]):
        empty = [node for node in nodes if type(node) is owner and vars(node).get(name) is None]
        if _each(empty, lambda node: _fill(node, name, nodes)):  # noqa: B023 - called at once
            _each(nodes, _fill_what_runs_need)
            return True
    return False


def complete_for_runs(config: PreTrainedConfig) -> bool:
    """Fill, in place, empty fields that are read while a model runs; False if there is none that a name tells."""
    nodes = list(config_nodes(config))
    filled = _each(nodes, lambda node: _fill_what_runs_need(node, _READ_BY_SOME_RUNS))
    return _each(nodes, _rotary_sections) or filled


def _each(nodes: list[PreTrainedConfig], change: Callable[[PreTrainedConfig], bool]) -> bool:
    """Change every node; True if any was changed."""
    return any([change(node) for node in nodes])  # noqa: C419 - all of them, not up to the first


def _building_error(config: PreTrainedConfig) -> BaseException | None:
    try:
        instantiate(with_depth(config, 2), device="meta", attn_implementation="eager")
    except Exception as error:
        return error.__cause__ or error
    return None


@contextlib.contextmanager
def _reads_of_nothing() -> Iterator[list[tuple[type, str]]]:
    """(class, field) of every read of a config's field that holds nothing, in order, as long as the context lasts."""
    reads: list[tuple[type, str]] = []
    stock = PreTrainedConfig.__getattribute__

    def watched(self: PreTrainedConfig, name: str) -> Any:
        value = stock(self, name)
        if value is None and not name.startswith(("_", "base_model_")):
            reads.append((type(self), type(self).attribute_map.get(name, name)))
        return value

    PreTrainedConfig.__getattribute__ = watched
    try:
        yield reads
    finally:
        PreTrainedConfig.__getattribute__ = stock


# --- what an empty field holds, by its name --------------------------------------------------------------------


def _fill(node: PreTrainedConfig, name: str, nodes: list[PreTrainedConfig]) -> bool:
    value = next((make(node) for pattern, make in _CONVENTIONS if re.fullmatch(pattern, name)), None)
    if value is None:
        value = _of_another(name, nodes)
    if value is None:
        value = _of_a_like_name(name, node)
    if value is None:
        value = _of_its_type(name, node)
    if value is None:
        return False
    setattr(node, name, value)
    return True


def _fill_what_runs_need(node: PreTrainedConfig, pattern: str = _READ_BY_RUNS) -> bool:
    """Empty fields that are read while a model runs: building it does not show that they are empty."""
    empty = [name for name, value in vars(node).items() if value is None and re.fullmatch(pattern, name)]
    return any([_fill(node, name, [node]) for name in empty])  # noqa: C419 - all of them, not up to the first


def _of_another(name: str, nodes: list[PreTrainedConfig]) -> Any:
    """The field as another config of the model has it, or one of the tables in it (rotary parameters)."""
    for node in nodes:
        tables = [value for value in vars(node).values() if isinstance(value, dict)]
        for table in (vars(node), *tables):
            if table.get(name) is not None:
                return table[name]
    return None


def _of_a_like_name(name: str, node: PreTrainedConfig) -> int | None:
    """The size of the same node whose name ends in the same two words (``intermediate_size``)."""
    ending = "_".join(name.split("_")[-2:])
    if not ending.endswith(("size", "dim")):
        return None
    return next((value for other, value in integer_fields(node) if other != name and other.endswith(ending)), None)


def _of_its_type(name: str, node: PreTrainedConfig) -> Any:
    """An empty table or list, where the field may hold nothing else."""
    fields = dataclasses.fields(node) if dataclasses.is_dataclass(node) else ()  # in transformers 5.0 they are not yet
    annotation = next((str(field.type) for field in fields if field.name == name), "")
    kind = re.fullmatch(r"(dict|list)(\[.*\])? \| None", annotation)
    return {"dict": {}, "list": []}[kind[1]] if kind else None


def _layers(node: PreTrainedConfig) -> int:
    return integer_field(node, "num_hidden_layers") or 2


def _layer_types(node: PreTrainedConfig) -> list[str]:
    """Every second layer attends, if the config also speaks of convolutions or state spaces; else every layer."""
    other = next((kind for kind in ("conv", "mamba") if any(name.startswith(kind) for name in vars(node))), None)
    return [other if other and index % 2 == 0 else "full_attention" for index in range(_layers(node))]


def _head_size(node: PreTrainedConfig) -> int | None:
    hidden, heads = integer_field(node, "hidden_size"), integer_field(node, "num_attention_heads")
    return hidden // heads if hidden and heads else None


_CONVENTIONS: tuple[tuple[str, Callable[[PreTrainedConfig], Any]], ...] = (
    (r"head_dim", _head_size),
    (r".*(key_value|kv)_heads", lambda node: integer_field(node, "num_attention_heads")),
    (r".*num_attention_heads", lambda node: integer_field(node, "num_attention_heads") or vars(node).get("num_heads")),
    (r".*(num|n)_.*experts", lambda node: 8),
    (r"mlp_layer_types", lambda node: ["dense" if index == 0 else "sparse" for index in range(_layers(node))]),
    (r"layer_types|layers_block_type", _layer_types),
    (r".*vocab_size", lambda node: 512),
    (r"(prediction|context)_length", lambda node: 16),
    (r"n_group|topk_group", lambda node: 1),
    (r".*(top_?k.*|experts_per_tok)", lambda node: 2),
    (r"moe_intermediate_size", lambda node: integer_field(node, "intermediate_size")),
    (r"clip_.*", lambda node: 8.0),
    (r"sliding_window", lambda node: 8),
    (r".*dropout(_rate)?", lambda node: 0.0),
    (r"initializer_(range|std)", lambda node: 0.02),
    (r"rope_theta", lambda node: 10000.0),
)


def _rotary_by_kind(node: PreTrainedConfig, kind: str) -> bool:
    """Rotary parameters for each kind of layer, where a config that mixes kinds has one set for all."""
    kinds, rotary = vars(node).get("layer_types"), vars(node).get("rope_parameters")
    if not kinds or kind not in kinds or not isinstance(rotary, dict) or kind in rotary:
        return False
    single = {name: value for name, value in rotary.items() if not isinstance(value, dict)}
    plain = {"rope_type": "default", "rope_theta": 10000.0, **single}
    node.rope_parameters = {**{each: dict(plain) for each in kinds}, **rotary}
    for name in single:
        del node.rope_parameters[name]
    return True


def _rotary_sections(node: PreTrainedConfig) -> bool:
    """Four equal sections of rotary positions, where the config's class knows sections and its defaults have none."""
    rotary, size = vars(node).get("rope_parameters"), integer_field(node, "head_dim") or _head_size(node)
    wanted = "mrope_section" in (getattr(node, "ignore_keys_at_rope_validation", None) or ())
    if not wanted or not isinstance(rotary, dict) or not size or "mrope_section" in rotary:
        return False
    rotary["mrope_section"] = [size // 8] * 4
    return True


def _native_backbones(node: PreTrainedConfig) -> bool:
    """The library's own class of the backbone's family in place of another library's."""
    foreign = {name: part for name, part in vars(node).items() if getattr(part, "model_type", "") == "timm_backbone"}
    changed = False
    for name, backbone in foreign.items():
        family = re.match(r"[a-z]+", str(backbone.backbone))
        if family and family[0] in CONFIG_MAPPING:
            setattr(node, name, CONFIG_MAPPING[family[0]](out_indices=list(backbone.out_indices)))
            changed = True
    return changed


def _as_read_from_a_file(node: PreTrainedConfig) -> bool:
    """Lists where the defaults have tuples: JSON knows no tuples."""
    tuples = {name: list(value) for name, value in vars(node).items() if isinstance(value, tuple)}
    for name, value in tuples.items():
        setattr(node, name, value)
    return bool(tuples)
