"""What each runner mode can be asked to do: the vocabulary that a declaration's modes are checked against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Drive:
    """How cases of one mode run.

    Attributes:
        forwards: the variant ``forward`` values that the mode runs; one of them means that variants may leave it out.
        graph: a step is captured once and replayed.
        uniform: every request has the same number of rows, as a captured graph needs.
    """

    forwards: tuple[str, ...]
    graph: bool = False
    uniform: bool = False


#: Forward values of variants, in the order in which a reader meets them.
FORWARDS = ("extend", "decode", "target-verify", "draft-extend")

DRIVES: Mapping[str, Drive] = MappingProxyType(
    {
        "eager": Drive(("extend", "decode")),
        "cg-decode": Drive(("decode",), graph=True, uniform=True),
        "pcg-extend": Drive(("extend",), graph=True),
        "bcg-extend": Drive(("extend",), graph=True),
        "verify-eager": Drive(("target-verify",)),
        "verify-cg": Drive(("target-verify",), graph=True, uniform=True),
        "de-eager": Drive(("draft-extend",)),
        "de-cg": Drive(("draft-extend",), graph=True, uniform=True),
        "de-v2-cg": Drive(("draft-extend",), graph=True, uniform=True),
        "eagle-draft-runner": Drive(("decode",), graph=True, uniform=True),
        "eagle-de-runner": Drive(("draft-extend",), graph=True, uniform=True),
        "fkvmtp-runner": Drive(("decode",), graph=True, uniform=True),
    }
)
