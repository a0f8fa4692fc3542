"""Results as a bar chart in SVG, without a plotting library.

python -m benchmarks.plot RESULT.json CHART.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

_ROW, _LABELS, _BARS, _VALUES, _MARGIN = 20, 250, 460, 190, 12
_COLOURS = {"memopt": "#1b7f5a", "other": "#9aa5b1", "line": "#c0392b", "text": "#1f2933"}


@dataclass(frozen=True)
class Bar:
    """One value; without one the bar is empty and `note` says why."""

    label: str
    value: float | None
    note: str
    ours: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("result", type=Path, help="JSON of benchmarks.step, .kernels or .block")
    parser.add_argument("chart", type=Path, help="SVG to write")
    arguments = parser.parse_args()
    plot(json.loads(arguments.result.read_text(encoding="utf-8")), arguments.chart)
    return 0


def plot(content: dict[str, Any], path: Path) -> None:
    """Draw the result of one benchmark into `path`."""
    if "cases" in content:
        title, bars = _block_bars(content)
    else:
        title, bars = _step_bars(content) if "variant" in content["rows"][0] else _kernel_bars(content)
    title += f" ({content['device']['name']})"
    if content["dry_run"]:
        title = f"Dry run: numbers mean nothing. {title}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(chart(title, bars), encoding="utf-8")


def chart(title: str, bars: Sequence[Bar]) -> str:
    """Horizontal bars of `bars` on one scale, with a line at 1."""
    width = _LABELS + _BARS + _VALUES
    height = 2 * _MARGIN + _ROW * (len(bars) + 2)
    scale = _BARS / max([1.05, *(bar.value for bar in bars if bar.value is not None)])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="{_COLOURS["text"]}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_MARGIN}" y="{_MARGIN + 12}" font-weight="bold">{escape(title)}</text>',
    ]
    top = _MARGIN + _ROW + 6
    for index, bar in enumerate(bars):
        y = top + index * _ROW
        length = scale * (bar.value or 0)
        colour = _COLOURS["memopt" if bar.ours else "other"]
        parts += [
            f'<text x="{_LABELS - 8}" y="{y + 13}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect x="{_LABELS}" y="{y + 3}" width="{length:.1f}" height="{_ROW - 6}" fill="{colour}"/>',
            f'<text x="{_LABELS + length + 6:.1f}" y="{y + 13}">{escape(bar.note)}</text>',
        ]
    one = _LABELS + scale
    bottom = top + _ROW * len(bars)
    parts += [
        f'<line x1="{one:.1f}" y1="{top}" x2="{one:.1f}" y2="{bottom}" stroke="{_COLOURS["line"]}"/>',
        f'<text x="{one:.1f}" y="{bottom + 14}" text-anchor="middle">1</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _kernel_bars(content: dict[str, Any]) -> tuple[str, list[Bar]]:
    """Every kernel's share of a copy's bandwidth at the first size of the result."""
    timed = [row for row in content["rows"] if "median" in row]
    first = _size(timed[0]) if timed else None
    copies = {_key(row): row["median"] for row in timed if row["provider"] == "copy"}
    bars = []
    for row in timed:
        if row["provider"] == "kernel" and _size(row) == first and _key(row) in copies:
            share = copies[_key(row)] / row["median"]
            note = f"{share:.2f}   {row['floor_bytes_per_second'] / 1e9:.0f} GB/s"
            bars.append(Bar(f"{row['op']}, {row['direction']}", share, note, ours=True))
    where = "" if first is None else ", {} tokens x {}, {}".format(*first)
    return f"Bandwidth of each kernel / bandwidth of a copy{where}", bars


def _size(row: dict[str, Any]) -> tuple[int, int, str]:
    return row["tokens"], row["hidden"], row["dtype"]


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["op"], row["direction"], *_size(row))


def _block_bars(content: dict[str, Any]) -> tuple[str, list[Bar]]:
    """Every provider's step time relative to eager, with what it keeps a block."""
    bars = []
    for case in content["cases"]:
        for row in case["rows"]:
            label = f"{case['name']}: {row['provider']}"
            if "ratio_to_eager" in row:
                note = f"{row['ratio_to_eager']:.3f}   {row['units_per_block']:.2f} units kept a block"
                bars.append(Bar(label, row["ratio_to_eager"], note, ours=row["provider"].startswith("memopt")))
            else:
                bars.append(Bar(label, None, row.get("error", "not measured"), ours=False))
    return "Time of a training step / time of the stock model's", bars


def _step_bars(content: dict[str, Any]) -> tuple[str, list[Bar]]:
    """Every variant's peak relative to the stock one's."""
    stock = {(row["case"], row["trained"]): row["peak"] for row in content["rows"] if row["variant"] == "stock"}
    bars = []
    for row in content["rows"]:
        share = row["peak"] / stock[row["case"], row["trained"]]
        way = {"ck": "checkpointing", "memopt + ck": "both"}.get(row["variant"], row["variant"])
        label = f"{row['case'].partition(',')[0]}: {way}"
        bars.append(Bar(label, share, f"{row['peak'] / 2**20:.0f} MiB", ours="memopt" in row["variant"]))
    return "Peak of a training step / the stock model's", bars


if __name__ == "__main__":
    raise SystemExit(main())
