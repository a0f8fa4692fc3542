"""The weights and biases of norms, for models that are patched before their weights are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from memopt.checkpoint.sources.source import open_source


@contextmanager
def affines_read(model: nn.Module, folder: Path, norms: Mapping[str, str]) -> Iterator[list[str]]:
    """Inside, norms whose parameters are on meta have the weights and biases of the files; parameters that still exist
    afterwards are on meta again. Yields the names of the norms that have values.

    Args:
        norms: module name -> its name in the files.
    """
    modules = {name: model.get_submodule(name) for name in norms}
    empty = {name for name, module in modules.items() if any(tensor.is_meta for tensor in module.parameters())}
    source = open_source(str(folder)) if empty else None
    lent: list[tuple[nn.Module, str, nn.Parameter]] = []
    known = [name for name in norms if name not in empty]
    for name in empty:
        assert source is not None
        own = {each: f"{norms[name]}.{each}" for each in modules[name]._parameters}
        if not set(own.values()) <= source.tensors.keys():
            continue
        known.append(name)
        for each, stored in own.items():
            parameter = modules[name].get_parameter(each)
            lent.append((modules[name], each, parameter))
            values = source.read(stored).to(parameter.dtype)
            modules[name]._parameters[each] = nn.Parameter(values, parameter.requires_grad)
    try:
        yield known
    finally:
        for module, each, parameter in lent:
            if each in module._parameters:
                module._parameters[each] = parameter
