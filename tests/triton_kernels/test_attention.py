"""Attention against an fp64 softmax, with poison wherever nothing may be read; rows A, F and H of faults.md."""

from __future__ import annotations

import math

import pytest
import torch
from dsv4_reference.codec import dequantise
from dsv4_triton import attention
from dsv4_triton.attention import sparse_attention, sparse_attention_bf16

SCALE = 512**-0.5
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_both_lists_with_a_sink(heads, random_keys, queries, choose_slots, ints, oracle, check, device, generator):
    main, slots = random_keys(3, 64, live=0.7)
    extra, extra_slots = random_keys(40, 2, live=0.7)
    q = queries(3, heads)
    indices, extra_indices = choose_slots(slots, 3, 130, 0.2), choose_slots(extra_slots, 3, 70, 0.2)
    lengths, extra_lengths = ints(130, 5, 64), ints(70, 0, 9)
    sink = torch.randn(heads, generator=generator).to(device)
    got = sparse_attention(
        q, main.view, indices, lengths, sink, SCALE,
        extra_cache=extra.view, extra_indices=extra_indices, extra_lengths=extra_lengths,
    )  # fmt: skip
    lists = [(main.values, indices, lengths), (extra.values, extra_indices, extra_lengths)]
    check(got, oracle(q, lists, sink, SCALE))


def test_the_bound_sees_one_key_more_or_less(random_keys, queries, choose_slots, ints, oracle, check):
    main, slots = random_keys(3, 64)
    q, indices = queries(1, 16), choose_slots(slots, 1, 128)
    got = sparse_attention(q, main.view, indices, ints(100), None, SCALE)
    for wrong in (99, 101):
        with pytest.raises(AssertionError):
            check(got, oracle(q, [(main.values, indices, ints(wrong))], None, SCALE))


@pytest.mark.parametrize("junk", ["poisoned slot", 1 << 30, "capacity", "capacity + 1", INT_MAX, INT_MIN])
def test_entries_past_the_length_leave_the_bits_alone(junk, random_keys, queries, choose_slots, ints):
    """faults.md A3, A4: topk 128, length 37, every kind of junk beyond: the bits of canonical -1 padding."""
    main, slots = random_keys(3, 64, live=0.5)
    capacity = 192
    dead = next(s for s in range(capacity) if s not in set(slots.tolist()))
    value = {"poisoned slot": dead, "capacity": capacity, "capacity + 1": capacity + 1}.get(junk, junk)
    q, clean = queries(1, 16), choose_slots(slots, 1, 128)
    clean[:, 37:] = -1
    dirty = clean.clone()
    dirty[:, 37:] = value
    want = sparse_attention(q, main.view, clean, ints(37), None, SCALE)
    for indices, lengths in ((dirty, ints(37)), (clean, None), (clean, ints(128))):
        got = sparse_attention(q, main.view, indices, lengths, None, SCALE)
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("with_sink", [False, True])
def test_rows_without_keys(with_sink, random_keys, queries, choose_slots, ints, oracle, check, device):
    """faults.md A5, A6, A7, A12: exact zeros and +inf, poisoned outputs overwritten, neighbours unchanged."""
    main, slots = random_keys(8, 64, live=0.6)
    q, indices = queries(5, 16), choose_slots(slots, 5, 300)
    indices[2] = -1
    lengths = ints(0, 17, 300, 300, -5)
    sink = torch.zeros(16, device=device) if with_sink else None
    out = torch.full((5, 16, 512), math.nan, dtype=torch.bfloat16, device=device)
    lse = torch.full((5, 16), math.nan, device=device)
    got = sparse_attention(q, main.view, indices, lengths, sink, SCALE, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    check(got, oracle(q, [(main.values, indices, lengths)], sink, SCALE))
    for row in (0, 2, 4):
        assert not out[row].any()
        assert bool((lse[row] == math.inf).all())
    alone = sparse_attention(q[3:4], main.view, indices[3:4], lengths[3:4], sink, SCALE)
    assert torch.equal(alone[0], out[3:4])
    assert torch.equal(alone[1], lse[3:4])


@pytest.mark.parametrize("kv", [1, 127, 255, 257])
def test_the_rest_of_the_last_page_is_never_read(kv, make_keys, queries, generator, oracle, check, ints, device):
    """faults.md A8: the page's tail is NaN."""
    rows = torch.randn(kv, 512, generator=generator).bfloat16()
    keys = make_keys(rows, torch.arange(kv), 2, 256)
    indices = torch.arange(320, dtype=torch.int32, device=device)[None]
    q = queries(1, 16)
    got = sparse_attention(q, keys.view, indices, ints(kv), None, SCALE)
    check(got, oracle(q, [(keys.values, indices, ints(kv))], None, SCALE))
    assert bool(got[0].isfinite().all())


def test_slot_zero_counts_once_and_padding_zero_times(make_keys, queries, ints, oracle, check, device):
    """faults.md A10: [0, -1, -1, 7] with a dominant key in slot 0, which a clamped -1 would count again."""
    q = queries(1, 16)
    rows = torch.zeros(2, 512).bfloat16()
    rows[0] = (q[0].float().mean(0) * 3).bfloat16().cpu()
    rows[1, :] = 1.0
    keys = make_keys(rows, torch.tensor([0, 7]), 1, 8)
    indices = ints(0, -1, -1, 7)[None]
    got = sparse_attention(q, keys.view, indices, None, None, SCALE)
    check(got, oracle(q, [(keys.values, indices, None)], None, SCALE))


@pytest.mark.parametrize("kv", [16, 64, 255, 257])
def test_uniform_weights_give_the_mean(kv, make_keys, device, ints):
    """faults.md A11: q = 0 and keys of one constant: any padding lane in the denominator scales the output."""
    keys = make_keys(torch.full((kv, 512), 1.5).bfloat16(), torch.arange(kv), 3, 100)
    q = torch.zeros(1, 16, 512, dtype=torch.bfloat16, device=device)
    indices = torch.arange(320, dtype=torch.int32, device=device)[None]
    out, lse = sparse_attention(q, keys.view, indices, ints(kv), None, SCALE)
    assert bool((out == 1.5).all())
    assert bool(((lse - math.log(kv)).abs() < 1e-5).all())


def test_a_poisoned_key_that_counts_is_never_hidden(make_keys, queries, generator, ints):
    """A visible NaN must reach the output: an empty row and a poisoned row are different things."""
    rows = torch.randn(4, 512, generator=generator).bfloat16()
    for column in (3, 300, 400, 500):
        bad = rows.clone()
        bad[2, column] = math.nan
        keys = make_keys(bad, torch.arange(4), 1, 4)
        out, lse = sparse_attention(queries(1, 16), keys.view, ints(0, 1, 2, 3)[None], None, None, SCALE)
        assert bool(out.isnan().all())
        assert bool(lse.isnan().all())


def test_single_poisoned_bytes_are_read_as_nan(make_keys, queries, generator, ints):
    """e4m3 0x7F and 0xFF, and scale byte 255, one byte at a time (interpreter.md: Triton reads 0x7F as 480)."""
    keys = make_keys(torch.randn(2, 512, generator=generator).bfloat16(), torch.arange(2), 1, 2)
    raw = keys.view.flatten(1)
    q = queries(1, 16)
    for at, byte in ((5, 0x7F), (300, 0xFF), (440, 0x7F), (2 * 576 + 6, 255)):
        saved = raw[0, at].item()
        raw[0, at] = byte
        out, _ = sparse_attention(q, keys.view, ints(0, 1)[None], None, None, SCALE)
        assert bool(out.isnan().all()), f"byte {at} = {byte:#x} was read as a number"
        raw[0, at] = saved
    assert bool(sparse_attention(q, keys.view, ints(0, 1)[None], None, None, SCALE)[0].isfinite().all())


def test_scale_edges_and_pad_byte(make_keys, queries, generator, oracle, check, ints, device):
    """faults.md G4 in attention: scale bytes 0 and 1 vanish, 127 + 20 dominates; the pad byte (0xFF) means nothing."""
    keys = make_keys(torch.randn(3, 512, generator=generator).bfloat16(), torch.arange(3), 1, 3)
    raw, values = keys.view.flatten(1), keys.values
    q = queries(1, 16) * 2.0**-20
    for group, byte in ((0, 0), (1, 1), (3, 147), (6, 134), (5, 135)):
        old = raw[0, 3 * 576 + 8 + group].item()
        raw[0, 3 * 576 + 8 + group] = byte
        values[1, group * 64 : group * 64 + 64] *= 2.0 ** (byte - old)
    got = sparse_attention(q, keys.view, ints(0, 1, 2)[None], None, None, SCALE)
    check(got, oracle(q, [(values, ints(0, 1, 2)[None], None)], None, SCALE))


def test_every_code_reads_as_a_key(make_keys, ints, device):
    """One key of weight 1 comes out as it was read: all finite codes, under scale bytes from end to end."""
    scales = [20, 60, 104, 105, 126, 127, 128, 133, 134, 135, 136, 200, 245]
    keys = make_keys(torch.zeros(len(scales) * 2, 512).bfloat16(), torch.arange(len(scales) * 2), 1, len(scales) * 2)
    raw = keys.view.flatten(1)[0]
    forward = torch.arange(448) % 256
    codes = torch.stack([forward, 255 - forward])
    codes = torch.where((codes & 0x7F) == 0x7F, 0x80, codes)
    for row in range(len(scales) * 2):
        raw[row * 576 : row * 576 + 448] = codes[row % 2].to(device, torch.uint8)
        raw[len(scales) * 2 * 576 + row * 8 :][:7] = scales[row // 2]
    q = torch.zeros(len(scales) * 2, 16, 512, dtype=torch.bfloat16, device=device)
    index = torch.arange(len(scales) * 2, dtype=torch.int32, device=device)[:, None]
    out, lse = sparse_attention(q, keys.view, index, None, None, SCALE)
    bytes7 = torch.tensor(scales, dtype=torch.uint8).repeat_interleave(2)[:, None].expand(-1, 7).contiguous()
    want = dequantise(codes.repeat(len(scales), 1).to(torch.uint8), bytes7).float().bfloat16()
    for head in (0, 15):
        assert torch.equal(out[:, head, :448].cpu(), want)
    assert not lse.any()


@pytest.mark.parametrize("sink", [-math.inf, math.inf, 1e30, -1e30, 0.1234, -1.7])
def test_sinks(sink, random_keys, queries, choose_slots, ints, oracle, check, device):
    """faults.md H2: -inf is no sink, +inf gives zeros and no NaN, lse never sees it."""
    main, slots = random_keys(2, 64)
    q, indices = queries(2, 16), choose_slots(slots, 2, 64)
    lengths = ints(50, 0)
    sinks = torch.full((16,), sink, device=device)
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


@pytest.mark.parametrize("layout", ["q slice of 576", "q head slice", "q row stride", "indices transposed", "offsets"])
def test_strides(layout, random_keys, choose_slots, queries, ints, generator, device):
    """faults.md F6: equal, bit for bit, to the contiguous call."""
    main, slots = random_keys(2, 64)
    q, indices, lengths = queries(4, 16), choose_slots(slots, 4, 64), ints(64, 3, 20, 0)
    want = sparse_attention(q, main.view, indices, lengths, None, SCALE)
    if layout == "q slice of 576":
        room = queries(4, 16).repeat(1, 1, 2)[:, :, :576]
        room[:, :, 64:] = q
        q = room[:, :, 64:]
    elif layout == "q head slice":
        room = torch.full((4, 64, 512), math.nan, dtype=q.dtype, device=device)
        room[:, 16:32] = q
        q = room[:, 16:32]
    elif layout == "q row stride":
        room = torch.full((4 * 16 * 513 + 7,), math.nan, dtype=q.dtype, device=device)
        view = room[7 : 7 + 4 * 16 * 513].view(4, 16, 513)[:, :, :512]
        view.copy_(q)
        q = view
    elif layout == "indices transposed":
        indices = indices.t().contiguous().t()
    else:
        lengths = torch.cat([ints(99), lengths])[1:]
        indices = torch.cat([indices.new_full((1, 64), 7), indices])[1:]
    got = sparse_attention(q, main.view, indices, lengths, None, SCALE)
    assert all(map(torch.equal, got, want))


def test_outputs_of_other_strides_and_their_surroundings(random_keys, queries, choose_slots, ints, device):
    """faults.md F5, H6, H7: what lies around a strided output stays as it was."""
    main, slots = random_keys(2, 64)
    q, indices = queries(2, 16), choose_slots(slots, 2, 64)
    want = sparse_attention(q, main.view, indices, None, None, SCALE)
    room = torch.full((4, 18, 520), 7.0, dtype=torch.bfloat16, device=device)
    out = room[1:3, 1:17, :512]
    lse_room = torch.full((17, 4), 7.0, device=device)
    lse = lse_room[:16, 1:3].t()
    sparse_attention(q, main.view, indices, None, None, SCALE, out=out, lse=lse)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    out.fill_(7.0)
    lse.fill_(7.0)
    assert bool((room == 7).all())
    assert bool((lse_room == 7).all())


def test_page_order_does_not_matter(make_keys, queries, generator, ints, device):
    """faults.md F10: the same keys in other slots, in the same list order: the same bits."""
    rows = torch.randn(100, 512, generator=generator).bfloat16()
    q = queries(1, 16)
    answers = []
    for slots in (torch.arange(100), torch.arange(100).flip(0), torch.randperm(128, generator=generator)[:100]):
        keys = make_keys(rows, slots, 2, 64)
        answers.append(sparse_attention(q, keys.view, slots.int().to(device)[None], None, None, SCALE))
    for answer in answers[1:]:
        assert all(map(torch.equal, answer, answers[0]))


def test_page_sizes_share_one_answer(make_keys, queries, generator, device):
    rows = torch.randn(70, 512, generator=generator).bfloat16()
    q = queries(1, 16)
    indices = torch.arange(70, dtype=torch.int32, device=device)[None]
    answers = []
    for page in (1, 2, 3, 64, 100, 576):  # page 1 and 3 without padding: pages start on 8 bytes, not on 16
        keys = make_keys(rows, torch.arange(70), -(-70 // page), page, page * 584)
        answers.append(sparse_attention(q, keys.view, indices, None, None, SCALE))
    for answer in answers[1:]:
        assert all(map(torch.equal, answer, answers[0]))


def test_a_cache_beyond_two_gibibytes(make_keys, queries, generator, ints, device):
    rows = torch.randn(3, 512, generator=generator).bfloat16()
    page = make_keys(rows, torch.tensor([0, 100, 255]), 1, 256)
    pages = 2**31 // 149_760 + 8
    buffer = torch.empty(pages, 149_760, dtype=torch.uint8, device=device)
    buffer[-1, : 256 * 584] = page.view.flatten()
    view = buffer[:, : 256 * 584].unflatten(1, (256, 1, 584))
    base = (pages - 1) * 256
    q = queries(1, 16)
    got = sparse_attention(q, view, ints(base, base + 100, base + 255)[None], None, None, SCALE)
    want = sparse_attention(q, page.view, ints(0, 100, 255)[None], None, None, SCALE)
    assert all(map(torch.equal, got, want))


def test_bf16_keys(queries, choose_slots, ints, oracle, check, generator, device):
    room = torch.full((90, 520), math.nan, dtype=torch.bfloat16, device=device)
    kv = room[:80, :512]
    kv[:70] = torch.randn(70, 512, generator=generator).bfloat16()
    q, indices = queries(3, 64), choose_slots(torch.arange(70, dtype=torch.int32), 3, 140, 0.1)
    sink = torch.randn(64, generator=generator).to(device)
    lengths = ints(140, 0, 65)
    got = sparse_attention_bf16(q, kv, indices, lengths, sink, SCALE)
    check(got, oracle(q, [(kv.double(), indices, lengths)], sink, SCALE))
    other = sparse_attention_bf16(q, kv.contiguous(), indices, lengths, sink, SCALE)
    assert all(map(torch.equal, got, other))


def test_bf16_and_packed_agree_on_representable_keys(make_keys, queries, generator, ints, device):
    """One kernel body: the same values from either kind of key give the same bits."""
    rows = torch.randint(-8, 9, (70, 512), generator=generator).bfloat16()
    keys = make_keys(rows, torch.arange(70), 2, 64)
    q, indices = queries(2, 16), torch.arange(70, dtype=torch.int32, device=device).expand(2, 70)
    packed = sparse_attention(q, keys.view, indices, None, None, SCALE)
    plain = sparse_attention_bf16(q, rows.to(device), indices, None, None, SCALE)
    assert all(map(torch.equal, packed, plain))


def test_no_rows_no_keys_no_launch(random_keys, queries, device, monkeypatch, choose_slots):
    """faults.md J9."""
    main, slots = random_keys(1, 4)
    q = queries(2, 16)
    out, lse = sparse_attention(q, main.view, choose_slots(slots, 2, 0), None, None, SCALE)
    assert not out.any()
    assert bool((lse == math.inf).all())
    out, lse = sparse_attention(q, main.view[:0], choose_slots(slots, 2, 5), None, None, SCALE)
    assert not out.any()
    monkeypatch.setattr(attention, "attend", None)
    out, lse = sparse_attention(q[:0], main.view, choose_slots(slots, 0, 7), None, None, SCALE)
    assert out.shape == (0, 16, 512)
    assert lse.shape == (0, 16)
