"""Pictures of the codes of derivatives for docs/methods.md, with matplotlib (pip install 'memopt[plots]').

    python -m benchmarks.code_plots [FOLDER]    SVG files; FOLDER is docs/images by default

`derivative-KIND.svg`: f' and what each code makes of it. `code-errors.svg`: error against bits, and bytes that a GELU
block keeps against the error; the errors are those of `python -m benchmarks.derivative_error`, the units are 2 + a + r
(exact) and 2 + a + bits / 16 r with a = r = 4, which `python -m benchmarks.saved_bytes --approximate` measures.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.derivative_error import Row, measure
from memopt.kernels.derivative_codes.codes import apply_code, derivative_code, encode
from memopt.torch_compat.activations import ACTIVATIONS

KINDS = {"gelu_erf": "GELU", "silu": "SiLU"}
_SHOWN = ("published", "2bit", "3bit", "4bit")
_SCHEMES = ("published", "2bit", "3bit", "4bit", "8bit")
_ATTENTION = _EXPANSION = 4
#: The same file for the same numbers.
_METADATA = {"Date": None, "Creator": None}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs/images"))
    folder: Path = parser.parse_args().folder
    try:
        import matplotlib
        from matplotlib import pyplot
    except ModuleNotFoundError:
        print("The pictures need matplotlib: pip install 'memopt[plots]'", file=sys.stderr)
        return 2
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "memopt"
    folder.mkdir(parents=True, exist_ok=True)
    for kind, name in KINDS.items():
        _save(_derivatives(pyplot, kind, name), folder / f"derivative-{kind}.svg")
    _save(_errors(pyplot), folder / "code-errors.svg")
    return 0


def _derivatives(pyplot: Any, kind: str, name: str) -> Any:
    z = torch.linspace(-5, 5, 4001, dtype=torch.float64)
    ones = torch.ones_like(z)
    figure, axes = pyplot.subplots(1, len(_SHOWN), figsize=(11, 2.8), sharey=True)
    for axis, scheme in zip(axes, _SHOWN, strict=True):
        code = derivative_code(kind, scheme)
        axis.plot(z, ACTIVATIONS[kind].gradient(ones, z), color="#9aa5b1", linewidth=3)
        axis.plot(z, apply_code(ones, encode(z, code), code), color="#1b7f5a", linewidth=1)
        axis.set_title(f"{scheme}: {code.error:.1%} off", fontsize=10)
        axis.set_xlabel("z")
    axes[0].set_ylabel(f"{name}'(z)")
    figure.tight_layout()
    return figure


def _errors(pyplot: Any) -> Any:
    figure, (bits_axis, units_axis) = pyplot.subplots(1, 2, figsize=(11, 3.4))
    for kind, name in KINDS.items():
        rows: list[Row] = [measure(kind, scheme) for scheme in _SCHEMES]
        fitted = [row for row in rows if row.scheme != "published"]
        published = next(row for row in rows if row.scheme == "published")
        (line,) = bits_axis.plot(
            [row.bits for row in fitted], [100 * row.error for row in fitted], marker="o", label=f"{name}, fitted"
        )
        bits_axis.plot(
            published.bits, 100 * published.error, marker="x", linestyle="", color=line.get_color(),
            label=f"{name}, published",
        )  # fmt: skip
        units_axis.plot(
            [100 * row.error for row in rows], [_units(row.bits) for row in rows], marker="o", linestyle="", label=name
        )
    bits_axis.set(xlabel="bits an element", ylabel="error of the derivative, %", yscale="log")
    exact = 2 + _ATTENTION + _EXPANSION
    units_axis.axhline(exact, color="#c0392b", linewidth=1, label="exact")
    units_axis.set(xlabel="error of the derivative, %", ylabel="units a GELU block, fc2 frozen", xscale="log")
    for axis in (bits_axis, units_axis):
        axis.legend(fontsize=8)
    figure.tight_layout()
    return figure


def _units(bits: int) -> float:
    return 2 + _ATTENTION + bits / 16 * _EXPANSION


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata=_METADATA)
    print(path)


if __name__ == "__main__":
    raise SystemExit(main())
