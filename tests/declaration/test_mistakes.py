"""Every mistake is one line with its place, what was found and what is allowed; several are reported together."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dsv4_matrix.declaration import DeclarationError, Mistake, Place, read_matrix
from dsv4_matrix.declaration.mistakes import SHOWN


@dataclass
class Block:
    """One block of mistakes.txt."""

    name: str
    edits: list[tuple[list[str], list[str]]] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)


def _blocks() -> list[Block]:
    blocks = []
    text = Path(__file__).with_name("mistakes.txt").read_text(encoding="utf-8")
    for part in text.strip().split("\n\n")[1:]:
        name, *lines = part.split("\n")
        block = Block(name)
        for line in lines:
            kind, content = line[:2], line[2:]
            if kind == "= ":
                block.mistakes.append(content)
            elif kind == "+ ":
                block.edits[-1][1].append(content)
            else:
                assert kind == "- ", line
                if not block.edits or block.edits[-1][1]:
                    block.edits.append(([], []))
                block.edits[-1][0].append(content)
        assert block.edits, name
        assert block.mistakes, name
        blocks.append(block)
    return blocks


BLOCKS = _blocks()


@pytest.mark.parametrize("block", BLOCKS, ids=[block.name for block in BLOCKS])
def test_mistake_is_reported_at_its_place(block: Block, edited: Callable[..., bytes]) -> None:
    edits = [("\n".join(old), "\n".join(new)) for old, new in block.edits]
    with pytest.raises(DeclarationError) as caught:
        read_matrix(edited(*edits), "m.yaml")
    assert [str(mistake) for mistake in caught.value.mistakes] == [f"m.yaml:{text}" for text in block.mistakes]


def test_a_mistake_that_several_readers_find_is_told_once() -> None:
    """A profile's is found by each cell that uses it."""
    one, other = (Mistake(Place("m.yaml", 3, 5), found, "x") for found in ("a", "b"))
    assert DeclarationError((one, other, one)).mistakes == (one, other)


def test_small_declaration_has_no_mistake(edited: Callable[..., bytes]) -> None:
    # Without this, every block above could pass for a reason of the base text's own.
    assert len(read_matrix(edited(), "m.yaml").cells) == 4


def test_many_mistakes_fit_one_screen() -> None:
    mistakes = tuple(Mistake(Place("m.yaml", line, 1), f"mistake {line}", "none") for line in range(100, 0, -1))
    lines = str(DeclarationError(mistakes)).splitlines()
    assert lines[0].startswith("m.yaml:1:1: found mistake 1;")
    assert len(lines) == SHOWN + 1
    assert lines[-1] == "... and 80 more; mend the first ones and check again"


def test_found_text_is_cut(edited: Callable[..., bytes]) -> None:
    with pytest.raises(DeclarationError) as caught:
        read_matrix(edited(("state: deferred", "state: " + "x" * 3000)), "m.yaml")
    assert len(caught.value.mistakes[0].found) < 100


def test_error_crosses_processes() -> None:
    error = DeclarationError((Mistake(Place("m.yaml", 1, 2), "a", "b"),))
    assert pickle.loads(pickle.dumps(error)).mistakes == error.mistakes
