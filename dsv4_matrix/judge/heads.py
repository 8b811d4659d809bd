"""Which heads fail, in the words in which a kernel deals with heads: one, a range, or every so many."""

from __future__ import annotations

from collections.abc import Sequence


def name_heads(failing: Sequence[int], heads: int, most: int = 8) -> str:
    """``2 only``, ``64 to 127``, ``6 mod 8`` or ``0, 3, 4 and 6 more``; empty where none or all of ``heads`` fail.

    ``failing`` is ascending, without repetition.
    """
    if not failing or len(failing) == heads:
        return ""
    first, last = failing[0], failing[-1]
    if len(failing) == 1:
        return f"{first} only"
    if last - first == len(failing) - 1:
        return f"{first} to {last}"
    apart = failing[1] - first
    in_lanes = apart & (apart - 1) == 0  # a kernel's tiles are powers of two
    if in_lanes and first < apart and list(failing) == list(range(first, heads, apart)):
        return f"{first} mod {apart}"
    more = f" and {len(failing) - most} more" if len(failing) > most else ""
    return ", ".join(map(str, failing[:most])) + more
