"""A user's batch: reading, checking, describing it, and fitting it to a small twin of the model.

A batch maps arguments of the model's forward to values. A twin that runs with a user's batch has the real sizes of
images and sounds (`shrunken(..., sizes=False)`) and a smaller vocabulary.
"""

from __future__ import annotations

import difflib
import inspect
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.environment.files import MAKE_INPUTS, SAVE_INPUTS, inputs_file
from memopt.errors import InputsError
from memopt.torch_compat import tree_leaves, tree_map
from memopt.walk.calls.arguments.request import forward_parameters, inner_model, ordinary_ids
from memopt.walk.models.config import config_nodes, integer_fields, is_integer, one_line
from memopt.walk.models.shrink.config import TOKEN_ID

Batch = Mapping[str, Any]

#: Hint where inputs cannot be guessed.
PASS_INPUTS = f"Pass a batch with --inputs batch.pt (in Python: inputs=...), made with: {SAVE_INPUTS}"
_SHOWN = 12
#: Most elements of a tensor that counts as sizes.
_FEW = 64
_IDS = re.compile(r"(.*_)?(ids|labels|codes|tokens)")
_NOT_IDS = re.compile(r".*(position|type|segment).*")
#: Rows of the first attempt; few, since a twin runs many times.
_ROWS = 2


def read_batch(path: str | Path) -> dict[str, Any]:
    """The batch in a file of `torch.save` (no code in it is run) or of safetensors; tensors on the CPU. Lists of
    numbers become tensors, as in a collator. Raises an InputsError if the file is missing, not readable, not a dict of
    arguments, or empty."""
    path = inputs_file(path)
    content = _load(path)
    if not isinstance(content, dict):
        raise InputsError(f"'{path}' holds {_article(content)}, not a dict of the forward's arguments.", MAKE_INPUTS)
    if wrong := [key for key in content if not isinstance(key, str)]:
        raise InputsError(f"'{path}' has the key {wrong[0]!r}, which is no argument's name.", MAKE_INPUTS)
    if not content:
        raise InputsError(f"'{path}' is an empty dict: it gives the model no inputs.", MAKE_INPUTS)
    return {name: _value(name, value, path) for name, value in content.items()}


def given_batch(inputs: Batch | str | Path | None) -> Batch | None:
    """`inputs`, read from its file where it names one. Raises an InputsError if it is no mapping of arguments."""
    batch = read_batch(inputs) if isinstance(inputs, str | Path) else inputs
    if not isinstance(batch, Mapping | None):
        raise InputsError(
            f"Inputs are keyword arguments of the model's forward, not {type(batch).__name__}.", PASS_INPUTS
        )
    return batch


def check_names(model: nn.Module, batch: Batch) -> None:
    """Refuse an argument that no forward of `model` takes: a forward with ``**kwargs`` would ignore it silently."""
    known = list(dict.fromkeys(_known_names(model)))
    unknown = [name for name in batch if name not in known]
    if unknown and known:
        near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.7)
        others = ", ".join(known[:_SHOWN]) + (", ..." if len(known) > _SHOWN else "")
        raise InputsError(
            f"{type(inner_model(model)).__name__} takes no argument '{unknown[0]}'.",
            f"Did you mean '{near[0]}'?" if near else f"Take it out of the batch; the model takes {others}.",
        )


def does_not_run(model: nn.Module, error: str) -> InputsError:
    """The error for a batch that a model does not run with."""
    return InputsError(
        f"{type(inner_model(model)).__name__} does not run with the inputs that were given: {error}.",
        "Check the arguments, dtypes and shapes in the file; it should hold what the model's processor returns.",
    )


def placed(batch: Batch, device: str | torch.device | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """`batch` on `device`, its floating tensors in `dtype`, also those in lists and dicts; None leaves either as is."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device=device, dtype=dtype if leaf.is_floating_point() else None)

    return {name: tree_map(move, value) for name, value in batch.items()}


def describe(batch: Batch) -> dict[str, Any]:
    """Shape and dtype of every tensor of `batch`, other values as they are: JSON-ready, see `from_description`. Values
    of tensors are left out, since they are the user's data, except a few sizes that a forward may read."""

    def form(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            shape = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
            return shape | ({"values": value.tolist()} if _is_size(name, value) else {})
        if isinstance(value, Mapping):
            return {"items": {str(key): form(str(key), item) for key, item in value.items()}}
        return [form(name, item) for item in value] if isinstance(value, list | tuple) else value

    return {name: form(name, value) for name, value in batch.items()}


def from_description(description: Batch) -> dict[str, Any]:
    """A batch of the shapes in a description by `describe`, on the meta device except the sizes, which have values."""

    def make(value: Any) -> Any:
        if isinstance(value, Mapping) and "values" in value:
            return torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]))
        if isinstance(value, Mapping) and "shape" in value:
            return torch.empty(value["shape"], dtype=getattr(torch, value["dtype"]), device="meta")
        if isinstance(value, Mapping):
            return {key: make(item) for key, item in value["items"].items()}
        return [make(item) for item in value] if isinstance(value, list | tuple) else value

    return {name: make(value) for name, value in description.items()}


def in_words(batch: Batch) -> str:
    """``input_ids 2 x 16, pixel_values 2 x 3 x 224 x 224``."""

    def words(name: str, value: Any) -> str:
        if isinstance(value, Mapping):
            return f"{name} ({in_words(value)})"
        shape = " x ".join(map(str, value.shape)) if isinstance(value, Tensor) else ""
        return f"{name} {shape}".rstrip()

    return ", ".join(words(name, value) for name, value in batch.items())


def rows_of(batch: Batch) -> int:
    """Rows of the token ids; where the batch has none, of its first tensor."""
    tensors = [batch.get("input_ids"), *tree_leaves(dict(batch))]
    return next((tensor.shape[0] for tensor in tensors if isinstance(tensor, Tensor) and tensor.dim()), 1)


def tokens_of(batch: Batch) -> int | None:
    """Tokens in each row; None where the batch has no token ids."""
    ids = batch.get("input_ids")
    return int(ids.shape[-1]) if isinstance(ids, Tensor) and ids.dim() else None


def _load(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Unsupported" in str(error) or "GLOBAL" in str(error) or "weights_only" in str(error).lower():
            raise InputsError(
                f"'{path}' holds more than tensors, lists and numbers, and memopt runs no code from it.", MAKE_INPUTS
            ) from None
        raise InputsError(f"'{path}' is no file of torch.save: {one_line(error)}.", MAKE_INPUTS) from None
    except Exception as error:  # an unpickler may raise anything
        raise InputsError(f"'{path}' cannot be read: {one_line(error)}.", MAKE_INPUTS) from None


def _value(name: str, value: Any, path: Path) -> Any:
    numbers = isinstance(value, list | tuple) and all(isinstance(leaf, int | float) for leaf in tree_leaves(value))
    if numbers and value:
        try:
            value = torch.tensor(value)
        except ValueError:
            raise InputsError(
                f"'{name}' in '{path}' has rows of different lengths.",
                'Pad them: processor(..., padding=True, return_tensors="pt").',
            ) from None
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and not leaf.numel():
            shape = " x ".join(map(str, leaf.shape))
            raise InputsError(f"'{name}' in '{path}' is an empty tensor ({shape}).", MAKE_INPUTS)
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def _is_size(name: str, value: Tensor) -> bool:
    """Grids, lengths and the like; not token ids, labels and other data."""
    return (
        not (value.is_meta or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        and value.numel() <= _FEW
        and re.fullmatch(r".*(grid|size|length|num|shape)s?(_.*)?", name) is not None
    )


def _known_names(model: nn.Module) -> Iterator[str]:
    """Arguments of the forward and, if it has ``**kwargs``, of their type hints and of the models inside."""
    yield from forward_parameters(model)
    inner = inner_model(model)
    for parameter in inspect.signature(inner.forward).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            for hint in get_args(parameter.annotation):
                yield from getattr(hint, "__annotations__", ())
            for module in inner.modules():
                if isinstance(module, PreTrainedModel):
                    yield from forward_parameters(module)


def _article(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def fitting(batch: Batch, config: PreTrainedConfig, small: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """`batch` fitted to a model of `small`: first with few rows, which do not always run alone, then with all rows."""
    whole = fitted(batch, config, small)
    rows = rows_of(whole)
    if rows > _ROWS:
        yield {
            name: value[:_ROWS] if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows else value
            for name, value in whole.items()
        }
    yield whole


def fitted(batch: Batch, config: PreTrainedConfig, small: PreTrainedConfig) -> dict[str, Any]:
    """`batch`, made for a model of `config`, changed for a model of `small`, one of the `shrunken` configs of `config`.
    A special token id (a placeholder for an image) becomes the corresponding id of `small`. An id outside of the small
    vocabulary, or special in it, becomes an ordinary id, everywhere the same one."""
    moved = dict(_moved_ids(config, small))
    limit = min(_vocabularies(config, small), default=None)
    if limit is None:
        return dict(batch)
    pool = torch.tensor(ordinary_ids(small))

    def fit(ids: Tensor) -> Tensor:
        special = torch.tensor(list(moved.values()), dtype=ids.dtype)
        taken = (ids >= limit) | torch.isin(ids, special)
        fitting = torch.where(taken, pool.to(ids.dtype)[ids.clamp_min(0).long() % len(pool)], ids)
        for old, new in moved.items():
            fitting = torch.where(ids == old, new, fitting)
        return fitting

    def holds_ids(name: str, value: Any) -> bool:
        whole = isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)
        return whole and _IDS.fullmatch(name) is not None and _NOT_IDS.fullmatch(name) is None

    return {name: fit(value) if holds_ids(name, value) else value for name, value in batch.items()}


def _moved_ids(config: PreTrainedConfig, small: PreTrainedConfig) -> Iterator[tuple[int, int]]:
    for old, new in zip(config_nodes(config), config_nodes(small), strict=False):
        for name, value in vars(old).items():
            if name.startswith("_") or not TOKEN_ID.fullmatch(name):
                continue
            pairs = zip(_listed(value), _listed(vars(new).get(name)), strict=False)
            yield from ((a, b) for a, b in pairs if is_integer(a) and is_integer(b) and a != b)


def _vocabularies(config: PreTrainedConfig, small: PreTrainedConfig) -> Iterator[int]:
    """Sizes of the vocabularies that became smaller."""
    for old, new in zip(config_nodes(config), config_nodes(small), strict=False):
        sizes = dict(integer_fields(old))
        for name, size in integer_fields(new):
            if "vocab_size" in name and size < sizes.get(name, 0):
                yield size


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
