"""Models to walk: the real shape on meta tensors, a small random twin on CPU, and the meta copy of a live model.

No weights are ever read. Loading and resolving configs is `memopt.walk.config`, making them small is
`memopt.walk.shrink`, inputs to run the models with are `memopt.walk.inputs`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from memopt.errors import InputsError, ModelError
from memopt.walk.batch import Batch, placed
from memopt.walk.config import load_config, model_class
from memopt.walk.fit import fitting
from memopt.walk.inputs import runnable_calls
from memopt.walk.instantiate import instantiate
from memopt.walk.shrink import shrunken

__all__ = ["build_driven_twin", "build_meta", "build_twin", "clone_to_meta", "load_config", "model_class"]

#: Standard deviation from which a weight matrix is left as it was initialised, and to which smaller ones are raised:
#: with the usual 0.02 a wrong fold could drown in the residual stream.
_VISIBLE_STD, _RAISED_STD = 0.05, 0.08


def build_meta(
    config: PreTrainedConfig, *, dtype: torch.dtype | None = None, attn_implementation: str | None = "sdpa"
) -> PreTrainedModel:
    """The model of `config` in its real shape on the meta device: every name and shape, no memory, eval mode.

    `dtype` defaults to the config's. Attention falls back to eager where the class refuses `attn_implementation`.
    Experts run as one batched product, because their eager loop asks which experts were hit: values, which meta lacks.

    Raises:
        ModelError: transformers has no class for the config, or the class cannot be built from it.
    """
    model = instantiate(
        config,
        device="meta",
        dtype=dtype,
        attn_implementation=attn_implementation,
        experts_implementation="batched_mm",
    )
    # Some classes make parameters with a constructor that ignores the default device.
    nn.Module.to(model, "meta")
    model.eval()
    return model


def build_twin(
    config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float64, depth: int | None = None
) -> PreTrainedModel:
    """A small random model of the same make on CPU, in eval mode, that runs; the names of its layers are the real ones.

    Every parameter is random (:func:`_randomise`), so that a wrong rewrite shows in the outputs. The same seed
    gives the same twin; torch's global generator is left as it was. `depth` is the number of its layers, by default as
    many as show every kind of layer.

    Raises:
        ModelError: no shrunken form of the config builds.
    """
    first: PreTrainedModel | None = None
    for twin in _twins(shrunken(config, depth=depth), seed, dtype):
        if runnable_calls(twin, variants=("plain",)):
            return twin
        first = first or twin
    if first is None:
        raise ModelError(f"No shrunken form of model type '{config.model_type}' can be built.")
    return first


def build_driven_twin(
    config: PreTrainedConfig, inputs: Batch, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A twin (`build_twin`) that runs with `inputs`, a batch for `config`, and the batch, made to fit it.

    Raises:
        InputsError: none runs; says what each failed on.
        ModelError: no shrunken form of the config builds.
    """
    errors: list[str] = []
    for twin in _twins(shrunken(config, sizes=False), seed, dtype):
        for batch in fitting(inputs, config, twin.config):
            own = placed(batch, "cpu", dtype)
            calls = runnable_calls(twin, own)
            if calls:
                return twin, own
            errors += [error for _, error in calls.errors]
    raise InputsError(f"No small twin runs with these inputs ({'; '.join(dict.fromkeys(errors))}).")


def _twins(configs: Iterator[PreTrainedConfig], seed: int, dtype: torch.dtype) -> Iterator[PreTrainedModel]:
    for small in configs:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            twin = instantiate(small, device="cpu", dtype=torch.float32)
            _randomise(twin, torch.Generator().manual_seed(seed))
        yield nn.Module.to(twin, dtype).eval()


def clone_to_meta(model: nn.Module) -> nn.Module:
    """A structural copy of `model` with every tensor on meta: no storage is copied or allocated.

    Names, ties (also views of one storage), dtypes, strides, ``requires_grad`` and hooks are those of `model`;
    gradients are dropped. Works for any module, wrapped (PEFT) or not.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    # deepcopy looks every object up in the memo first, so a tensor found there is replaced and never copied.
    memo: dict[int, Any] = {id(tensor): _meta_twin(tensor, storages) for tensor in _tensors_of(model)}
    return copy.deepcopy(model, memo)


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and tensors that modules hold as plain attributes (also in lists, tuples and dicts)."""
    for module in model.modules():
        for value in vars(module).values():
            yield from _tensors_in(value)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _meta_twin(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
        source = tensor.untyped_storage()
        if source._cdata not in storages:
            storages[source._cdata] = torch.empty(source.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
        twin = torch.empty(0, dtype=tensor.dtype, device="meta")
        twin.set_(storages[source._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
    else:  # Wrapper subclasses (quantised, distributed) have no strided storage of their own; shape and dtype remain.
        twin = torch.empty(tensor.size(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)


@torch.no_grad()
def _randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Make every floating parameter carry signal, in place, so ties and names stay; buffers are left alone.

    Fresh models hide wrong folds: norm weights are all 1, biases 0, LayerScale 1e-5, matrices as small as 0.02.
    """
    norm_like = {
        id(parameter): name.endswith("bias")
        for module in model.modules()
        if _is_norm_like(module)
        for name, parameter in module.named_parameters(recurse=False)
    }
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        values = parameter.to(torch.float64)
        if id(parameter) in norm_like:
            values = _random_affine(values, norm_like[id(parameter)], generator)
        elif parameter.dim() < 2 or values.std() < 1e-6:
            values = values + 0.1 * torch.randn(values.shape, generator=generator, dtype=torch.float64)
        elif values.std() < _VISIBLE_STD:
            values = values * min(4.0, _RAISED_STD / float(values.std()))
        parameter.copy_(values)


def _is_norm_like(module: nn.Module) -> bool:
    """A leaf whose only parameters are one or two vectors of one length: a scale, or a scale and a shift."""
    shapes = [parameter.shape for parameter in module.parameters(recurse=False)]
    leaf = next(module.children(), None) is None
    return leaf and 1 <= len(shapes) <= 2 and len(set(shapes)) == 1 and len(shapes[0]) == 1


def _random_affine(values: torch.Tensor, is_bias: bool, generator: torch.Generator) -> torch.Tensor:
    def uniform() -> torch.Tensor:
        return torch.rand(values.shape, generator=generator, dtype=torch.float64)

    if is_bias:
        return values + 0.6 * (uniform() - 0.5)
    # Away from the initial value on both sides, never near a zero scale (1 and 1 + w alike), and a quarter flipped.
    moved = values + torch.where(uniform() < 0.5, -1.0, 1.0) * (0.2 + 0.3 * uniform())
    return torch.where((uniform() < 0.25) & (values.abs() > 0.5), -moved, moved)
