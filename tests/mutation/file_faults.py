"""Faults in the tensors of a patched folder. Digests are forged, so that only a comparison can notice, but for two."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from tests.mutation.folders import WEIGHTS, Copy
from tests.mutation.planted import in_folder

_FOLDED = ("llama", "gpt2", "mixtral", "gemma2", "t5", "qwen3_moe", "phi3")
_EXPERTS = ("mixtral", "qwen3_moe")
_HEADS = ("llama", "bert", "vit", "mixtral", "gemma2", "t5", "qwen3_moe")
_LAYER_NORMS = ("gpt2", "bert", "vit")
_BITS = {2: torch.int16, 4: torch.int32}


def _folded(copy: Copy) -> tuple[dict[str, Any], dict[str, Any]]:
    """A fold, and a weight that it scales."""
    fold = copy.folds[len(copy.folds) // 2]
    return fold, fold["consumers"][-1]


def _untouched(copy: Copy, *, ndim: int = 2) -> str:
    """A tensor that no fold touches."""
    touched = {fold["weight"] for fold in copy.folds} | {fold["bias"] for fold in copy.folds}
    touched |= {each[key] for fold in copy.folds for each in fold["consumers"] for key in ("weight", "bias")}
    names = [name for name, tensor in sorted(copy.tensors.items()) if name not in touched and tensor.ndim == ndim]
    return names[len(names) // 2]


def _called(copy: Copy, pattern: str) -> list[str]:
    """Tensors whose name ends so, in order."""
    return [name for name in sorted(copy.tensors) if re.search(rf"({pattern})$", name)]


def _ulp(copy: Copy, name: str) -> str:
    tensor = copy.tensors[name]
    tensor.view(_BITS[tensor.element_size()]).view(-1)[tensor.numel() // 2] += 1
    copy.write_tensors()
    return name


def _set(copy: Copy, name: str, value: Tensor) -> str:
    copy.tensors[name] = value.to(copy.tensors[name].dtype)
    copy.write_tensors()
    return name


def _swap(copy: Copy, one: str, other: str) -> tuple[str, str]:
    copy.tensors[one], copy.tensors[other] = copy.tensors[other], copy.tensors[one]
    copy.write_tensors()
    return one, other


def _swapped(tensor: Tensor, rows: int, dim: int = 0) -> Tensor:
    """With the first two groups of `rows` exchanged."""
    first, second, rest = tensor.split([rows, rows, tensor.size(dim) - 2 * rows], dim)
    return torch.cat((second, first, rest), dim)


def _scale(copy: Copy, fold: dict[str, Any], consumer: dict[str, Any]) -> Tensor:
    """What the fold multiplies the consumer by, shaped to be multiplied with it, fp64."""
    gamma = copy.source[fold["weight"]].double() + fold["offset"]
    weight = copy.tensors[consumer["weight"]]
    scale = torch.ones(weight.size(consumer["axis"]), dtype=torch.float64)
    channels = _channels(consumer["channels"], len(scale))
    scale[channels >= 0] = gamma[channels[channels >= 0]]
    return scale.view([-1 if axis == consumer["axis"] else 1 for axis in range(weight.ndim)])


def _channels(runs: list[list[int]] | None, size: int) -> Tensor:
    if runs is None:
        return torch.arange(size)
    return torch.tensor([-1 if first < 0 else first + step for first, count in runs for step in range(count)])


# --- elements -------------------------------------------------------------------------------------------------------


@in_folder("files", "an element of a folded weight is off by one ulp", *_FOLDED)
def _(copy: Copy) -> str:
    return _ulp(copy, _folded(copy)[1]["weight"])


@in_folder("files", "an element of an untouched weight is off by one ulp")
def _(copy: Copy) -> str:
    return _ulp(copy, _untouched(copy))


@in_folder("files", "an element of an untouched vector is off by one ulp")
def _(copy: Copy) -> str:
    return _ulp(copy, _untouched(copy, ndim=1))


@in_folder("files", "an element of a folded bias is off by one ulp", "gpt2")
def _(copy: Copy) -> str:
    return _ulp(copy, _folded(copy)[1]["bias"])


@in_folder("files", "an element of a folded weight is off", *_FOLDED, sized=True)
def _(copy: Copy, size: float) -> str:
    name = _folded(copy)[1]["weight"]
    tensor = copy.tensors[name].double()
    tensor.view(-1)[tensor.abs().argmax()] *= 1 + size
    return _set(copy, name, tensor)


@in_folder("files", "an untouched weight is scaled", sized=True)
def _(copy: Copy, size: float) -> str:
    name = _untouched(copy)
    return _set(copy, name, copy.tensors[name].double() * (1 + size))


@in_folder("files", "a weight has the other sign")
def _(copy: Copy) -> str:
    name = _untouched(copy)
    return _set(copy, name, -copy.tensors[name])


@in_folder("files", "an element is NaN", *_FOLDED)
def _(copy: Copy) -> str:
    name = _folded(copy)[1]["weight"]
    copy.tensors[name].view(-1)[0] = torch.nan
    copy.write_tensors()
    return name


@in_folder("files", "an element is infinite")
def _(copy: Copy) -> str:
    name = _untouched(copy)
    copy.tensors[name].view(-1)[0] = torch.inf
    copy.write_tensors()
    return name


@in_folder("files", "a bias is zero", *_LAYER_NORMS)
def _(copy: Copy) -> str:
    name = _called(copy, r"c_proj\.bias|dense\.bias|fc2\.bias")[0]
    return _set(copy, name, torch.zeros_like(copy.tensors[name]))


@in_folder("files", "a tensor is shifted by one element")
def _(copy: Copy) -> str:
    name = _untouched(copy)
    return _set(copy, name, copy.tensors[name].reshape(-1).roll(1).view_as(copy.tensors[name]))


# --- rows, tensors, heads, experts ----------------------------------------------------------------------------------


@in_folder("files", "two rows of a folded weight are swapped", *_FOLDED)
def _(copy: Copy) -> str:
    name = _folded(copy)[1]["weight"]
    return _set(copy, name, _swapped(copy.tensors[name], 1))


@in_folder("files", "two columns of a folded weight are swapped", *_FOLDED)
def _(copy: Copy) -> str:
    name = _folded(copy)[1]["weight"]
    return _set(copy, name, _swapped(copy.tensors[name], 1, dim=1))


@in_folder("files", "two tensors of one layer are swapped", *_HEADS)
def _(copy: Copy) -> tuple[str, str]:
    key, value = (_called(copy, rf"(\b|_)({name})(_proj)?\.weight")[0] for name in ("k|key", "v|value"))
    return _swap(copy, key, value)


@in_folder("files", "two layers have each other's tensor")
def _(copy: Copy) -> tuple[str, str]:
    pairs = [(name, name.replace(".1.", ".0.", 1)) for name in _called(copy, "weight") if ".1." in name]
    return _swap(copy, *next(pair for pair in pairs if pair[1] in copy.tensors and copy.tensors[pair[0]].ndim > 1))


@in_folder("heads", "two heads of the queries are swapped", *_HEADS)
def _(copy: Copy) -> str:
    name = _called(copy, r"(\b|_)(q|query)(_proj)?\.weight")[0]
    return _set(copy, name, _swapped(copy.tensors[name], 16))


@in_folder("heads", "two rows of the embedding are swapped", "llama", "gpt2", "bert", "mixtral", "gemma2", "t5")
def _(copy: Copy) -> str:
    name = _called(copy, r"embed_tokens\.weight|wte\.weight|word_embeddings\.weight|shared\.weight")[0]
    return _set(copy, name, _swapped(copy.tensors[name], 1))


@in_folder("heads", "the head is scaled", "llama", "vit", "bert", "mixtral", "qwen3_moe", "phi3", sized=True)
def _(copy: Copy, size: float) -> str:
    name = _called(copy, r"^(lm_head|classifier)\.weight")[0]
    return _set(copy, name, copy.tensors[name].double() * (1 + size))


@in_folder("experts", "two experts are swapped", *_EXPERTS)
def _(copy: Copy) -> tuple[str, str]:
    one = _called(copy, r"experts\.0\.(w2|down_proj)\.weight")[0]
    return _swap(copy, one, one.replace("experts.0.", "experts.1."))


@in_folder("experts", "two rows of the router are swapped", *_EXPERTS)
def _(copy: Copy) -> str:
    name = _called(copy, r"(moe|mlp)\.gate\.weight")[0]
    return _set(copy, name, _swapped(copy.tensors[name], 1))


@in_folder("experts", "one expert is scaled", *_EXPERTS, sized=True)
def _(copy: Copy, size: float) -> str:
    name = _called(copy, r"experts\.3\.(w1|gate_proj)\.weight")[-1]
    return _set(copy, name, copy.tensors[name].double() * (1 + size))


@in_folder("experts", "gate and up of one expert are exchanged", *_EXPERTS)
def _(copy: Copy) -> tuple[str, str]:
    one = _called(copy, r"experts\.2\.(w1|gate_proj)\.weight")[0]
    return _swap(copy, one, one.replace("w1", "w3").replace("gate_proj", "up_proj"))


# --- folds ----------------------------------------------------------------------------------------------------------


@in_folder("folds", "a fold is done twice", *_FOLDED)
def _(copy: Copy) -> str:
    fold, consumer = _folded(copy)
    name = consumer["weight"]
    return _set(copy, name, copy.tensors[name].double() * _scale(copy, fold, consumer))


@in_folder("folds", "a fold is not done in one of its readers", *_FOLDED)
def _(copy: Copy) -> str:
    name = _folded(copy)[1]["weight"]
    return _set(copy, name, copy.source[name])


@in_folder("folds", "a fold is along the wrong axis", "llama", "t5")
def _(copy: Copy) -> str:
    fold = copy.folds[2]
    consumer = next(each for each in fold["consumers"] if len(set(copy.source[each["weight"]].shape)) == 1)
    name = consumer["weight"]
    return _set(copy, name, copy.source[name].double() * _scale(copy, fold, consumer).T)


@in_folder("folds", "a fold takes another norm's weight", *_FOLDED)
def _(copy: Copy) -> str:
    fold, consumer = _folded(copy)
    other = next(each for each in copy.folds if each["norm"] != fold["norm"])
    name = consumer["weight"]
    scale = _scale(copy, {**fold, "weight": other["weight"]}, consumer)
    return _set(copy, name, copy.source[name].double() * scale)


@in_folder("folds", "a fold forgets the offset of (1 + weight)", "gemma2")
def _(copy: Copy) -> str:
    fold, consumer = _folded(copy)
    name = consumer["weight"]
    return _set(copy, name, copy.source[name].double() * _scale(copy, {**fold, "offset": 0}, consumer))


@in_folder("folds", "a fold is rounded towards zero", *_FOLDED)
def _(copy: Copy) -> str:
    fold, consumer = _folded(copy)
    name = consumer["weight"]
    exact = copy.source[name].double() * _scale(copy, fold, consumer)
    rounded = exact.to(copy.source[name].dtype)
    away = rounded.double().abs() > exact.abs()
    rounded.view(_BITS[rounded.element_size()])[away] -= 1
    return _set(copy, name, rounded)


@in_folder("folds", "a folded norm keeps its weight", *_FOLDED)
def _(copy: Copy) -> str:
    name = _folded(copy)[0]["weight"]
    return _set(copy, name, copy.source[name])


@in_folder("folds", "a norm that is not folded loses its weight", "bert", "vit", "gemma2", "mixtral", "qwen3_moe")
def _(copy: Copy) -> str:
    folded = {fold["weight"] for fold in copy.folds}
    name = next(name for name in _called(copy, r"(LayerN|layern|_n)orm\w*\.weight") if name not in folded)
    return _set(copy, name, torch.ones_like(copy.tensors[name]))


@in_folder("folds", "the bias of a norm is not folded", "gpt2")
def _(copy: Copy) -> str:
    name = _folded(copy)[1]["bias"]
    return _set(copy, name, copy.source[name])


@in_folder("folds", "the bias of a norm is folded with the wrong sign", "gpt2")
def _(copy: Copy) -> str:
    name = _folded(copy)[1]["bias"]
    return _set(copy, name, 2 * copy.source[name].double() - copy.tensors[name].double())


@in_folder("folds", "a folded norm keeps its bias", "gpt2")
def _(copy: Copy) -> str:
    name = _folded(copy)[0]["bias"]
    return _set(copy, name, copy.source[name])


# --- headers and files ----------------------------------------------------------------------------------------------


@in_folder("files", "a tensor has a row less")
def _(copy: Copy) -> str:
    name = _untouched(copy)
    copy.tensors[name] = copy.tensors[name][:-1]
    copy.write_tensors()
    return name


@in_folder("files", "a tensor is missing")
def _(copy: Copy) -> str:
    name = _untouched(copy)
    del copy.tensors[name]
    copy.write_tensors()
    return name


@in_folder("files", "a tensor is there that the source has not")
def _(copy: Copy) -> str:
    copy.tensors["layers.99.extra.weight"] = torch.ones(2, 2)
    copy.write_tensors()
    return "layers.99.extra.weight"


@in_folder("files", "a tensor has another name")
def _(copy: Copy) -> str:
    name = _untouched(copy)
    copy.tensors[f"{name}_"] = copy.tensors.pop(name)
    copy.write_tensors()
    return name


@in_folder("files", "a tensor has another dtype")
def _(copy: Copy) -> str:
    name = _untouched(copy)
    tensor = copy.tensors[name]
    copy.tensors[name] = tensor.half() if tensor.dtype == torch.float32 else tensor.float()
    copy.write_tensors()
    return name


@in_folder("files", "a tensor is transposed")
def _(copy: Copy) -> str:
    name = next(name for name in _called(copy, "weight") if len(set(copy.tensors[name].shape)) == 2)
    copy.tensors[name] = copy.tensors[name].T
    copy.write_tensors()
    return name


@in_folder("files", "the same shape in other dimensions")
def _(copy: Copy) -> str:
    name = _untouched(copy)
    copy.tensors[name] = copy.tensors[name].reshape(-1)
    copy.write_tensors()
    return name


@in_folder("files", "the weight file is cut off")
def _(copy: Copy) -> str:
    path = copy.path / WEIGHTS
    path.write_bytes(path.read_bytes()[:-10])
    copy.forge(WEIGHTS)
    return WEIGHTS


@in_folder("files", "one bit of the weight file is flipped, digest as it was")
def _(copy: Copy) -> str:
    path = copy.path / WEIGHTS
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    return WEIGHTS


@in_folder("files", "a second file of weights lies beside the first")
def _(copy: Copy) -> str:
    name = "model-00002-of-00002.safetensors"
    (copy.path / name).write_bytes((copy.path / WEIGHTS).read_bytes())
    return name


@in_folder("files", "the original's weights are in the patched folder", *_FOLDED)
def _(copy: Copy) -> str:
    copy.tensors = dict(copy.source)
    copy.write_tensors()
    return _folded(copy)[0]["norm"]


@in_folder("files", "a file of weights is missing")
def _(copy: Copy) -> str:
    (copy.path / WEIGHTS).unlink()
    return WEIGHTS
