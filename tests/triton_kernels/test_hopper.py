"""The Hopper kernel on a Hopper GPU: held to the same bounds, poison and invariances as the portable one.

Everything else about it (which calls it takes, that it compiles and fits) is tested without a GPU in
``test_choice`` and ``test_aot``.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from dsv4_reference.codec import dequantise
from dsv4_triton import attention, choice
from dsv4_triton.arguments import KeyList
from dsv4_triton.attention import sparse_attention
from dsv4_triton.choice import Choice, choose

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")

SCALE = 512**-0.5
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


@pytest.fixture(autouse=True)
def only_hopper(monkeypatch):
    """A call that would go to the portable kernel is a mistake of the test."""
    monkeypatch.setattr(choice, "PREFERRED", "hopper")
    chosen: list[Choice] = []

    def watched(*arguments):
        chosen.append(choose(*arguments))
        assert chosen[-1].kernel == "hopper", chosen[-1].reason
        return chosen[-1]

    monkeypatch.setattr(attention, "choose", watched)
    yield
    assert chosen


def same(a, b):
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize(("page", "extra_page"), [(256, 64), (128, 2), (1, 4)])
def test_both_lists_with_a_sink(
    heads, page, extra_page, random_keys, queries, choose_slots, ints, oracle, check, device, generator
):
    main, slots = random_keys(512 // page, page, live=0.7, stride=-(-page * 584 // 16) * 16)
    extra, extra_slots = random_keys(512 // extra_page, extra_page, live=0.7)
    q = queries(6, heads)
    indices, extra_indices = choose_slots(slots, 6, 130, 0.2), choose_slots(extra_slots, 6, 520, 0.2)
    lengths, extra_lengths = ints(130, 5, 64, 0, 0, 129), ints(70, 0, 520, 1, 0, 65)
    sink = torch.randn(heads, generator=generator).to(device)
    got = sparse_attention(
        q, main.view, indices, lengths, sink, SCALE,
        extra_cache=extra.view, extra_indices=extra_indices, extra_lengths=extra_lengths,
    )  # fmt: skip
    lists = [(main.values, indices, lengths), (extra.values, extra_indices, extra_lengths)]
    check(got, oracle(q, lists, sink, SCALE))


def test_more_items_than_processors(random_keys, queries, choose_slots, oracle, check, device, generator):
    """A program works on several items, of every length, empty ones between them."""
    main, slots = random_keys(8, 64, live=0.8)
    extra, extra_slots = random_keys(256, 2, live=0.8)
    rows = 700
    q, indices, extra_indices = queries(rows, 64), choose_slots(slots, rows, 128), choose_slots(extra_slots, rows, 200)
    lengths = torch.randint(-3, 140, (rows,), generator=generator, dtype=torch.int32).to(device)
    extra_lengths = torch.randint(0, 201, (rows,), generator=generator, dtype=torch.int32).to(device)
    lengths[::5] = 0
    extra_lengths[::10] = 0
    call = {"extra_cache": extra.view, "extra_indices": extra_indices, "extra_lengths": extra_lengths}
    got = sparse_attention(q, main.view, indices, lengths, None, SCALE, **call)
    for first in range(0, rows, 100):
        at = slice(first, first + 100)
        lists = [(main.values, indices[at], lengths[at]), (extra.values, extra_indices[at], extra_lengths[at])]
        check((got[0][at], got[1][at]), oracle(q[at], lists, None, SCALE))
    for _ in range(20):
        assert same(sparse_attention(q, main.view, indices, lengths, None, SCALE, **call), got)


@pytest.fixture
def long_batch(random_keys, choose_slots, queries, ints, device, generator):
    """Rows of one to four splits, an empty one and a pad row, over two lists."""
    main, slots = random_keys(4, 64, live=0.8)
    extra, extra_slots = random_keys(64, 2, live=0.8)
    return {
        "q": queries(6, 128),
        "cache": main.view,
        "indices": choose_slots(slots, 6, 128),
        "lengths": ints(128, 128, 1, 0, 70, 128),
        "sink": torch.randn(128, generator=generator).to(device),
        "scale": SCALE,
        "extra_cache": extra.view,
        "extra_indices": choose_slots(extra_slots, 6, 4000),
        "extra_lengths": ints(4000, 1153, 0, 0, 2600, 1152),
    }, (main, extra)


def rows_of(batch, at):
    names = ("q", "indices", "lengths", "extra_indices", "extra_lengths")
    return batch | {name: batch[name][at] for name in names}


def test_rows_of_several_splits(long_batch, oracle, check):
    batch, (main, extra) = long_batch
    lists = [
        (main.values, batch["indices"], batch["lengths"]),
        (extra.values, batch["extra_indices"], batch["extra_lengths"]),
    ]
    check(sparse_attention(**batch), oracle(batch["q"], lists, batch["sink"], SCALE))


def test_a_row_depends_on_itself_alone(long_batch, device, monkeypatch):
    """Alone, permuted, in a large batch, with wider index tensors, in chunks of the workspace: the same bits."""
    batch, _ = long_batch
    whole = sparse_attention(**batch)
    for row in range(6):
        alone = sparse_attention(**rows_of(batch, slice(row, row + 1)))
        assert same(alone, (whole[0][row : row + 1], whole[1][row : row + 1]))
    order = torch.tensor([3, 0, 4, 0, 2] * 60, device=device)
    assert same(sparse_attention(**rows_of(batch, order)), (whole[0][order], whole[1][order]))
    for more in (1, 64, 4000):
        wide = batch | {
            name: torch.nn.functional.pad(batch[name], (0, more), value=7) for name in ("indices", "extra_indices")
        }
        assert same(sparse_attention(**wide), whole)
    short = rows_of(batch, slice(5, 6))
    narrow = short | {"extra_indices": short["extra_indices"][:, :1152]}
    assert same(sparse_attention(**narrow), (whole[0][5:6], whole[1][5:6])), "one split, with and without splits around"
    from dsv4_triton import workload

    monkeypatch.setattr(workload, "WORKSPACE_BYTES", 1)
    assert same(sparse_attention(**batch), whole)


@pytest.fixture
def served(monkeypatch):
    """Which calls the kernels for few rows took, in order; or, told so, that they take none."""
    from dsv4_triton.hopper import launch as hopper

    sound = hopper.serves
    calls = []

    def serves(*arguments, none=False):
        calls.append(sound(*arguments) and not none)
        return calls[-1]

    monkeypatch.setattr(hopper, "serves", serves)
    calls_none = partial(monkeypatch.setattr, hopper, "serves", partial(serves, none=True))
    return calls, calls_none


@pytest.fixture
def random_batch(random_keys, queries, choose_slots, device, generator):
    """Rows with random lists of random lengths; of the first two one has full lists, the other no second one."""

    def make(rows, heads, width, extra_width, peak=1.0):
        main, slots = random_keys(8, 64, live=0.8)
        extra, extra_slots = random_keys(600, 2, live=0.8)
        lengths = torch.randint(0, width + 1, (rows,), generator=generator, dtype=torch.int32)
        extra_lengths = torch.randint(0, extra_width + 1, (rows,), generator=generator, dtype=torch.int32)
        lengths[:2], extra_lengths[0], extra_lengths[1:2] = width, extra_width, 0
        return {
            "q": queries(rows, heads) * peak,
            "cache": main.view,
            "indices": choose_slots(slots, rows, width, 0.2),
            "lengths": lengths.to(device),
            "sink": torch.randn(heads, generator=generator).to(device),
            "scale": SCALE,
            "extra_cache": extra.view,
            "extra_indices": choose_slots(extra_slots, rows, extra_width, 0.2),
            "extra_lengths": extra_lengths.to(device),
        }

    return make


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("peak", [0.0, 1.0, 40.0])
@pytest.mark.parametrize(("width", "extra_width"), [(128, 1024), (128, 5), (1, 1), (70, 1150)])
@pytest.mark.parametrize("rows", [2, 8, 30])
def test_few_rows_have_the_bits_of_many(rows, heads, peak, width, extra_width, random_batch, served, device):
    """A row alone, among few, among dozens, and among more than the kernels for few rows take."""
    batch = random_batch(rows, heads, width, extra_width, peak)
    calls, take_none = served
    few = sparse_attention(**batch)
    for row in range(rows):
        alone = sparse_attention(**rows_of(batch, slice(row, row + 1)))
        assert same(alone, (few[0][row : row + 1], few[1][row : row + 1]))
    assert all(calls)
    order = torch.arange(300, device=device) % rows
    many = sparse_attention(**rows_of(batch, order))
    assert not calls[-1], "300 rows are not few"
    assert same(many, (few[0][order], few[1][order]))
    take_none()
    assert same(sparse_attention(**batch), few)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_few_rows_of_several_splits(rows, heads, random_batch, served):
    """Rows that need one split and rows that need all four; alone, together, and as one program for each."""
    batch = random_batch(rows, heads, 128, 4000)
    calls, take_none = served
    few = sparse_attention(**batch)
    for row in range(rows):
        alone = sparse_attention(**rows_of(batch, slice(row, row + 1)))
        assert same(alone, (few[0][row : row + 1], few[1][row : row + 1]))
    assert all(calls)
    take_none()
    assert same(sparse_attention(**batch), few)


@pytest.mark.parametrize("heads", [64, 128])
def test_few_rows_shared_among_any_number_of_programs(heads, random_keys, queries, choose_slots, monkeypatch):
    """Programs of the first kernel and kinds of the second decide nothing."""
    from dsv4_triton.hopper.few_rows import launch as few_rows

    main, slots = random_keys(8, 64, live=0.8)
    q, indices = queries(2, heads), choose_slots(slots, 2, 1280, 0.1)
    want = sparse_attention(q, main.view, indices, None, None, SCALE)
    for share in itertools.product(("narrow", "wide", "stream"), (1, 7, 20)):
        monkeypatch.setattr(few_rows, "shares", lambda *_, share=share: share)
        for _ in range(5):
            assert same(sparse_attention(q, main.view, indices, None, None, SCALE), want), share


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("kind", ["narrow", "wide"])
@pytest.mark.parametrize("width", [256, 320, 1280])
def test_weights_of_few_rows_made_by_any_number_of_roles(
    heads, kind, width, random_keys, queries, choose_slots, monkeypatch
):
    """Each block's once, by whichever; nobody reads one that is not there: memory is full of NaN before."""
    from dsv4_triton.hopper.few_rows import launch as few_rows

    main, slots = random_keys(8, 64, live=0.8)
    q, indices = queries(2, heads), choose_slots(slots, 2, width, 0.1)
    want = sparse_attention(q, main.view, indices, None, None, SCALE)
    monkeypatch.setattr(few_rows, "shares", lambda *_: (kind, width // 64))
    monkeypatch.setattr(torch, "empty", lambda *sizes, empty=torch.empty, **named: poison(empty(*sizes, **named)))
    for count in (1, 3, few_rows.PROGRAMS[kind], 2 * few_rows.PROGRAMS[kind]):
        monkeypatch.setattr(few_rows, "makers", lambda *_, count=count: count)
        for _ in range(10):
            assert same(sparse_attention(q, main.view, indices, None, None, SCALE), want), count


def poison(tensor):
    """NaN in every float, -1 in every integer."""
    tensor.view(-1).view(torch.uint8).fill_(255)
    return tensor


def test_few_rows_in_a_graph_read_what_is_there_at_replay(random_keys, queries, choose_slots, device, generator):
    """The second kernel is launched early: a replay sees queries, lists and keys as they are then."""
    main, slots = random_keys(8, 64, live=0.8)
    q, indices = queries(3, 64), choose_slots(slots, 3, 640, 0.1)
    sparse_attention(q, main.view, indices, None, None, SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sparse_attention(q, main.view, indices, None, None, SCALE)
    for _ in range(20):
        q.copy_(queries(3, 64))
        indices.copy_(choose_slots(slots, 3, 640, 0.1))
        graph.replay()
        assert same(got, sparse_attention(q, main.view, indices, None, None, SCALE))


def test_a_reordered_list_has_other_bits(long_batch):
    """What makes the comparisons above worth something."""
    batch, _ = long_batch
    want = sparse_attention(**batch)
    row, length = 1, 1153
    batch["extra_indices"][row, :length] = batch["extra_indices"][row, :length].roll(300)
    got = sparse_attention(**batch)
    assert torch.allclose(got[0][row].float(), want[0][row].float(), atol=2e-2)
    assert not torch.equal(got[0][row], want[0][row])


def test_nan_queries_in_rows_with_and_without_keys(long_batch):
    batch, _ = long_batch
    out, lse = sparse_attention(**batch)
    batch["q"][3:5] = math.nan
    got = sparse_attention(**batch)
    keep = torch.tensor([0, 1, 2, 3, 5], device=out.device)
    assert same((got[0][keep], got[1][keep]), (out[keep], lse[keep])), "row 3 has no keys: zeros, whatever its query"
    assert bool(got[0][4].isnan().all())


@pytest.mark.parametrize("junk", ["poisoned slot", "capacity", INT_MAX, INT_MIN, -1])
def test_entries_past_the_length_leave_the_bits_alone(junk, random_keys, queries, choose_slots, ints):
    main, slots = random_keys(3, 64, live=0.5)
    dead = next(s for s in range(192) if s not in set(slots.tolist()))
    value = {"poisoned slot": dead, "capacity": 192}.get(junk, junk)
    q, clean = queries(1, 64), choose_slots(slots, 1, 128)
    clean[:, 37:] = -1
    dirty = clean.clone()
    dirty[:, 37:] = value
    want = sparse_attention(q, main.view, clean, ints(37), None, SCALE)
    assert bool(want[0].isfinite().all())
    for indices, lengths in ((dirty, ints(37)), (clean, None), (clean, ints(128))):
        assert same(sparse_attention(q, main.view, indices, lengths, None, SCALE), want)


@pytest.mark.parametrize("count", [2, 70])
def test_single_poisoned_bytes_are_read_as_nan(count, make_keys, queries, generator, ints, device):
    """e4m3 0x7F and 0xFF in every group, scale byte 255 of every group, a rope NaN; all heads, all columns."""
    keys = make_keys(torch.randn(count, 512, generator=generator).bfloat16(), torch.arange(count), 1, 128)
    raw = keys.view.flatten(1)
    q = queries(1, 128)
    indices = torch.arange(count, dtype=torch.int32, device=device)[None]
    poisons = [(group * 64 + (5 * group + 3) % 64, byte) for group in range(7) for byte in (0x7F, 0xFF)]
    poisons += [(128 * 576 + group, 255) for group in range(7)]
    for at, byte in poisons:
        saved = raw[0, at].item()
        raw[0, at] = byte
        out, lse = sparse_attention(q, keys.view, indices, None, None, SCALE)
        assert bool(out.isnan().all()), f"byte {at} = {byte:#x} was read as a number"
        assert bool(lse.isnan().all())
        raw[0, at] = saved
    rope = keys.view.flatten(1)[0, 448:576].view(torch.bfloat16)
    saved = rope[7].item()
    rope[7] = math.nan
    assert bool(sparse_attention(q, keys.view, indices, None, None, SCALE)[0].isnan().all())
    rope[7] = saved
    assert bool(sparse_attention(q, keys.view, indices, None, None, SCALE)[0].isfinite().all())


def test_every_code_reads_as_a_key(make_keys, device):
    """One key of weight 1 comes out as it was read: all finite codes, under scale bytes from end to end."""
    scales = [0, 1, 2, 20, 104, 105, 126, 127, 128, 133, 134, 135, 136, 200, 245]
    count = len(scales) * 2
    keys = make_keys(torch.zeros(count, 512).bfloat16(), torch.arange(count), 1, 32)
    raw = keys.view.flatten(1)[0]
    forward = torch.arange(448) % 256
    codes = torch.stack([forward, 255 - forward])
    codes = torch.where((codes & 0x7F) == 0x7F, 0x80, codes)
    for row in range(count):
        raw[row * 576 : row * 576 + 448] = codes[row % 2].to(device, torch.uint8)
        raw[32 * 576 + row * 8 :][:7] = scales[row // 2]
    q = torch.zeros(count, 64, 512, dtype=torch.bfloat16, device=device)
    index = torch.arange(count, dtype=torch.int32, device=device)[:, None]
    out, lse = sparse_attention(q, keys.view, index, None, None, SCALE)
    bytes7 = torch.tensor(scales, dtype=torch.uint8).repeat_interleave(2)[:, None].expand(-1, 7).contiguous()
    want = dequantise(codes.repeat(len(scales), 1).to(torch.uint8), bytes7).float().bfloat16()
    for head in (0, 63):
        assert torch.equal(out[:, head, :448].cpu(), want)
    assert not lse.any()


def test_one_large_scale_in_one_block(make_keys, queries, oracle, check, device, generator):
    """A block takes the way with two factors for one key's sake, and its neighbours do not."""
    count = 300
    rows = torch.randn(count, 512, generator=generator).bfloat16()
    large = rows.clone()
    large[130, 64:128] *= 2.0**12  # a scale byte of about 131
    large[200, 128:192] *= 2.0**20  # about 139, beyond one factor
    q = queries(2, 64) * 2.0**-20
    for content in (rows, large):
        keys = make_keys(content, torch.arange(count), 5, 64)
        indices = torch.arange(count, dtype=torch.int32, device=device).expand(2, -1)
        got = sparse_attention(q, keys.view, indices, None, None, SCALE)
        check(got, oracle(q, [(keys.values, indices, None)], None, SCALE))


@pytest.mark.parametrize("sink", [-math.inf, math.inf, 1e30, -1e30, 0.1234])
def test_sinks(sink, random_keys, queries, choose_slots, ints, oracle, check, device):
    main, slots = random_keys(2, 64)
    q, indices, lengths = queries(2, 64), choose_slots(slots, 2, 64), ints(50, 0)
    sinks = torch.full((64,), sink, device=device)
    out, lse = sparse_attention(q, main.view, indices, lengths, sinks, SCALE)
    without = sparse_attention(q, main.view, indices, lengths, None, SCALE)
    assert torch.equal(lse, without[1])
    assert not out[1].any()
    if sink in (math.inf, 1e30):
        assert not out.any()
    else:
        check((out, lse), oracle(q, [(main.values, indices, lengths)], sinks, SCALE))
    if sink in (-math.inf, -1e30):
        assert torch.equal(out, without[0])


def test_strided_queries_and_outputs_and_what_lies_around_them(random_keys, queries, choose_slots, ints, device):
    main, slots = random_keys(2, 64)
    q, indices, lengths = queries(4, 64), choose_slots(slots, 4, 96), ints(96, 3, 20, 0)
    want = sparse_attention(q, main.view, indices, lengths, None, SCALE)
    room = torch.full((4, 128, 576), math.nan, dtype=q.dtype, device=device)
    room[:, 32:96, 64:] = q
    out_room = torch.full((8, 66, 520), 7.0, dtype=q.dtype, device=device)
    out = out_room[::2, 1:65, :512]
    lse_room = torch.full((65, 6), 7.0, device=device)
    lse = lse_room[:64, 1:5].t()
    got = sparse_attention(room[:, 32:96, 64:], main.view, indices, lengths, None, SCALE, out=out, lse=lse)
    assert same(got, want)
    assert got[0] is out
    out.fill_(7.0)
    lse.fill_(7.0)
    assert bool((out_room == 7).all())
    assert bool((lse_room == 7).all())


def test_a_cache_beyond_two_gibibytes(make_keys, queries, generator, ints, device):
    rows = torch.randn(3, 512, generator=generator).bfloat16()
    page = make_keys(rows, torch.tensor([0, 100, 255]), 1, 256)
    pages = 2**31 // 149_760 + 8
    buffer = torch.empty(pages, 149_760, dtype=torch.uint8, device=device)
    buffer[-1, : 256 * 584] = page.view.flatten()
    view = buffer[:, : 256 * 584].unflatten(1, (256, 1, 584))
    base = (pages - 1) * 256
    q = queries(1, 64)
    got = sparse_attention(q, view, ints(base, base + 100, base + 255)[None], None, None, SCALE)
    assert same(got, sparse_attention(q, page.view, ints(0, 100, 255)[None], None, None, SCALE))


@pytest.mark.parametrize("course", ["slow rise", "fast rise", "fall", "one peak", "far below"])
def test_a_maximum_that_moves_from_block_to_block(course, make_keys, queries, oracle, check, device, generator):
    """Sums of earlier blocks are rescaled a little, much, to nothing, and not at all."""
    blocks, count = 18, 18 * 64
    block = torch.arange(count) // 64
    level = {
        "slow rise": block * 0.1,
        "fast rise": block * 6.0,
        "fall": (blocks - block) * 6.0,
        "one peak": torch.where(block == 9, 80.0, 0.0),
        "far below": torch.where(block == 0, 90.0, -90.0),
    }[course]
    q = queries(1, 64)
    first = q[0, 0].float().cpu()
    noise = torch.randn(count, 512, generator=generator) * 0.02
    rows = (level[:, None] / SCALE / float(first @ first) * first + noise).bfloat16()
    keys = make_keys(rows, torch.arange(count), count // 64, 64)
    indices = torch.arange(count, dtype=torch.int32, device=device)[None]
    got = sparse_attention(q, keys.view, indices, None, None, SCALE)
    check(got, oracle(q, [(keys.values, indices, None)], None, SCALE))


def test_captured_in_a_graph(long_batch):
    batch, _ = long_batch
    want = sparse_attention(**batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sparse_attention(**batch)
    for _ in range(3):
        got[0].fill_(math.nan)
        got[1].fill_(math.nan)
        graph.replay()
        assert same(got, want)


def test_key_lists_are_described_as_they_are(random_keys, choose_slots, queries):
    """The choice that this file relies on is the one that a caller can ask for."""
    main, slots = random_keys(1, 64)
    q = queries(1, 64)[:, None]
    keys = KeyList(main.view, choose_slots(slots, 1, 8)[:, None], None)
    assert attention.choose("sm90", q, keys, None, SCALE, q).kernel == "hopper"
