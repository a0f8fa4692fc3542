"""Every error and warning of the source has an entry in docs/troubleshooting.md (`tools/messages.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from memopt.prediction.cards import find_card
from tools.messages import PAGE, ROOT, messages, missing, unused


def test_every_message_has_an_entry_and_every_entry_a_message() -> None:
    found = messages(ROOT / "src" / "memopt")
    assert len(found) > 200
    assert [f"{each.place}: {each.text}" for each in missing(found, PAGE.read_text())] == []
    assert unused(found, PAGE.read_text()) == []


def test_every_family_of_messages_says_what_to_do() -> None:
    for family in PAGE.read_text().split("\n### ")[1:]:
        assert "**Do:**" in family, family.partition("\n")[0]


def test_cards_that_the_page_names_exist() -> None:
    assert all(f"`{name}`" in PAGE.read_text() and find_card(name) for name in ("rtx4090", "h100-80gb", "24GiB"))


@pytest.mark.parametrize(
    "statement",
    [
        "raise MemoptError('A new message.')",
        "raise Deeper(f'A new message about {name}.', 'A hint.')",
        "warnings.warn('A new message.', stacklevel=2)",
        "logger.warning('A new message about %s.', name)",
        "raise RuntimeError('A new message.')",
        "text = 'A new message.'\n    raise MemoptError(text)",
        "raise MemoptError('A new message.' if name else 'The model is already patched.')",
    ],
)
def test_a_message_without_an_entry_is_found(tmp_path: Path, statement: str) -> None:
    (tmp_path / "errors.py").write_text("class MemoptError(Exception): ...\nclass Deeper(MemoptError): ...\n")
    (tmp_path / "new.py").write_text(f"def use(name):\n    {statement}\n")
    (new,) = missing(messages(tmp_path), PAGE.read_text())
    assert new.text.startswith("A new message")


def test_a_message_that_cannot_be_read_from_the_source_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text("raise MemoptError(computed())\n")
    with pytest.raises(ValueError, match=r"new\.py:1: the message computed\(\) cannot be read"):
        messages(tmp_path)
