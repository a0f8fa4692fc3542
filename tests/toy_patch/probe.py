"""Finds the modules that compute x * sigmoid(1.702 x)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from memopt.walk.sites import Sites
from tests.toy_patch.site import ToySite


def find(model: nn.Module, sites: Sites) -> Iterator[ToySite]:
    x = torch.linspace(-8, 8, 65, dtype=torch.float64, device="cpu")
    for site in sites.activations:
        if site.is_module and not site.parameters and computes_toy(model.get_submodule(site.name), x):
            yield ToySite(site.name)


def computes_toy(module: nn.Module, x: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.allclose(module(x), x * torch.sigmoid(1.702 * x), rtol=1e-12, atol=0)
