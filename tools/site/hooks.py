"""What mkdocs calls while it builds the site (`hooks` in mkdocs.yml).

The pages of docs/ are taken as they are. README.md is the first page; the references of the command line and of Python,
and pages of the source files that others link, are written here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from tools.site import api, commands, diagram, index, links

ROOT = links.ROOT
STATIC = Path(__file__).parent / "static"
_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
_OPTION = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")
_ROLE = re.compile(r":(?:func|class|mod|meth|attr|data):(?=<code>)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that do not lie in docs/, and every file that a page links."""
    pages = {f"docs/{file.src_uri}" for file in files.documentation_pages()} | links.ELSEWHERE.keys()
    linked = {target for page in pages for target in links.targets((ROOT / page).read_text(), page)}
    for path in sorted(links.ELSEWHERE.keys() | {path for path in linked if not path.startswith("docs/")}):
        _add(files, config, path)
    for asset in sorted(STATIC.iterdir()):
        files.append(File.generated(config, f"assets/{asset.name}", abs_src_path=str(asset)))
    for name, text in (("api.md", api.page()), ("cli.md", commands.page())):
        files.append(File.generated(config, name, content=text))
    return files


def _add(files: Files, config: Any, path: str) -> None:
    place = links.place(path)
    if not (ROOT / path).is_file():
        raise FileNotFoundError(f"a page links {path}, which is no file")
    if path in links.ELSEWHERE:
        files.append(File.generated(config, place, content=(ROOT / path).read_text()))
    elif place.endswith(".md"):
        files.append(File.generated(config, place, content=_source(path)))
    else:
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))


def _source(path: str) -> str:
    """The page of a source file: its lines, each with an anchor.

    The block is HTML, because mkdocs sees no anchors in what the Markdown extensions highlight.
    """
    lines = HtmlFormatter(linespans="L", cssclass="highlight source")
    text = highlight((ROOT / path).read_text(), get_lexer_by_name(links.LANGUAGES[Path(path).suffix]), lines)
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n{text}\n"


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Links as the site has them; graphs as pictures."""
    if page.file.src_uri.startswith("source/") or page.file.src_uri in ("api.md", "cli.md"):
        return markdown
    path = _path(page.file.src_uri)
    text = links.rewritten(markdown, path)
    text = _MERMAID.sub(lambda found: f"<figure>{diagram.drawn(found[1], 'graph: ' + page.file.name)}</figure>", text)
    return _unescaped(text)


def _path(place: str) -> str:
    """The file of the repository that lies at `place` of the site."""
    return {there: path for path, there in links.ELSEWHERE.items()}.get(place, f"docs/{place}")


def _unescaped(text: str) -> str:
    r"""GitHub wants `\|` for a bar in the code of a table's cell; here a code span needs none."""
    return "\n".join(
        re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in text.split("\n")
    )


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Docstrings without Sphinx's roles; options that are not broken at their hyphens."""
    return _CODE.sub(lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), _ROLE.sub("", html))


def on_post_build(config: Any) -> None:
    """Write llms.txt."""
    index.write(config)


def on_nav(nav: Any, config: Any, files: Files) -> Any:
    """Remember the order of the pages, for llms.txt."""
    index.remember(nav)
    return nav
