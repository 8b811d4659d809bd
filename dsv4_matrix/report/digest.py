"""Digests of tensors as a report keeps them: equal for equal bits of equal shape and type, and for nothing else.

SHA-256 of an ASCII header and the little-endian bytes of the elements in row-major order::

    dsv4det1\\n<name>\\n<dtype>\\n<d0,d1,...>\\n<bytes>

Elements that nothing defines (pad rows, unused slots) are left out under a mask, which is part of the header, so that
two runs that define different elements differ::

    dsv4det1\\n<name>\\n<dtype>\\n<d0,d1,...>\\nmask <sha256 of one 0/1 byte an element>\\n<bytes of the defined ones>

+0 and -0 differ, and so do NaNs of different payload: values are never compared, only bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

VERSION = "dsv4det1"

#: Bytes an element, by the type's name as numpy and torch (without ``torch.``) spell it.
ITEM_SIZES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}


class DigestError(ValueError):
    """Bytes that do not fit the name, type, shape or mask given for them."""


def digest(
    name: str, dtype: str, shape: Sequence[int], data: bytes | memoryview, mask: bytes | memoryview | None = None
) -> str:
    """Hex SHA-256 of one tensor.

    Args:
        name: of the tensor in its case, printable ASCII without spaces.
        dtype: a key of ``ITEM_SIZES``.
        shape: all dimensions, ``()`` for a scalar.
        data: all elements, row-major, little-endian; undefined ones included.
        mask: one byte an element, 1 where defined and 0 elsewhere; None if all are.

    Raises:
        DigestError: sizes that do not match, or names that would make two headers alike.
    """
    _check_name(name)
    size = _item_size(dtype, name)
    elements = math.prod(shape)
    data = memoryview(data).cast("B")
    if len(data) != elements * size:
        raise DigestError(
            f"digest {name}: {dtype} {list(shape)} has {elements * size} bytes, got {len(data)}; hand over the "
            "contiguous elements of the whole tensor"
        )
    header = f"{VERSION}\n{name}\n{dtype}\n{','.join(str(int(dim)) for dim in shape)}\n"
    hasher = hashlib.sha256(header.encode("ascii"))
    if mask is None:
        hasher.update(data)
        return hasher.hexdigest()
    mask = bytes(mask)
    if len(mask) != elements or mask.strip(b"\0\1"):
        raise DigestError(f"digest {name}: the mask needs one byte 0 or 1 for each of {elements} elements")
    hasher.update(f"mask {hashlib.sha256(mask).hexdigest()}\n".encode("ascii"))
    for first, last in _runs(mask):
        hasher.update(data[first * size : last * size])
    return hasher.hexdigest()


def row_digests(
    name: str, dtype: str, shape: Sequence[int], data: bytes | memoryview, keys: Iterable[str]
) -> dict[str, str]:
    """Digest of each row (first dimension) by its logical key, which stays while the row moves within a batch.

    The row's key is not in its digest, so that rows that were exchanged show as two mismatches.

    Raises:
        DigestError: not one key a row, a key twice, or bytes that do not fit.
    """
    keys = list(keys)
    if not shape or len(keys) != shape[0]:
        raise DigestError(f"digest {name}: {len(keys)} row keys for shape {list(shape)}; give one a row")
    if len(set(keys)) != len(keys):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise DigestError(f"digest {name}: row keys occur twice: {', '.join(twice)}")
    data = memoryview(data).cast("B")
    width = math.prod(shape[1:]) * _item_size(dtype, name)
    if len(data) != width * shape[0]:
        raise DigestError(f"digest {name}: {dtype} {list(shape)} has {width * shape[0]} bytes, got {len(data)}")
    rows = (data[at * width : (at + 1) * width] for at in range(shape[0]))
    return {key: digest(name, dtype, shape[1:], row) for key, row in zip(keys, rows, strict=True)}


def _check_name(name: str) -> None:
    if not name or not name.isascii() or not name.isprintable() or " " in name:
        raise DigestError(f"digest: name {name!r} is not printable ASCII without spaces")


def _item_size(dtype: str, name: str) -> int:
    if dtype not in ITEM_SIZES:
        raise DigestError(f"digest {name}: unknown type {dtype!r}; known are {', '.join(ITEM_SIZES)}")
    return ITEM_SIZES[dtype]


def _runs(mask: bytes) -> Iterable[tuple[int, int]]:
    """[first, last) of each run of ones."""
    first = mask.find(1)
    while first >= 0:
        last = mask.find(0, first)
        last = len(mask) if last < 0 else last
        yield first, last
        first = mask.find(1, last)
