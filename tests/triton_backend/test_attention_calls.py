"""What the attention call is given, and that another kernel can take its place in a few lines."""

from __future__ import annotations

import pytest
import torch
from dsv4_triton.beyond_lengths import with_keys_beyond


def torch_attend(scale):
    """FlashMLA's call in plain torch over the packed bytes: the shape of a kernel author's function."""
    from dsv4_reference.codec import dequantise

    def gather(cache, indices, lengths):
        pages, entries = cache.shape[:2]
        flat = torch.as_strided(cache, (pages, entries * 584), (cache.stride(0), 1)).cpu()
        column = torch.arange(indices.shape[-1])
        valid = (column < lengths[:, None].cpu()) & (indices[:, 0].cpu() >= 0)
        slot = indices[:, 0].cpu().clamp(min=0).long()
        page, entry = slot // entries, slot % entries
        data = flat[page[..., None], entry[..., None] * 576 + torch.arange(576)]
        scales = flat[page[..., None], entries * 576 + entry[..., None] * 8 + torch.arange(7)]
        nope = dequantise(data[..., :448].reshape(-1, 448), scales.reshape(-1, 7)).reshape(*slot.shape, 448)
        rope = data[..., 448:].contiguous().view(torch.bfloat16)
        keys = torch.cat([nope.double(), rope.double()], dim=-1)
        return torch.where(valid[..., None], keys, 0.0), valid

    def attend(q, k_cache, indices, topk_length, attn_sink, extra_k_cache=None, extra_indices=None, extra_len=None):
        keys, valid = gather(k_cache, indices, topk_length)
        if extra_k_cache is not None:
            more, also = gather(extra_k_cache, extra_indices, extra_len)
            keys, valid = torch.cat([keys, more], 1), torch.cat([valid, also], 1)
        score = torch.einsum("thd,tnd->thn", q[:, 0].double().cpu(), keys) * scale
        score = score.masked_fill(~valid[:, None], float("-inf"))
        lse = score.logsumexp(-1)
        total = torch.logaddexp(lse, attn_sink.double().cpu()[None])
        out = torch.einsum("thn,tnd->thd", (score - total[..., None]).exp(), keys)
        return out[:, None].bfloat16().to(q.device), lse[..., None].float().to(q.device)

    return attend


@pytest.fixture
def filled(make_world, backend_class, draw, device):
    """One decode step through a backend of a class, over pools that are NaN where nothing was written."""

    def run(cls, ratio, **settings):
        world = make_world([400, 400], **settings)
        backend = cls(world.runner)
        for buffer in backend.kv_buffers().values():
            buffer.fill_(0xFF)
        generator = torch.Generator().manual_seed(3)

        def numbers(*shape):
            return torch.randn(*shape, generator=generator).bfloat16().to(device)

        for request in range(2):
            backend.set_key_buffer(world.int64(world.table[request, :380]), numbers(380, 512))
            if ratio:
                ends = world.table[request, ratio - 1 : 380 : ratio]
                backend.set_extra_key_buffer(ratio, world.int64(ends), numbers(len(ends), 512))
        batch, _ = world.batch("decode", [379, 255])
        backend.init_forward_metadata(batch)
        if ratio == 4:
            raw = torch.arange(512, dtype=torch.int32, device=device).flip(0).expand(2, 512)
            backend.write_c4_selection(torch.where(raw < 95, raw, -1).sort(-1, descending=True).values)
        return backend, batch, backend.forward(numbers(2, 16, 512), batch, ratio, numbers(16).float())

    return run


@pytest.mark.parametrize("swa_page_size", [128, 256])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_another_kernel_over_our_pools_and_metadata(filled, backend_class, ratio, swa_page_size):
    plain = torch_attend(512**-0.5)

    class Plain(backend_class):
        def attend(self, *args):
            return plain(*args)

    _, _, (out, lse) = filled(backend_class, ratio, swa_page_size=swa_page_size)
    _, _, (want, want_lse) = filled(Plain, ratio, swa_page_size=swa_page_size)
    assert torch.isfinite(want).all()
    torch.testing.assert_close(out, want, atol=2**-8, rtol=2**-7)
    torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_shapes_and_widths_of_the_call(filled, backend_class, ratio):
    seen = []

    class Recording(backend_class):
        def attend(self, *args):
            seen.append(args)
            return super().attend(*args)

    filled(Recording, ratio)
    q, k_cache, indices, lengths, sink, *extra = seen[0]
    assert q.shape == (2, 1, 16, 512)
    assert k_cache.shape[1:] == (256, 1, 584)
    assert indices.shape == (2, 1, 128)
    assert lengths.tolist() == [128, 128]
    assert sink.shape == (16,)
    assert bool(extra) == (ratio != 0)
    if extra:
        cache, extra_indices, extra_lengths = extra
        assert cache.shape[1:] == (256 // ratio, 1, 584)
        assert extra_indices.shape[-1] % 64 == 0
        assert extra_lengths.tolist() == {4: [95, 64], 128: [2, 2]}[ratio]
    for tensor in (indices, lengths, *extra[1:]):
        assert tensor.dtype == torch.int32


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_keys_past_the_lengths_change_no_bit(filled, backend_class, ratio):
    seen = []

    class Recording(backend_class):
        def attend(self, *args):
            seen.append(args)
            return super().attend(*args)

    class Beyond(Recording):
        def __init__(self, *args):
            super().__init__(*args)
            self.put_keys_beyond_lengths()

    _, _, (want, want_lse) = filled(Recording, ratio)
    _, _, (out, lse) = filled(Beyond, ratio)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    usual, given = seen
    for at in (2, 6)[: 1 + bool(ratio)]:
        assert torch.equal(usual[at + 1], given[at + 1])
        for row, plain, length in zip(given[at][:, 0], usual[at][:, 0], given[at + 1].tolist(), strict=True):
            assert torch.equal(row[:length], plain[:length])
            assert torch.equal(row[length + 1 :: 2], plain[length + 1 :: 2])
            assert set(row[length::2].tolist()) <= {int(plain.max())}
            assert int(plain.max()) > 0


def test_a_row_without_keys_has_none_past_its_length():
    indices = torch.tensor([[[-1, -1, -1, -1]], [[7, 8, -1, -1]], [[7, 8, 9, 5]], [[3, -1, -1, -1]]], dtype=torch.int32)
    lengths = torch.tensor([-1, 2, 4, 1], dtype=torch.int32)
    want = [[-1, -1, -1, -1], [7, 8, 8, -1], [7, 8, 9, 5], [3, 3, -1, 3]]  # the highest slot, in every second column
    found = with_keys_beyond(indices, lengths)
    assert found[:, 0].tolist() == want
    assert found.dtype == torch.int32
    assert indices[1, 0].tolist() == [7, 8, -1, -1]  # the metadata itself is left alone


def test_rows_of_q_beyond_or_short_of_the_metadata(filled, backend_class, draw):
    """q padded by data parallelism: pad rows read the dummy slot, one key; a shorter q reads its own rows."""
    seen = []

    class Recording(backend_class):
        def attend(self, q, *args):
            seen.append(args)
            return super().attend(q, *args)

    backend, batch, (out, _) = filled(Recording, 4)
    sink = torch.zeros(16, device=out.device)
    wide, _ = backend.forward(draw(5, 16, 512), batch, 4, sink)
    assert wide.shape == (5, 16, 512)
    _, indices, lengths, _, _, extra_indices, extra_lengths = seen[-1]
    assert indices[2:].unique().tolist() == [0]
    assert lengths[2:].tolist() == [1, 1, 1]
    assert extra_indices[2:].unique().tolist() == [-1]
    assert extra_lengths[2:].tolist() == [1, 1, 1]
    q = draw(2, 16, 512)
    both, _ = backend.forward(q, batch, 4, sink)
    one, _ = backend.forward(q[:1], batch, 4, sink)
    assert torch.equal(one, both[:1])


def test_q_of_any_row_stride(filled, backend_class, draw):
    backend, batch, _ = filled(backend_class, 128)
    sink = draw(16, dtype=torch.float32)
    wide = draw(2, 20, 576)
    strided = wide[:, 2:18, :512]
    out, lse = backend.forward(strided, batch, 128, sink)
    want, want_lse = backend.forward(strided.contiguous(), batch, 128, sink)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
