"""Where files of the repository lie in the site, and links between them.

Pages of docs/ link each other, and other files, relative to their own place in the repository, so that they read well
without the site. In the site a Markdown file is a page; a file of source text is a page of its numbered lines under
`source/`; any other file is copied there.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Pages that lie outside of docs/.
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "examples/multi_gpu.md": "multi-gpu.md",
}
#: Suffix of a file -> the language of its page of source text.
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash"}
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?P<start>\]\()(?P<target>[^)#\s]*)(?P<anchor>#[^)\s]+)?(?P<end>\))")


def place(path: str) -> str:
    """Where a file of the repository lies among the files from which the site is built."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md" if Path(path).suffix in LANGUAGES else f"source/{path}"


def rewritten(text: str, path: str) -> str:
    """The text of the page at `path` of the repository, its links as the site has them."""
    here = posixpath.dirname(place(path))
    return "".join(_LINK.sub(lambda found: _link(found, path, here), part) if linked else part
                   for linked, part in _parts(text))  # fmt: skip


def targets(text: str, path: str) -> set[str]:
    """Files of the repository that the page at `path` links."""
    found = (_LINK.finditer(part) for linked, part in _parts(text) if linked)
    links = (link["target"] for each in found for link in each)
    return {_file(link, path) for link in links if link and not _outside(link)}


def _link(found: re.Match[str], path: str, here: str) -> str:
    target, anchor = found["target"], found["anchor"] or ""
    if not target or _outside(target):
        return found[0]
    file = _file(target, path)
    if Path(file).suffix in LANGUAGES:
        anchor = anchor.replace("#L", "#L-")
    return f"{found['start']}{posixpath.relpath(place(file), here or '.')}{anchor}{found['end']}"


def _file(target: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def _outside(target: str) -> bool:
    return target.startswith(("http:", "https:", "mailto:"))


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """Parts of a page, and whether links are links there: they are not in blocks of code."""
    end = 0
    for fence in _FENCE.finditer(text):
        yield True, text[end : fence.start()]
        yield False, fence[0]
        end = fence.end()
    yield True, text[end:]
