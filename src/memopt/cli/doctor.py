"""`memopt doctor`: versions, the device, and the features that are off here, with reasons."""

from __future__ import annotations

import os
import platform
from typing import Any

from memopt.cli import common

#: Distribution -> what memopt uses it for.
_PACKAGES = {
    "torch": "everything",
    "transformers": "models of the hub",
    "triton": "kernels on a GPU",
    "peft": "LoRA",
    "accelerate": "Trainer",
    "trl": "its trainers",
    "bitsandbytes": "4-bit weights, 8-bit optimizers",
    "flash-linear-attention": "linear attention (Qwen3.5, Qwen3-Next)",
    "causal-conv1d": "convolutions of hybrids",
    "mamba-ssm": "state space models",
    "flash-attn": "attention over windows",
}


def doctor(json_output: common.JsonOption = False) -> int:
    """Show versions, the device, and what is off here and why.

    Example: memopt doctor
    """
    packages = {name: _version(name) for name in _PACKAGES}
    device, off = _device(), _off()
    if json_output:
        common.print_json(
            common.document(
                "doctor", "pass", python=platform.python_version(), packages=packages, device=device, off=off
            )
        )
        return common.EXIT_OK
    from rich.table import Table

    table = Table("package", "version", "for", box=None, padding=(0, 2, 0, 0))
    table.add_row("python", platform.python_version(), "")
    for name, version in packages.items():
        table.add_row(name, version or "-", _PACKAGES[name])
    common.print_rich(table)
    common.say("", f"Device: {device}.", *(f"Off: {each}." for each in off))
    if not off:
        common.say("Nothing is off.")
    return common.EXIT_OK


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return "no CUDA or ROCm device"
    found: Any = torch.cuda.get_device_properties(0)
    more = torch.cuda.device_count() - 1
    others = f", and {more} more" if more else ""
    return f"{found.name}, {found.total_memory / 2**30:.1f} GiB, compute capability {found.major}.{found.minor}{others}"


def _off() -> list[str]:
    """Features that do not run here, each with its reason."""
    import torch

    from memopt.torch_compat import missing

    found = [f"{each.lost}, since PyTorch {torch.__version__} lacks {each.name}" for each in missing()]
    same = "patched modules compute with PyTorch, and save the same bytes"
    if not torch.cuda.is_available():
        found.append(f"Triton kernels, since there is no GPU: {same}")
    elif os.environ.get("MEMOPT_TRITON") == "0":
        found.append(f"Triton kernels, by MEMOPT_TRITON=0: {same}")
    elif _version("triton") is None:
        found.append(f"Triton kernels, since triton is not installed: {same}, in more time")
    if _version("peft") is None:
        found.append("reports and tests of LoRA, since peft is not installed: pip install peft")
    return found
