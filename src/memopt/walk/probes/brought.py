"""Sites of kinds that patches define: each such patch has a probe that finds its sites in an observed model.

The probe is a file `probe.py` in the folder of the patch, with a function `find(model, sites)`. The function returns
instances of a frozen dataclass of the patch, whose first field `name` is the name of a module. The registry of patches
adds the importable name of the probe to `PROBES`.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from memopt.walk.sites import Sites

#: Importable names of the probes.
PROBES: set[str] = set()


def with_brought_sites(model: nn.Module, sites: Sites) -> Sites:
    """`sites`, with the sites that the patches' probes find in the field `brought`."""
    from memopt.walk.models.plain import plain_functions  # the registry imports this file without torch

    place = {name: number for number, (name, _) in enumerate(model.named_modules())}
    with plain_functions(model):  # a probe may run a copy of a module
        found = [site for probe in sorted(PROBES) for site in import_module(probe).find(model, sites)]
    return replace(sites, brought=tuple(sorted(found, key=lambda site: place[site.name])))
