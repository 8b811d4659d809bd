"""The declaration as frozen typed values: what matrix.yaml says, and nothing else.

No torch, no triton: a CPU-only job validates, lists, plans and renders from these values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from zlib import crc32

#: Stands for a cell's id with the refusals outside the cells.
REFUSALS = "refusals"


class State(StrEnum):
    """What a cell claims. Every cell has exactly one."""

    COVERED = "covered"
    UNREACHABLE = "production-unreachable"
    BLOCKED = "blocked"
    DEFERRED = "deferred"
    NOT_APPLICABLE = "not-applicable"


class Level(StrEnum):
    """What may change without changing a bit; each level includes the ones before. Other GPU models never do."""

    SAME_PLAN = "L0"  # the same process plan, twice
    SAME_CASES = "L1"  # order, workers, shards, hash seed, locale, time zone
    BATCH = "L2"  # composition of the batch: alone, first, last, padded, among other rows, another bucket
    GRAPH = "L3"  # eager and graph, first replay and third
    DEVICE = "L4"  # another device of the same model

    def covers(self, other: Level) -> bool:
        """Whether this promise includes ``other``."""
        order = list(Level)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True)
class Place:
    """Where a value stands in its file: one-based line and column."""

    path: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Geometry:
    """Numbers of the packed cache: tokens, elements and bytes."""

    page_size: int
    head_dim: int
    nope: int
    rope: int
    window: int
    bytes_per_token: int


@dataclass(frozen=True)
class Tolerance:
    """An absolute and a relative bound, elementwise: ``|got - want| <= atol + rtol * |want|``."""

    atol: float
    rtol: float


@dataclass(frozen=True)
class Budget:
    """How the tight budget against the fp64 oracle is formed from data, per (row, head).

    ``baseline_factor * max|baseline - oracle| + rounding * eps(bf16) * max|oracle|``; the same with ``mean_rounding``
    for mean absolute errors and for a row's signed mean error; ``1 - cosine <= cosine`` per row; log-sum-exp:
    ``lse_factor * |baseline - oracle| + lse_rounding * eps(fp32) * max(1, |oracle|)``.
    """

    baseline_factor: float
    rounding: float
    mean_rounding: float
    cosine: float
    lse_factor: float
    lse_rounding: float


@dataclass(frozen=True)
class Tolerances:
    """The outer contract (unquantised BF16 softmax) and what is held inside it."""

    eager: Tolerance
    graph: Tolerance
    budget: Budget


@dataclass(frozen=True)
class Mode:
    """A column of the matrix: how cases are run."""

    name: str
    title: str
    summary: str


@dataclass(frozen=True)
class Probe:
    """The refusal that a cell without coverage promises.

    ``site`` names a call site known to ``dsv4_matrix.modes.probes``; ``raises`` an exception type of builtins, matched
    exactly; ``match`` a regular expression searched in the message.
    """

    site: str
    raises: str
    match: str


@dataclass(frozen=True)
class Variant:
    """One input configuration of a cell. Lengths are tokens; a *replay* is one more batch through the same graph.

    Attributes:
        name: ``[a-z0-9-]+``, unique in its cell.
        forward: ``extend``, ``decode``, ``target-verify`` or ``draft-extend``; fixed by the mode unless it is eager.
        prefix_lens: committed tokens of each request before the step. DECODE sees prefix + 1 tokens.
        extend_lens: rows of each request; empty for decode (one row each). Verify: draft tokens of each request.
        accept_lens: verify: how many rows each request keeps before a following decode step; empty for no such step.
        reuse: what becomes of rejected slots in that following step: ``next-step`` writes them again, ``freed``
            gives them to another request first.
        replays: further batches for the same captured graph, each a tuple of prefix lengths; an empty one is an
            idle replay.
        bucket: requests of the captured graph; 0 means as many as the largest batch.
        num_steps: draft steps of the EAGLE draft runner; N steps are N - 1 attention forwards.
        heads: 16, 32, 64 or 128.
        sink: ``off`` (-1e30, a no-op), ``zero`` or ``per-head`` (distinct finite values).
        swa_page_size: 256 or 128.
        index_topk: 512 or 1024.
        pages: order of physical pages: ``shuffled``, ``interleaved``, ``reversed`` or ``identity``.
        history: ``full`` writes every earlier token, ``window`` only what the window still needs; the rest stays
            poisoned, as after the scheduler freed it.
        q_layout: ``contiguous`` or ``strided`` (a slice of a wider tensor).
        gpu_only_lens: no host copy of any length is handed over, and none may be made.
        large_pool: the pool is larger than 2 GiB; run one at a time.
        devices: where the variant runs, ``cpu`` and ``gpu``.
        cost: static integer weight for shard planning, about row-blocks of 64 keys.
    """

    name: str
    forward: str
    prefix_lens: tuple[int, ...]
    extend_lens: tuple[int, ...] = ()
    accept_lens: tuple[int, ...] = ()
    reuse: str = "next-step"
    replays: tuple[tuple[int, ...], ...] = ()
    bucket: int = 0
    num_steps: int = 0
    heads: int = 64
    sink: str = "off"
    swa_page_size: int = 256
    index_topk: int = 512
    pages: str = "shuffled"
    history: str = "full"
    q_layout: str = "contiguous"
    gpu_only_lens: bool = False
    large_pool: bool = False
    devices: tuple[str, ...] = ("cpu", "gpu")
    cost: int = 1
    place: Place | None = field(default=None, compare=False)


@dataclass(frozen=True)
class PrefillBits:
    """Whether one prefill path has the bits of decode over the same cache bytes.

    Attributes:
        path: ``dense`` or ``sparse``.
        bitwise: True, False, or None where nobody knows.
        first_divergent_kv_len: where False, rows of fewer tokens have equal bits and some row of more has not; else 0.
    """

    path: str
    bitwise: bool | None
    first_divergent_kv_len: int = 0


@dataclass(frozen=True)
class Cell:
    """One ratio x mode with its state; ``variants`` if covered, else ``reason`` and ``probe``.

    Attributes:
        promise: covered: the strongest level of determinism; the gate holds the cell to it.
        prefill_bits: covered cells that run EXTEND: agreement with decode, one a path; a path left out is unknown.
    """

    ratio: int
    mode: str
    state: State
    variants: tuple[Variant, ...] = ()
    reason: str = ""
    probe: Probe | None = None
    promise: Level = Level.SAME_PLAN
    prefill_bits: tuple[PrefillBits, ...] = ()
    place: Place | None = field(default=None, compare=False)

    @property
    def id(self) -> str:
        """``r4/cg-decode``."""
        return f"r{self.ratio}/{self.mode}"


@dataclass(frozen=True)
class Refusal:
    """A hard edge outside the cells (page size, head_dim, sink missing ...), with a probe of its own."""

    name: str
    reason: str
    probe: Probe


@dataclass(frozen=True)
class Case:
    """One generated test: a variant of a covered cell, a cell's probe, or a refusal.

    ``kind`` is ``case``, ``probe`` or ``refusal``; ``id`` is unique, ``[a-z0-9-]+`` and never parsed.
    """

    id: str
    kind: str
    cell: Cell | None = None
    variant: Variant | None = None
    probe: Probe | None = None
    reason: str = ""

    @property
    def seed(self) -> int:
        """crc32 of the id: the same in every process, order and worker."""
        return crc32(self.id.encode("ascii"))

    @property
    def cell_id(self) -> str:
        return self.cell.id if self.cell else ""

    @property
    def unit(self) -> str:
        """What it is planned and told with: the id of its cell, ``refusals`` for those outside the cells."""
        return self.cell_id or REFUSALS


@dataclass(frozen=True)
class Matrix:
    """The whole declaration. ``sha256`` is of the file's bytes."""

    path: str
    sha256: str
    geometry: Geometry
    tolerances: Tolerances
    ratios: tuple[int, ...]
    modes: tuple[Mode, ...]
    cells: tuple[Cell, ...]
    refusals: tuple[Refusal, ...]

    def cell(self, cell_id: str) -> Cell:
        """The cell named ``r4/cg-decode``; KeyError if there is none."""
        for cell in self.cells:
            if cell.id == cell_id:
                return cell
        raise KeyError(cell_id)

    def cases(self, device: str | None = None) -> tuple[Case, ...]:
        """All generated tests sorted by id; with ``device`` (``cpu`` or ``gpu``) only those that run there."""
        found = [
            Case(id=f"r{cell.ratio}-{cell.mode}-{variant.name}", kind="case", cell=cell, variant=variant)
            for cell in self.cells
            for variant in cell.variants
            if device is None or device in variant.devices
        ]
        found += [
            Case(id=f"r{cell.ratio}-{cell.mode}-refused", kind="probe", cell=cell, probe=cell.probe, reason=cell.reason)
            for cell in self.cells
            if cell.probe is not None
        ]
        found += [
            Case(id=f"refusal-{refusal.name}", kind="refusal", probe=refusal.probe, reason=refusal.reason)
            for refusal in self.refusals
        ]
        return tuple(sorted(found, key=lambda case: case.id))
