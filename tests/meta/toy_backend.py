"""A sound attention backend in plain torch, and a catalogue of defects that can be switched on in it.

It serves the tests of the tester: the harness must pass the sound toy and see every defect. It packs entries in a
layout of its own (584 bytes each, not the production pages), reads nothing but what the protocol gives it, and is slow.

    factory = ToyBackend                     # sound
    factory = broken("window127")            # one defect; names in DEFECTS
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

ENTRY = 584
STORED = 583  # the pad byte is never written
WINDOW = 128
PAGE = 256
NAMES = ("swa", "c4", "c128")

#: Each switchable defect and what it does.
DEFECTS: dict[str, str] = {
    "window127": "the window is one token short",
    "window129": "the window is one token long",
    "window_in_future": "the window ends one position after the row",
    "entry_early": "a compressed entry is attended before it is complete",
    "entry_late": "the newest complete compressed entry is left out",
    "sink_dropped": "the sink is not in the denominator",
    "sink_of_next_head": "sinks are shifted by one head",
    "sink_in_lse": "the log-sum-exp counts the sink",
    "lse_log2": "the log-sum-exp is in base 2",
    "page_row_ignored": "every row reads the page table of the first request",
    "identity_slot_map": "the full location is taken for the SWA slot",
    "map_cached": "the slot map is read once and kept",
    "rejected_entry_visible": "a store of a compressed entry lands one slot further on",
    "rope_lost": "the rope part is not part of the value",
    "scale_of_neighbour": "each group is scaled by the next group's exponent",
    "first_key_clamped": "absent indices are read as slot 0 instead of being skipped",
    "sparse_window127": "only the sparse prefill path has a window of 127",
    "selection_ignored": "the C4 selection is replaced by the newest entries",
    "selection_not_reset": "the C4 selection of the step before stays where the new one is padded",
    "verify_rows_share_first_length": "all verify rows of a request see what the first one sees",
    "extend_rows_from_prefix": "draft-extend rows count from the total length on",
    "draft_positions_not_advanced": "every draft step sees the committed prefix only",
    "draft_steps_share_slot": "every draft step writes the slot of the first",
    "stale_graph_buffer": "replay preparation rebuilds the metadata into new tensors",
    "stale_row_when_shrinking": "replay preparation refreshes the live rows only",
    "length_frozen_in_graph": "the longest length of the capture stays a Python number in the graph",
    "pad_writes_live_slot": "pad rows store into a live slot",
    "pad_leaks": "what pad rows hold is mixed into live rows at weight zero",
    "out_loc_cached_while_idle": "the store location is refreshed only while the rank has requests",
    "host_sync_in_graph": "the captured step reads a length on the host",
    "host_sync_swallowed": "the captured step reads a length on the host and hides the error",
    "attention_outside_graph": "the attention is not captured, so that a replay leaves the output as it is",
    "input_written": "the query is negated in place once it has been used",
    "table_written": "the request table is written",
    "dummy_written": "pad rows store into the dummy slot",
    "q_stride_ignored": "a strided query is read as if it were contiguous",
    "page_table_cached": "the page table of a request row is read once and kept",
    "wrong_dtype": "the output is float32",
    "wrong_shape": "the output has an extra dimension",
    "lse_missing": "only the output is returned",
    "nan_output": "one element of the output is NaN",
    "raises": "forward raises",
    "refuses_nothing": "no argument is refused",
    "refuses_wrongly": "refusals have another type",
    "dead_after_refusal": "a refused call leaves the backend unusable",
}


@dataclass
class Metadata:
    """Row metadata of one batch; every field int64 on the device."""

    table_row: Tensor  # [T]
    lens: Tensor  # [T]
    swa: Tensor  # [T, W]
    out_loc: Tensor  # [T] full
    swa_out: Tensor  # [T]
    c4_out: Tensor
    c128_out: Tensor
    c4: Tensor  # [T, topk]
    c128: Tensor  # [T, E]


class ToyBackend:
    """See the module; shapes, names and errors are those of ``dsv4_matrix.protocol.AttentionBackend``."""

    defects: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, runner: Any, pools: dict[str, Tensor] | None = None) -> None:
        self.runner = runner
        if not self.has("refuses_nothing"):
            self._check_runner(runner)
        shapes = {
            "swa": (runner.num_swa_pages, runner.swa_page_size * ENTRY),
            "c4": (runner.num_pages, 64 * ENTRY),
            "c128": (runner.num_pages, 2 * ENTRY),
        }
        self.pools = pools or {
            name: torch.zeros(shape, dtype=torch.uint8, device=runner.device) for name, shape in shapes.items()
        }
        self.meta: Metadata | None = None
        self.compressed_allowed = True
        self._map: Tensor | None = None
        self._static: Metadata | None = None
        self._cached_out: Tensor | None = None
        self._previous: Tensor | None = None
        self._seen_table: Tensor | None = None
        self._dead = False
        self._max_bs = 0

    @classmethod
    def has(cls, defect: str) -> bool:
        return defect in cls.defects

    @classmethod
    def multi_step(cls, runner: Any, *, num_steps: int, compress_ratio: int = 0) -> ToyMultiStep:
        if compress_ratio != 0:
            cls._refuse(ValueError, f"draft layer is SWA-only: no draft runner for compress_ratio={compress_ratio}")
        return ToyMultiStep(cls, runner, num_steps)

    @classmethod
    def _refuse(cls, kind: type[Exception], message: str) -> None:
        if cls.has("refuses_nothing"):
            return
        raise (RuntimeError if cls.has("refuses_wrongly") else kind)(message)

    def _check_runner(self, runner: Any) -> None:
        if runner.page_size != PAGE:
            self._refuse(AssertionError, f"the packed format hardcodes page_size=256, got {runner.page_size}")
        if runner.head_dim != 512:
            self._refuse(AssertionError, f"head_dim is {runner.head_dim}, must be 512")
        if runner.swa_page_size not in (128, 256):
            self._refuse(AssertionError, f"swa_page_size is {runner.swa_page_size}, must be 256 or 128")
        if runner.num_heads not in (16, 32, 64, 128):
            self._refuse(ValueError, f"num_heads is {runner.num_heads}, must be 16, 32, 64 or 128")
        if runner.index_topk not in (512, 1024):
            self._refuse(AssertionError, f"index_topk is {runner.index_topk}, must be 512 or 1024")
        if runner.speculative_eagle_topk not in (0, 1):
            self._refuse(AssertionError, f"Topk > 1 not supported, got {runner.speculative_eagle_topk}")
        if runner.context_parallel_size != 1:
            self._refuse(NotImplementedError, f"context_parallel_size is {runner.context_parallel_size}, must be 1")

    # --- pools -----------------------------------------------------------------------------------------------------

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

    # --- metadata --------------------------------------------------------------------------------------------------

    def init_forward_metadata(self, batch: Any) -> None:
        if batch.forward_mode not in ("extend", "decode", "target_verify", "draft_extend", "idle"):
            self._refuse(NotImplementedError, f"unsupported forward_mode={batch.forward_mode}")
        bs, locations = batch.batch_size, len(batch.out_cache_loc)
        if batch.forward_mode == "decode" and locations != bs:
            self._refuse(AssertionError, f"decode has {bs} requests and {locations} locations")
        self.meta = self._metadata(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._max_bs = max_bs

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        if batch.forward_mode not in ("decode", "idle", "target_verify", "draft_extend"):
            self._refuse(NotImplementedError, f"unsupported forward_mode={batch.forward_mode}: no graph bucket")
            return
        if batch.batch_size > self._max_bs:
            self._refuse(AssertionError, f"batch of {batch.batch_size} beyond the captured {self._max_bs}")
            return
        longest, context = max(batch.seq_lens_cpu or [0]), self.runner.req_to_token.shape[1]
        if longest > context:
            self._refuse(AssertionError, f"a request of {longest} tokens; the table has {context}")
            return
        if self.has("stale_graph_buffer"):
            self._static = self._metadata(batch)
        if self.has("stale_row_when_shrinking"):
            fresh = self._metadata(batch)
            if self._static is None:
                self._static = fresh
            live = int((batch.out_cache_loc > 0).sum())
            for item in fields(Metadata):
                getattr(self._static, item.name)[:live] = getattr(fresh, item.name)[:live]
        if self.has("out_loc_cached_while_idle") and (in_capture or batch.actual_forward_mode != "idle"):
            fresh_out = self._slots(batch.out_cache_loc)
            self._cached_out = fresh_out if self._cached_out is None else self._cached_out.copy_(fresh_out)

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        if self.has("host_sync_in_graph"):
            batch.seq_lens.max().item()
        if self.has("host_sync_swallowed"):
            with contextlib.suppress(Exception):
                batch.seq_lens.tolist()
        self.meta = self._static if self._static is not None else self._metadata(batch)
        if self._cached_out is not None:
            self.meta.swa_out = self._cached_out
        if self.has("length_frozen_in_graph"):
            longest = max(batch.seq_lens_cpu or [1])
            self.meta.swa = torch.where(self._arange(self.meta.swa.shape[1]) < longest, self.meta.swa, -1)

    def on_after_cuda_graph_warmup(self) -> None:
        pass

    def _rows(self, batch: Any) -> tuple[Tensor, Tensor]:
        mode, total = batch.forward_mode, batch.out_cache_loc.shape[0]
        if mode in ("decode", "idle"):
            return batch.req_pool_indices, batch.seq_lens
        if mode == "target_verify":
            counts = batch.verify_lens
            if counts is None:
                counts = torch.full_like(batch.seq_lens, batch.draft_token_num)
            first = batch.seq_lens
        else:
            counts = batch.extend_seq_lens
            first = batch.seq_lens - counts
            if self.has("extend_rows_from_prefix") and mode == "draft_extend":
                first = batch.seq_lens
        request = torch.repeat_interleave(self._arange(len(counts)), counts, output_size=total)
        offset = self._arange(total) - (counts.cumsum(0) - counts)[request]
        if self.has("verify_rows_share_first_length") and mode == "target_verify":
            offset = torch.zeros_like(offset)
        return batch.req_pool_indices[request], first[request] + offset + 1

    def _metadata(self, batch: Any) -> Metadata:
        table = self._table()
        context = table.shape[1]
        row, lens = self._rows(batch)
        if self.has("page_row_ignored") and len(row):
            row = row[:1].expand_as(row)
        window = WINDOW - 1 if self.has("window127") else WINDOW + 1 if self.has("window129") else WINDOW
        if self.has("sparse_window127") and batch.forward_mode == "extend" and self.runner.prefill_path == "sparse":
            window = WINDOW - 1
        newest = lens if self.has("window_in_future") else lens - 1
        position = newest[:, None] - self._arange(window)
        location = table[row[:, None], position.clamp(0, context - 1)]
        swa = torch.where(position >= 0, self._slots(location), -1)
        out = batch.out_cache_loc
        swa_out = self._slots(out)
        if self.has("pad_writes_live_slot") and len(out):
            swa_out = torch.where(out > 0, swa_out, swa[0, 1:2].clamp(min=0))

        def emitted(ratio: int) -> Tensor:
            real = (out > 0) & (lens > 0) & (lens % ratio == 0)
            shift = 1 if self.has("rejected_entry_visible") else 0
            return torch.where(real, out // ratio + shift, -1)

        entry = self._arange(context // 128)
        complete = self._complete(lens, 128)
        c128_loc = table[row[:, None], (entry * 128 + 127)[None, :]]
        return Metadata(
            table_row=row,
            lens=lens,
            swa=swa,
            out_loc=out,
            swa_out=swa_out,
            c4_out=emitted(4),
            c128_out=emitted(128),
            c4=torch.full((len(lens), self.runner.index_topk), -1, device=lens.device),
            c128=torch.where(entry[None, :] < complete[:, None], c128_loc // 128, -1),
        )

    def _complete(self, lens: Tensor, ratio: int) -> Tensor:
        count = lens.clamp(min=0) // ratio
        return count + self.has("entry_early") - (1 if self.has("entry_late") else 0)

    # --- the step --------------------------------------------------------------------------------------------------

    def _ready(self) -> Metadata:
        assert self.meta is not None, "forward before init_forward_metadata"
        return self.meta

    def store_kv(self, batch: Any, k: Tensor) -> None:
        self._store("swa", self._ready().swa_out, k)

    def store_compressed(self, batch: Any, compress_ratio: int, entries: Tensor) -> None:
        if compress_ratio not in (4, 128):
            self._refuse(AssertionError, f"ratio {compress_ratio} has no compressed pool")
            return
        meta = self._ready()
        self._store(f"c{compress_ratio}", meta.c4_out if compress_ratio == 4 else meta.c128_out, entries)

    def write_c4_selection(self, raw: Tensor) -> None:
        if raw.shape[1] != self.runner.index_topk:
            wanted = f"int32 [T, {self.runner.index_topk}]"
            self._refuse(AssertionError, f"selection is {raw.shape[1]} wide, must be {wanted}")
            return
        meta, table = self._ready(), self._table()
        raw, complete = raw.long(), self._complete(meta.lens, 4)[:, None]
        if self.has("selection_ignored"):
            raw = complete - 1 - self._arange(raw.shape[1])
        if self.has("entry_early"):
            column = self._arange(raw.shape[1])[None, :]
            raw = torch.where(column == complete - 1, complete - 1, raw)
        valid = (raw >= 0) & (raw < complete)
        last = (torch.where(valid, raw, 0) * 4 + 3).clamp(max=table.shape[1] - 1)
        slots = torch.where(valid, table[meta.table_row[:, None], last] // 4, -1)
        if self.has("selection_not_reset"):
            if self._previous is None:
                self._previous = torch.full((512, slots.shape[1]), -1, device=slots.device)
            kept = self._previous[: len(slots)]
            slots = kept.copy_(torch.where(slots < 0, kept, slots))
        meta.c4.copy_(slots)

    def forward(self, q: Tensor, batch: Any, compress_ratio: int, attn_sink: Tensor) -> tuple[Tensor, Tensor]:
        with _disable_current_modes() if self.has("attention_outside_graph") else contextlib.nullcontext():
            return self._attend(q, batch, compress_ratio, attn_sink)

    def _attend(self, q: Tensor, batch: Any, compress_ratio: int, attn_sink: Tensor) -> tuple[Tensor, Tensor]:
        self._check_forward(q, batch, compress_ratio, attn_sink)
        if self.has("raises") or self._dead:
            raise RuntimeError("the toy backend fails on purpose")
        meta = self._ready()
        if self.has("table_written"):
            self.runner.req_to_token[0, 0] = 1
        indices = [("swa", meta.swa)]
        if compress_ratio:
            indices.append((f"c{compress_ratio}", meta.c4 if compress_ratio == 4 else meta.c128))
        keys, valid = [], []
        for name, slots in indices:
            present = slots >= 0
            if self.has("first_key_clamped"):
                present = torch.ones_like(present)
            keys.append(torch.where(present[..., None], self._load(name, slots.clamp(min=0)), 0.0))
            valid.append(present)
        k, present = torch.cat(keys, 1), torch.cat(valid, 1)
        if self.has("q_stride_ignored"):
            q = q.as_strided(q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1))
        # A batched product may sum in another order for another number of rows; in fp64 no rounded bit shows it.
        wide = torch.float64 if q.is_cuda else torch.float32
        k = k.to(wide)
        scores = torch.bmm(q.to(wide), k.transpose(1, 2)) * self.runner.softmax_scale
        if self.has("input_written"):
            q.neg_()
        scores = torch.where(present[:, None, :], scores, float("-inf"))
        top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
        weight = torch.exp(scores - top)
        total = weight.sum(-1)
        lse = torch.where(total == 0, float("inf"), top[..., 0] + torch.log(total)).float()
        sink = attn_sink.roll(-1) if self.has("sink_of_next_head") else attn_sink
        bottom = total if self.has("sink_dropped") else total + torch.exp(sink[None, :] - top[..., 0])
        value = torch.cat([k[..., :448], k[..., 448:] * 0], -1) if self.has("rope_lost") else k
        out = torch.bmm(weight, value) / bottom[..., None]
        out = torch.where((total == 0)[..., None], 0.0, out)
        return self._spoiled(out.to(torch.bfloat16), lse, bottom, top[..., 0])

    def _spoiled(self, out: Tensor, lse: Tensor, bottom: Tensor, top: Tensor) -> Any:
        if self.has("lse_log2"):
            lse = lse * 1.4426950408889634
        if self.has("sink_in_lse"):
            lse = (torch.log(bottom) + top).float()
        if self.has("pad_leaks"):
            out = out + 0 * out.sum(0, keepdim=True)
        if self.has("nan_output") and out.numel():
            out[-1, -1, -1] = float("nan")
        if self.has("wrong_dtype"):
            out = out.float()
        if self.has("wrong_shape"):
            out = out[:, None]
        return out if self.has("lse_missing") else (out, lse)

    def _check_forward(self, q: Tensor, batch: Any, compress_ratio: int, attn_sink: Any) -> None:
        before = self._dead
        self._dead = before or self.has("dead_after_refusal")
        if compress_ratio not in (0, 4, 128):
            self._refuse(ValueError, f"invalid compress_ratio={compress_ratio}")
        if compress_ratio and batch.forward_mode == "draft_extend":
            self._refuse(ValueError, f"draft layer is SWA-only, got compress_ratio={compress_ratio}")
        if not isinstance(attn_sink, Tensor):
            self._refuse(AssertionError, "attn_sink is missing")
        elif attn_sink.dtype != torch.float32:
            self._refuse(TypeError, f"attn_sink is {attn_sink.dtype}, must be float32")
        if q.dtype != torch.bfloat16:
            self._refuse(TypeError, f"q is {q.dtype}, must be bf16")
        if q.shape[-1] != 512:
            self._refuse(ValueError, f"q is {q.shape[-1]} wide, must be 512")
        self._dead = before


class ToyMultiStep:
    """N - 1 toy backends over shared pools; see ``dsv4_matrix.protocol.MultiStepDraftBackend``."""

    def __init__(self, kind: type[ToyBackend], runner: Any, num_steps: int) -> None:
        self.kind, self.num_steps = kind, num_steps
        first = kind(runner)
        self.attn_backends = [first, *(kind(runner, first.pools) for _ in range(num_steps - 2))]

    def step_batch(self, batch: Any, step: int) -> Any:
        ahead = 0 if self.kind.has("draft_positions_not_advanced") else step
        column = 0 if self.kind.has("draft_steps_share_slot") else step
        lengths = None if batch.seq_lens_cpu is None else [n + ahead + 1 for n in batch.seq_lens_cpu]
        return replace(
            batch,
            forward_mode="decode",
            seq_lens=batch.seq_lens + ahead + 1,
            seq_lens_cpu=lengths,
            positions=batch.positions + ahead,
            out_cache_loc=batch.out_cache_loc.view(-1, self.num_steps)[:, column],
        )

    def init_forward_metadata(self, batch: Any) -> None:
        for step, backend in enumerate(self.attn_backends):
            backend.init_forward_metadata(self.step_batch(batch, step))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, batch: Any, *, in_capture: bool = False) -> None:
        for step, backend in enumerate(self.attn_backends):
            backend.init_forward_metadata_out_graph(self.step_batch(batch, step), in_capture=in_capture)

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        for step, backend in enumerate(self.attn_backends):
            backend.init_forward_metadata_in_graph(self.step_batch(batch, step))

    def on_after_cuda_graph_warmup(self) -> None:
        for backend in self.attn_backends:
            backend.on_after_cuda_graph_warmup()


def broken(*defects: str) -> type[ToyBackend]:
    """The toy with ``defects`` switched on; KeyError for a name that is not in ``DEFECTS``."""
    for defect in defects:
        DEFECTS[defect]
    return type("ToyBackend_" + "_".join(defects), (ToyBackend,), {"defects": frozenset(defects)})
