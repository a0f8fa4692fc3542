"""Each example runs for three steps on the real model, patched, and its loss is a number."""

from __future__ import annotations

import math
import re
import runpy
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = {"encoder": "all-MiniLM-L6-v2", "embeddings": "all-MiniLM-L6-v2"}
#: Modules that run memopt's forward at least: the norms, and the product of each block's MLP where it is patched.
LEAST = {"encoder": 19, "qlora": 62, "plain": 14, "diffusion": 100, "embeddings": 44}
#: Libraries that these examples alone need.
LIBRARIES = {"diffusion": "diffusers", "embeddings": "sentence_transformers"}


@pytest.mark.parametrize(
    "name",
    [
        *("full", "encoder", "sft", "dpo", "plain", "diffusion", "embeddings"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("lora", "qlora")),
    ],
)
@pytest.mark.rotates(3)
def test_an_example_trains_a_patched_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = EXAMPLES.parent / "models" / MODELS.get(name, "SmolLM2-135M-Instruct")
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed")
    if name != "diffusion" and not model.is_dir():
        pytest.skip(f"models/{model.name} is missing; get it with: python examples/demo/fetch_models.py {model.name}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--steps", "3"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    losses = re.search(r"loss (\S+) -> (\S+) in 3 steps", out)
    assert losses is not None
    assert all(math.isfinite(float(loss)) for loss in losses.groups())
    patched = re.search(r"(\d+) modules run memopt's forward", out)
    assert patched is not None
    assert int(patched[1]) >= LEAST.get(name, 92)


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last() -> None:
    model = EXAMPLES.parent / "models" / "SmolLM2-135M-Instruct"
    if not model.is_dir():
        pytest.skip(f"models/{model.name} is missing; get it with: python examples/demo/fetch_models.py {model.name}")
    book = nbformat.read(EXAMPLES / "quick_start.ipynb", 4)
    for cell in book.cells:
        assert not cell.get("outputs"), "outputs of the machine that wrote it"
        cell.source = cell.source.replace("BATCH, TOKENS = 4, 256", "BATCH, TOKENS = 1, 64")
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    shown = [out.get("text") or out["data"]["text/plain"] for cell in book.cells for out in cell.get("outputs", ())]
    out = "\n".join(shown)
    assert "needs" in out
    assert "Fit(" not in out
    saved = {name: float(mib) for name, mib in re.findall(r"^(stock|memopt): (\d+) MiB", out, re.MULTILINE)}
    assert saved["memopt"] < 0.6 * saved["stock"]
    difference = re.search(r"difference of all gradients: (\S+)%", out)
    assert difference is not None
    assert float(difference[1]) < 2
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", out)]
    assert len(losses) == 3
    assert losses[2] < losses[0]


def test_an_example_is_short() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert len(lines) == 10
    assert max(lines.values()) < 60
