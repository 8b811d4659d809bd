"""Which coins a case has used and what for: one number that decides two things makes them depend on each other.

The hash has no word for the purpose (existing baselines fix its four words), so the plain sampler at column c and a
verify at slot c share a number whenever seed and position agree. The ledger makes that visible.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum


class Stream(StrEnum):
    """What a coin decides. Values are written into reports and do not change."""

    PLAIN_SAMPLE = "plain-sample"  # column = vocabulary id, or rank after sorting
    VERIFY_REJECT = "verify-reject"  # columns 0 .. D - 1
    VERIFY_FINAL = "verify-final"  # column D
    DRAFT_SAMPLE = "draft-sample"  # reserved: upstream still draws these from the global generator


class CoinReusedError(ValueError):
    """One coin was consumed twice for the same purpose."""


@dataclass
class CoinLedger:
    """Every (seed, position, column, stream) that one case consumes."""

    used: dict[tuple[int, int, int], set[Stream]] = field(default_factory=lambda: defaultdict(set))

    def consume(self, stream: Stream, seed: int, position: int, column: int) -> None:
        """Note one coin; CoinReusedError if this stream has consumed it already."""
        key = (seed % 2**64, position % 2**32, column % 2**32)
        if stream in self.used[key]:
            raise CoinReusedError(
                f"coin (seed {seed}, position {position}, column {column}) of {stream.value} was consumed twice: "
                "give each request its own seed and advance its position between steps"
            )
        self.used[key].add(stream)

    def consume_verify(self, seed: int, length: int, draft_token_num: int) -> None:
        """Note the D + 1 coins of one request's verify."""
        for column in range(draft_token_num):
            self.consume(Stream.VERIFY_REJECT, seed, length, column)
        self.consume(Stream.VERIFY_FINAL, seed, length, draft_token_num)

    def shared(self) -> tuple[tuple[int, int, int], ...]:
        """(seed, position, column) that more than one stream consumed, sorted: correlated, though each is unique."""
        return tuple(sorted(key for key, streams in self.used.items() if len(streams) > 1))
