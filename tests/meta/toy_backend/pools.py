"""Where entries lie and how they are packed: 584 bytes each, values, rope and scales one behind the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .defects import Defective

ENTRY = 584
STORED = 583  # the pad byte is never written


class ToyPools(Defective):
    """The pools of one backend, and the scheduler's two tables as read by it."""

    def __init__(self, runner: Any, pools: dict[str, Tensor] | None) -> None:
        self.runner = runner
        shapes = {
            "swa": (runner.num_swa_pages, runner.swa_page_size * ENTRY),
            "c4": (runner.num_pages, 64 * ENTRY),
            "c128": (runner.num_pages, 2 * ENTRY),
        }
        self.pools = pools or {
            name: torch.zeros(shape, dtype=torch.uint8, device=runner.device) for name, shape in shapes.items()
        }
        self._map: Tensor | None = None
        self._seen_table: Tensor | None = None

    def kv_buffers(self) -> dict[str, Tensor]:
        return dict(self.pools)

    def set_key_buffer(self, loc: Tensor, k: Tensor) -> None:
        self._store("swa", self._slots(loc), k)

    def set_extra_key_buffer(self, compress_ratio: int, loc: Tensor, entries: Tensor) -> None:
        self._store(f"c{compress_ratio}", torch.where(loc > 0, loc // compress_ratio, -1), entries)

    def _slots(self, loc: Tensor) -> Tensor:
        mapping = self.runner.full_to_swa_index_mapping
        if self.has("map_cached"):
            self._map = mapping.clone() if self._map is None else self._map
            mapping = self._map
        if self.has("identity_slot_map"):
            last = self.pools["swa"].numel() // ENTRY - 1
            return loc.clamp(max=last)
        return mapping[loc]

    def _arange(self, count: int) -> Tensor:
        return torch.arange(count, device=self.runner.device)

    def _table(self) -> Tensor:
        table = self.runner.req_to_token.long()
        if self.has("page_table_cached"):
            self._seen_table = table.clone() if self._seen_table is None else self._seen_table
            return self._seen_table
        return table

    def _store(self, name: str, slots: Tensor, k: Tensor) -> None:
        if k.dtype != torch.bfloat16:
            self._refuse(AssertionError, f"rows to store are {k.dtype}, must be bf16")
        pool = self.pools[name].view(-1, ENTRY)
        packed = self._pack(k)[:, :STORED]
        valid = slots > 0
        where = torch.where(valid, slots, 0)
        # Rows that store nothing put back what lies in the dummy slot: no mask, so no host sync.
        kept = pool[0, :STORED] if not self.has("dummy_written") else torch.zeros_like(pool[0, :STORED])
        pool[:, :STORED].index_put_((where,), torch.where(valid[:, None], packed, kept))

    def _pack(self, k: Tensor) -> Tensor:
        x = k.float()
        groups = x[:, :448].reshape(-1, 7, 64)
        amax = groups.abs().amax(-1)
        exponent = torch.ceil(torch.log2(amax.clamp(min=1e-4) / 448))
        scaled = (groups / torch.exp2(exponent)[..., None]).clamp(-448, 448)
        nope = scaled.to(torch.float8_e4m3fn).view(torch.uint8).reshape(-1, 448)
        scale = torch.where(amax.isfinite(), exponent + 127, 255.0).to(torch.uint8)
        rope = k[:, 448:].contiguous().view(torch.uint8)
        return torch.cat([nope, rope, scale, torch.full_like(scale[:, :1], 7)], 1)

    def _load(self, name: str, slots: Tensor) -> Tensor:
        packed = self.pools[name].view(-1, ENTRY)[slots]
        exponent = packed[..., 576:583].float()
        if self.has("scale_of_neighbour"):
            exponent = exponent.roll(1, -1)
        scale = torch.where(exponent == 255, float("nan"), torch.exp2(exponent - 127))
        nope = packed[..., :448].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (7, 64))
        rope = packed[..., 448:576].contiguous().view(torch.bfloat16).float()
        return torch.cat([(nope * scale[..., None]).flatten(-2), rope], -1)
