"""A scheduler's side for backend tests, and attention.md §3.2 stated once more, in numpy, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor

PAGE = 256


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Runner:
    """Structurally a runner: no class of the harness is needed to run the backend."""

    device: str
    req_to_token: Tensor
    full_to_swa_index_mapping: Tensor
    num_pages: int
    num_swa_pages: int
    num_heads: int = 16
    head_dim: int = 512
    page_size: int = PAGE
    swa_page_size: int = 256
    index_topk: int = 512
    softmax_scale: float = 512**-0.5
    prefill_path: str = "dense"
    speculative_eagle_topk: int = 1
    speculative_num_draft_tokens: int = 3
    context_parallel_size: int = 1


@dataclass
class Batch:
    forward_mode: str
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    positions: Tensor
    seq_lens_cpu: Sequence[int] | None = None
    extend_seq_lens: Tensor | None = None
    extend_seq_lens_cpu: Sequence[int] | None = None
    draft_token_num: int | None = None
    verify_lens: Tensor | None = None
    actual_forward_mode: str | None = None

    @property
    def batch_size(self) -> int:
        return len(self.seq_lens)


@dataclass
class Rows:
    """What a batch means: request row, position, tokens of the request, and write location of each query row."""

    request: np.ndarray
    position: np.ndarray
    total: np.ndarray
    loc: np.ndarray

    def then(self, other: Rows) -> Rows:
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("request", "position", "total", "loc"))
        return Rows(*(np.concatenate(pair) for pair in pairs))


@dataclass
class World:
    """Requests over shuffled pages, a slot map that is no identity, and garbage where a table was never written."""

    runner: Runner
    lengths: tuple[int, ...]
    table: np.ndarray = field(init=False)
    mapping: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.table = self.runner.req_to_token.cpu().numpy()
        self.mapping = self.runner.full_to_swa_index_mapping.cpu().numpy()

    def int64(self, values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(values, np.int64), device=self.runner.device)

    def rows(self, requests: Sequence[int], prefixes: Sequence[int], counts: Sequence[int]) -> Rows:
        """``counts[i]`` rows of request row ``requests[i]``, from position ``prefixes[i]`` on."""
        request = np.repeat(np.asarray(requests, np.int64), counts)
        position = np.concatenate([np.arange(p, p + n) for p, n in zip(prefixes, counts, strict=True)] or [[]])
        position = position.astype(np.int64)
        total = np.repeat(np.add(prefixes, counts), counts)
        return Rows(request, position, total, self.table[request, position].astype(np.int64))

    def pad_rows(self, count: int, request: int = 0, position: int = 0, total: int = 1) -> Rows:
        """Rows that write nowhere."""
        every = np.ones(count, np.int64)
        return Rows(every * request, every * position, every * total, every * 0)

    def batch(
        self,
        mode: str,
        prefixes: Sequence[int],
        counts: Sequence[int] | None = None,
        *,
        requests: Sequence[int] | None = None,
        on_host: bool = True,
        ragged: bool = False,
    ) -> tuple[Batch, Rows]:
        """A batch and what it means. ``ragged`` gives verify its own row count a request."""
        counts = [1] * len(prefixes) if counts is None else list(counts)
        requests = list(range(len(prefixes))) if requests is None else list(requests)
        rows = self.rows(requests, prefixes, counts)
        lens = [p if mode == "target_verify" else p + n for p, n in zip(prefixes, counts, strict=True)]
        extends = mode in ("extend", "draft_extend")
        verify = mode == "target_verify"
        return Batch(
            mode,
            self.int64(requests),
            self.int64(lens),
            self.int64(rows.loc),
            self.int64(rows.position),
            seq_lens_cpu=lens if on_host else None,
            extend_seq_lens=self.int64(counts) if extends else None,
            extend_seq_lens_cpu=counts if extends and on_host else None,
            draft_token_num=counts[0] if verify and not ragged and counts else None,
            verify_lens=self.int64(counts) if verify and ragged else None,
        ), rows


MakeWorld = Callable[..., World]


@pytest.fixture(scope="session")
def named_world(device: str) -> MakeWorld:
    """``make_world`` for fixtures that outlive a test: the name that seeds it comes first."""

    def make(name: str, lengths: Sequence[int], context: int = 512, **settings: Any) -> World:
        generator = np.random.default_rng(crc32(name.encode()))
        blocks = [-(-length // PAGE) for length in lengths]
        num_pages = 1 + sum(blocks) + 1
        pages = generator.permutation(np.arange(1, num_pages))[: sum(blocks)]
        # beyond a request's tokens a table holds what earlier requests left: any location, or nonsense
        table = generator.integers(-(2**31), 2**31 - 1, (len(lengths), context), np.int32)
        first = 0
        for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
            locations = (pages[first : first + count, None] * PAGE + np.arange(PAGE)).reshape(-1)
            table[row, :length] = locations[:length]
            first += count
        mapping = np.zeros(num_pages * PAGE + 1, np.int64)
        mapping[PAGE : num_pages * PAGE] = generator.permutation((num_pages - 1) * PAGE) + PAGE
        mapping[-1] = -1
        runner = Runner(
            device,
            torch.as_tensor(table, device=device),
            torch.as_tensor(mapping, device=device),
            num_pages,
            num_swa_pages=num_pages * PAGE // settings.get("swa_page_size", PAGE),
        )
        return World(replace(runner, **settings), tuple(lengths))

    return make


@pytest.fixture
def make_world(named_world: MakeWorld, request: pytest.FixtureRequest) -> MakeWorld:
    """``make_world(lengths, context=512, **runner fields)``: one request a length, all entries of its tokens valid."""
    return partial(named_world, request.node.name)


def padded(width: int) -> int:
    return -(-width // 64) * 64


def statement(world: World, rows: Rows, pages: int, *, compress: bool = True) -> dict[str, np.ndarray]:
    """Every field of §3.2 for ``rows``, from the formulas, as numpy. ``pages``: page-table columns."""
    visible = rows.position + 1
    context = world.table.shape[1]

    def location(position: np.ndarray) -> np.ndarray:
        return world.table[rows.request[:, None], np.clip(position, 0, context - 1)].astype(np.int64)

    def lookup(loc: np.ndarray, held: np.ndarray) -> np.ndarray:
        return world.mapping[np.where(held, loc, 0)]

    back = rows.position[:, None] - np.arange(128)
    block = np.arange(pages)[None, :]
    page_table = np.where(block * PAGE < rows.total[:, None], location(block * PAGE) // PAGE, 0)
    found = {
        "seq_lens_casual": visible,
        "positions_casual": rows.position,
        "raw_out_loc": rows.loc,
        "swa_out_cache_loc": world.mapping[rows.loc],
        "swa_topk_lengths": np.minimum(visible, 128),
        "swa_page_indices": np.where(back >= 0, lookup(location(back), back >= 0), -1),
        "page_table": page_table,
    }
    if not compress:
        return found
    topk = world.runner.index_topk
    c4, c128 = visible // 4, visible // 128
    real = rows.loc > 0
    column = np.arange(padded(2 * pages))[None, :]
    in_table = page_table[:, np.minimum(column[0] // 2, pages - 1)]
    found |= {
        "c4_out_loc": np.where(real & (visible % 4 == 0), rows.loc // 4, -1),
        "c128_out_loc": np.where(real & (visible % 128 == 0), rows.loc // 128, -1),
        "c4_topk_lengths_raw": c4,
        "c4_topk_lengths_clamp1": np.maximum(c4, 1),
        "c4_sparse_topk_lengths": np.minimum(np.maximum(c4, 1), topk),
        "c4_sparse_page_indices": np.full((len(visible), padded(topk)), -1),
        "c128_topk_lengths_clamp1": np.maximum(c128, 1),
        "c128_page_indices": np.where(column < c128[:, None], in_table * 2 + column % 2, -1),
    }
    return found


CheckFields = Callable[..., None]


@pytest.fixture
def check_fields() -> CheckFields:
    """``check_fields(core, world, rows, pages, compress=True)``: every field equals its statement."""

    def check(core: Any, world: World, rows: Rows, pages: int, *, compress: bool = True) -> None:
        for name, want in statement(world, rows, pages, compress=compress).items():
            got = getattr(core, name)
            assert got.dtype == (torch.int64 if name == "raw_out_loc" else torch.int32), name
            np.testing.assert_array_equal(got.cpu().numpy(), want, err_msg=name)
        if not compress:
            assert core.c4_sparse_page_indices is None
            assert core.c128_page_indices is None
            assert core.c4_out_loc is None
            assert core.c4_flashmla_metadata is None

    return check


@pytest.fixture(scope="session")
def backend_class() -> Any:
    from dsv4_triton import DSV4TritonBackend

    return DSV4TritonBackend


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    return torch.Generator().manual_seed(crc32(request.node.name.encode()))


@pytest.fixture
def draw(generator: torch.Generator, device: str) -> Callable[..., Tensor]:
    """Normal bf16 numbers of a shape, drawn on the CPU."""

    def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    return numbers
