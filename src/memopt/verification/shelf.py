"""A model whose blocks stay on disk: each is loaded alone, in a given dtype, and freed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memopt.api import from_pretrained
from memopt.errors import ModelError
from memopt.torch_compat import no_dispatch
from memopt.walk.models.build import build_meta
from memopt.walk.models.config import load_config, model_class


class Shelf:
    """Loads a model like `from_pretrained`, except for the matrices of `blocks`, which stay on disk.

    transformers converts the weights and their names, and accelerate records the place of each weight. The hooks with
    which accelerate would load weights are removed, because patched modules run their stock forward under hooks.

    Raises:
        ModelError: accelerate is not installed.
    """

    def __init__(self, blocks: Sequence[str], folder: Path) -> None:
        try:
            from accelerate.hooks import remove_hook_from_submodules
        except ImportError as error:
            raise ModelError(
                "This model does not fit into memory, and accelerate, which reads it block by block, is not installed.",
                "Install it: pip install accelerate",
            ) from error
        self.blocks = tuple(blocks)
        self._folder, self._remove_hooks = folder, remove_hook_from_submodules
        self._weights: dict[int, dict[str, Any]] = {}
        """id of a module -> name of a parameter -> accelerate's mapping that loads it."""

    def from_pretrained(self, source: str | Path, **keywords: Any) -> nn.Module:
        """The model, without hooks; weights of blocks with one dimension are in memory, the others on meta."""
        config = load_config(source, trust_remote_code=bool(keywords.get("trust_remote_code", False)))
        places = _places(build_meta(config), self.blocks)
        cls: Any = model_class(config)
        model = from_pretrained(cls, source, device_map=places, offload_folder=str(self._folder), **keywords)
        for name in self.blocks:
            for module in model.get_submodule(name).modules():
                self._note(module)
        self._remove_hooks(model)
        for module in model.modules():
            vars(module).pop("forward", None)  # the stock forward, which accelerate leaves on the instance
        return model

    def _note(self, module: nn.Module) -> None:
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and weights is not None:
                self._weights.setdefault(id(module), {})[name] = weights
                if parameter.dim() <= 1:
                    module._parameters[name] = nn.Parameter(weights[name], requires_grad=parameter.requires_grad)

    @contextlib.contextmanager
    def loaded(self, block: nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """Inside, `block` has its weights, and floating-point buffers, in `dtype`."""
        tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            for module in block.modules():
                both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
                for table in both:
                    tables.append((table, dict(table)))
                    for name, tensor in table.items():
                        if tensor is not None and tensor.is_floating_point():
                            table[name] = self._fetch(module, name, tensor, dtype)
            yield
        finally:
            for table, before in tables:
                table.update(before)

    def _fetch(self, module: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        with no_dispatch():  # a mode that widens dtypes would misread the file
            values = self._weights[id(module)][name][name] if tensor.is_meta else tensor.detach()
            values = values.to(dtype)
        return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _places(model: nn.Module, blocks: Sequence[str]) -> dict[str, str]:
    """Module or parameter -> "disk" for `blocks`, "cpu" for everything beside them."""
    above = {block[: block.rfind(".")] for block in blocks}
    while more := {name.rpartition(".")[0] for name in above} - above:
        above |= more
    places = dict.fromkeys(blocks, "disk")
    for name in above:
        parent = model.get_submodule(name)
        own = [child for child, _ in parent.named_children()] + [
            each for each, _ in parent.named_parameters(recurse=False)
        ]
        for each in own:
            path = f"{name}.{each}" if name else each
            if path not in above:
                places.setdefault(path, "cpu")
    return places
