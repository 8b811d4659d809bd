"""Tensors compared bit for bit: their digests, and where and by how much two of them first part."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_matrix.report import digest as plain

#: Integer type of the same width, to look at bits through.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: The NaN that all NaNs become under ``nan="canonical"``: quiet, positive, no payload.
_QUIET_NAN = {torch.float64: 0x7FF8 << 48, torch.float32: 0x7FC00000, torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}


@dataclass(frozen=True)
class Difference:
    """Where two tensors part first, in row-major order.

    Attributes:
        row, column: index in the first dimension, and flat index in the rest of it.
        key: the row's logical name.
        left, right: bit patterns, as wide as the type, ``0x3F800000``.
        left_value, right_value: what they mean.
        ulps: representable values from one to the other; 0 for +0 and -0, None for NaN and integers.
        elements, rows: how many differ in all.
        of_elements, of_rows: out of how many.
    """

    row: int
    column: int
    key: str
    left: str
    right: str
    left_value: float
    right_value: float
    ulps: int | None
    elements: int
    rows: int
    of_elements: int
    of_rows: int

    def __str__(self) -> str:
        apart = "" if self.ulps is None else f", {self.ulps} ulp apart"
        return (
            f"row {self.key} (at {self.row}) column {self.column}: {self.left} ({self.left_value!r}) against "
            f"{self.right} ({self.right_value!r}){apart}; {self.elements} of {self.of_elements} elements in "
            f"{self.rows} of {self.of_rows} rows differ"
        )


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same width, contiguous, on the CPU: equal there means equal in every bit."""
    tensor = tensor.detach().contiguous().cpu()
    return tensor.view(_BITS[tensor.element_size()])


def bit_equal(left: Tensor, right: Tensor) -> bool:
    """Whether type, shape and every bit agree; unlike ``torch.equal``, +0 is not -0 and a NaN equals itself."""
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(as_bits(left), as_bits(right))


def tensor_digest(name: str, tensor: Tensor, *, mask: Tensor | None = None, canonical_nan: bool = False) -> str:
    """``report.digest.digest`` of a tensor on any device.

    Args:
        mask: bool, shape of ``tensor`` or of its leading dimensions: which elements are defined.
        canonical_nan: all NaNs count as one; the payload decides otherwise.
    """
    tensor = _canonical(tensor) if canonical_nan else tensor
    defined = None
    if mask is not None:
        shape = (*mask.shape, *[1] * (tensor.dim() - mask.dim()))
        defined = _raw(mask.to(torch.bool).reshape(shape).expand(tensor.shape).to(torch.uint8))
    return plain.digest(name, type_name(tensor), tuple(tensor.shape), _raw(tensor), defined)


def row_digests(name: str, tensor: Tensor, keys: Sequence[str], *, canonical_nan: bool = False) -> dict[str, str]:
    """``report.digest.row_digests`` of a tensor: digest by logical row."""
    tensor = _canonical(tensor) if canonical_nan else tensor
    return plain.row_digests(name, type_name(tensor), tuple(tensor.shape), _raw(tensor), keys)


def type_name(tensor: Tensor) -> str:
    """``float32``, ``bfloat16``, ... as digests spell types."""
    return str(tensor.dtype).removeprefix("torch.")


def first_difference(left: Tensor, right: Tensor, keys: Sequence[str] | None = None) -> Difference | None:
    """Where two tensors of one type and shape part, or None if every bit agrees.

    Args:
        keys: logical names of the rows, by default their indices.

    Raises:
        ValueError: different types or shapes, which no element can show.
    """
    if left.dtype != right.dtype or left.shape != right.shape:
        raise ValueError(
            f"first_difference: {type_name(left)} {list(left.shape)} against {type_name(right)} {list(right.shape)}; "
            "compare tensors of one type and shape"
        )
    rows = left.shape[0] if left.dim() else 1
    if left.numel() == 0:
        return None
    bits = [as_bits(side).reshape(rows, -1) for side in (left, right)]
    differ = bits[0] != bits[1]
    if not bool(differ.any()):
        return None
    at = int(differ.flatten().to(torch.uint8).argmax())
    row, column = divmod(at, differ.shape[1])
    patterns = [int(side[row, column]) & (1 << 8 * left.element_size()) - 1 for side in bits]
    values = [side.detach().cpu().reshape(rows, -1)[row, column].item() for side in (left, right)]
    return Difference(
        row=row,
        column=column,
        key=str(row) if keys is None else keys[row],
        left=_hex(patterns[0], left),
        right=_hex(patterns[1], left),
        left_value=values[0],
        right_value=values[1],
        ulps=ulp_distance(patterns[0], patterns[1], 8 * left.element_size()) if _comparable(left, values) else None,
        elements=int(differ.sum()),
        rows=int(differ.any(dim=1).sum()),
        of_elements=differ.numel(),
        of_rows=rows,
    )


def ulp_distance(left: int, right: int, width: int) -> int:
    """Steps between two floats given as unsigned bit patterns of ``width`` bits; the two zeros are one value."""
    sign = 1 << width - 1

    def ordered(pattern: int) -> int:
        return -(pattern & sign - 1) if pattern & sign else pattern

    return abs(ordered(left) - ordered(right))


def _comparable(tensor: Tensor, values: list[float]) -> bool:
    return tensor.is_floating_point() and all(value == value for value in values)


def _hex(pattern: int, tensor: Tensor) -> str:
    return f"0x{pattern:0{2 * tensor.element_size()}X}"


def _canonical(tensor: Tensor) -> Tensor:
    """``tensor`` with every NaN replaced by one."""
    if not tensor.is_floating_point():
        return tensor
    pattern = torch.tensor(_QUIET_NAN[tensor.dtype], dtype=torch.int64).to(_BITS[tensor.element_size()])
    bits = torch.where(tensor.isnan().cpu(), pattern, as_bits(tensor))
    return bits.view(tensor.dtype)


def _raw(tensor: Tensor) -> bytes:
    if sys.byteorder != "little":
        raise NotImplementedError("dsv4_matrix.judge.bits: digests are of little-endian bytes; this host is big-endian")
    if tensor.numel() == 0:
        return b""
    return tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()
