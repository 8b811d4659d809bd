"""Text that others chose, such as a kernel's words for its choice, made to keep to its line and to its cell."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Line breaks and what else cannot be printed become spaces, at the ends nothing; all other text is as it was."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else " " for character in text).strip()


def cell(text: str) -> str:
    """Text of one cell of a Markdown table."""
    return one_line(text).replace("\\", "\\\\").replace("|", "\\|")
