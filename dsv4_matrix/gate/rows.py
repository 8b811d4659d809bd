"""Raw bits of rows beside a report, so that a mismatch can be told in bits and not only in digests."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from dsv4_matrix.report.digest import ITEM_SIZES, DigestError

#: Mantissa bits of the floating types; the rest but one are exponent.
_MANTISSA = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}


@dataclass(frozen=True)
class RowStore:
    """One file a row in ``folder``, named by a hash since keys may hold any character."""

    folder: Path

    def put(self, case: str, tensor: str, row: str, dtype: str, data: bytes) -> None:
        """Keep one row. DigestError if the bytes are no whole number of elements."""
        if len(data) % ITEM_SIZES[dtype]:
            raise DigestError(f"row {row} of {case} {tensor}: {len(data)} bytes are no whole number of {dtype}")
        self.folder.mkdir(parents=True, exist_ok=True)
        header = json.dumps({"case": case, "dtype": dtype, "row": row, "tensor": tensor}, sort_keys=True)
        self._path(case, tensor, row).write_bytes(header.encode("ascii") + b"\n" + data)

    def get(self, case: str, tensor: str, row: str) -> tuple[str, bytes] | None:
        """``(dtype, bytes)``, or None if the row was not kept."""
        path = self._path(case, tensor, row)
        if not path.is_file():
            return None
        header, _, data = path.read_bytes().partition(b"\n")
        return str(json.loads(header)["dtype"]), data

    def _path(self, case: str, tensor: str, row: str) -> Path:
        name = hashlib.sha256("\0".join((case, tensor, row)).encode()).hexdigest()
        return self.folder / f"{name}.row"


def describe(a: RowStore, b: RowStore, case: str, tensor: str, row: str) -> str:
    """The first differing element of a row, both bit patterns and their distance; empty where a run kept no bits."""
    left, right = a.get(case, tensor, row), b.get(case, tensor, row)
    if left is None or right is None:
        return ""
    (dtype, x), (other, y) = left, right
    if dtype != other or len(x) != len(y):
        return f"{dtype} of {len(x)} bytes against {other} of {len(y)} bytes"
    size = ITEM_SIZES[dtype]
    columns = [at for at in range(0, len(x), size) if x[at : at + size] != y[at : at + size]]
    if not columns:
        return ""
    patterns = [int.from_bytes(side[columns[0] : columns[0] + size], "little") for side in (x, y)]
    apart = _steps(patterns[0], patterns[1], dtype)
    return (
        f"column {columns[0] // size}: 0x{patterns[0]:0{2 * size}X} against 0x{patterns[1]:0{2 * size}X}{apart}; "
        f"{len(columns)} of {len(x) // size} elements differ"
    )


def _steps(left: int, right: int, dtype: str) -> str:
    """``, 3 ulp apart`` for two numbers of a floating type; the two zeros are one value."""
    if dtype not in _MANTISSA:
        return ""
    sign = 1 << 8 * ITEM_SIZES[dtype] - 1
    infinity = sign - (1 << _MANTISSA[dtype])
    if (left & sign - 1) > infinity or (right & sign - 1) > infinity:
        return ""

    def ordered(pattern: int) -> int:
        return -(pattern & sign - 1) if pattern & sign else pattern

    return f", {abs(ordered(left) - ordered(right))} ulp apart"
