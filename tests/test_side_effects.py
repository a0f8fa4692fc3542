"""Patching changes the model's forwards and nothing else in the process."""

from __future__ import annotations

import re
from pathlib import Path

import memopt
from tests.support.processes import run_code

_VERBS = ("patch", "plan_for", "unpatch", "patch_checkpoint", "verify", "report", "load")


def test_no_verb_changes_anything_global(tmp_path: Path) -> None:
    """In a process of its own: what a first import changes counts too."""
    ran = run_code("import sys; from tests.test_side_effects import examine; examine(sys.argv[1])", str(tmp_path))
    assert ran.code == 0, ran.err
    assert ran.out.split("\n") == [*(f"{verb}: " for verb in _VERBS), ""], ran.out


def test_nothing_seeds_the_generators_of_devices() -> None:
    """`torch.manual_seed` also seeds CUDA where it was not used yet, and nothing can take that back."""
    sources = Path(memopt.__file__).parent.rglob("*.py")
    assert [str(path) for path in sources if re.search(r"^[^#`]*torch\.manual_seed\(", path.read_text(), re.M)] == []


def examine(name: str) -> None:
    """Call every verb, with files in the folder `name`, and print a line for each: what it has changed."""
    import random

    import numpy as np
    import torch

    from tests.factories import tiny_inputs, tiny_model
    from tests.support.garbage import ShortCollections
    from tests.support.global_state import changes, global_state, model_state

    class Drawing(torch.nn.Module):
        """Draws from every generator that a model may read, as layer drop and masks of spectra do."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = random.random() + np.random.rand() + float(torch.rand(()))
            return torch.nn.functional.dropout(self.linear(self.norm(x)) * scale, 0.1, training=True)

    folder, collections = Path(name), ShortCollections()
    model, bert, drawing = tiny_model("llama"), tiny_model("bert"), Drawing()
    model.save_pretrained(folder / "original")
    x = {"x": torch.ones(2, 3, 8)}
    verbs = {
        "patch": lambda: (memopt.patch(model), memopt.patch(drawing, inputs=x)),
        "plan_for": lambda: (memopt.plan_for(bert), memopt.plan_for(folder / "original")),
        "unpatch": lambda: (memopt.unpatch(model), memopt.unpatch(drawing)),
        "patch_checkpoint": lambda: memopt.patch_checkpoint(folder / "original", folder / "patched"),
        "verify": lambda: memopt.verify(folder / "patched"),
        "report": lambda: memopt.report(folder / "original", "sampled"),
        "load": lambda: memopt.load(folder / "patched"),
    }
    model(**tiny_inputs("llama", 1, 4)).loss.backward()  # what a first call of the model's own changes
    stock = model_state(model)
    for verb in _VERBS:
        collections.freeze_if_slow()
        before = global_state()
        verbs[verb]()
        found = changes(before, global_state())
        if verb == "unpatch":
            found += changes(stock, model_state(model))
        print(f"{verb}: {'; '.join(found)}")
