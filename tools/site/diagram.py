"""A Mermaid graph (`graph TD`, lines `a --> b`) as SVG, so that a page shows it without a script from elsewhere.

The longest path is one column. Every other node stands beside it, in the first column that is free from the lowest node
above it to the lowest node that it leads to. Lines have the colour of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_EDGE = re.compile(r"^ *(\w+) --> (\w+)$", re.MULTILINE)
_WIDTH, _HEIGHT, _ACROSS, _DOWN = 116, 26, 156, 44


def drawn(graph: str, label: str) -> str:
    """The SVG of a graph.

    Args:
        label: what the picture shows, for readers who do not see it.

    Raises:
        ValueError: the graph has a line that is no edge, or a circle.
    """
    edges = _EDGE.findall(graph)
    lines = [line for line in graph.strip().splitlines()[1:] if line.strip()]
    if not graph.startswith("graph TD\n") or len(edges) != len(lines):
        raise ValueError(f"tools/site/diagram.py draws only `graph TD` with lines `a --> b`: {graph[:60]!r}")
    targets: dict[str, list[str]] = {name: [] for edge in edges for name in edge}
    for source, target in edges:
        targets[source].append(target)
    levels = {name: _level(name, targets) for name in targets}
    columns = _columns(edges, targets, levels)
    top = max(levels.values())
    at = {name: (columns[name] * _ACROSS + 4, (top - level) * _DOWN + 4) for name, level in levels.items()}
    width = max(x for x, _ in at.values()) + _WIDTH + 4
    height = top * _DOWN + _HEIGHT + 8
    parts = [
        f'<svg class="graph" role="img" aria-label="{label}" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" xmlns="http://www.w3.org/2000/svg">',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>',
        *(_line(at[source], at[target]) for source, target in edges),
        *(part for name, place in at.items() for part in _box(name, *place)),
        "</svg>",
    ]
    return "".join(parts)


def _level(name: str, targets: dict[str, list[str]], above: tuple[str, ...] = ()) -> int:
    """Edges of the longest path from a node to one that leads nowhere."""
    if name in above:
        raise ValueError(f"the graph has a circle through {name}")
    return max((1 + _level(each, targets, (*above, name)) for each in targets[name]), default=0)


def _columns(edges: list[tuple[str, str]], targets: dict[str, list[str]], levels: dict[str, int]) -> dict[str, int]:
    main = [max(levels, key=lambda name: levels[name])]
    while targets[main[-1]]:
        main.append(max(targets[main[-1]], key=lambda name: levels[name]))
    columns = dict.fromkeys(main, 0)
    taken: list[tuple[int, int, int]] = []
    for name in sorted(levels.keys() - columns.keys(), key=lambda name: (-levels[name], name)):
        first = max([levels[name], *(levels[source] for source, target in edges if target == name)])
        last = min([levels[name], *(levels[target] for target in targets[name])])
        column = 1
        while any(c == column and last < high and low < first for c, low, high in taken):
            column += 1
        columns[name] = column
        taken.append((column, last, first))
    return columns


def _line(start: tuple[int, int], end: tuple[int, int]) -> str:
    """From the bottom of a box straight down, or round one corner: into the side of a box further left."""
    (x, y), (to_x, to_y) = start, end
    middle, half = x + _WIDTH // 2, _HEIGHT // 2
    if x == to_x:
        path = f"M{middle} {y + _HEIGHT}V{to_y}"
    elif x > to_x:
        path = f"M{middle} {y + _HEIGHT}V{to_y + half}H{to_x + _WIDTH}"
    else:
        path = f"M{x + _WIDTH} {y + half}H{to_x + _WIDTH // 2}V{to_y}"
    return f'<path d="{path}" fill="none" stroke="currentColor" stroke-opacity=".6" marker-end="url(#arrow)"/>'


def _box(name: str, x: int, y: int) -> Iterator[str]:
    yield (
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="4" fill="var(--md-code-bg-color)"'
        ' stroke="currentColor" stroke-opacity=".4"/>'
    )
    yield (
        f'<text x="{x + _WIDTH // 2}" y="{y + _HEIGHT // 2 + 4}" text-anchor="middle" font-size="13"'
        f' fill="currentColor">{name}</text>'
    )
