"""`llms.txt`: the pages of the site in the order of its navigation, each with its first sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_SENTENCE = re.compile(r"(.+?[.?!])(?:\s|$)")
#: How lines begin that are headings, tables, code, pictures or HTML.
_NO_TEXT = ("#", "|", "```", "!", "<", ":")
_navigation: list[Any] = []


def remember(nav: Any) -> None:
    """Keep the navigation of this build."""
    _navigation[:] = [nav]


def write(config: Any) -> None:
    """Write the file at the root of the built site."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for item in _navigation[0].items:
        pages = [item] if item.is_page else [each for each in item.children if each.is_page]
        if item.is_section or lines[-1].startswith(">"):
            lines += ["", f"## {item.title if item.is_section else 'Start'}", ""]
        lines += [f"- [{page.title}]({page.url}): {summary(page.markdown)}" for page in pages]
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n")


def summary(markdown: str) -> str:
    """The first sentence of a page, without markup."""
    for paragraph in re.split(r"\n\s*\n", markdown or ""):
        text = " ".join(line for line in paragraph.splitlines() if not line.startswith(_NO_TEXT))
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "").strip().removeprefix("- ")
        if not text.startswith("Written by ") and (found := _SENTENCE.match(f"{text} ")):
            return found[1]
    raise ValueError("a page has no sentence")
