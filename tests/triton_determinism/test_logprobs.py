"""log_softmax on the device has the reference's bits, in any batch; the switch is read at the call."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dsv4_reference import logprobs as reference
from dsv4_triton.logprobs import INVARIANT_LOGPROBS, decode_logprobs, log_softmax, token_logprobs


def draw(generator, rows, columns):
    return torch.from_numpy((4 * generator.normal(size=(rows, columns))).astype(np.float32))


def bits(tensor):
    return tensor.cpu().numpy().view(np.uint32)


def differing(logits, got, temperature=None):
    """Elements whose bits are not the reference's."""
    want = reference.log_softmax_bits(logits.float().numpy(), None if temperature is None else temperature.numpy())
    return int((bits(got) != want.view(np.uint32)).sum())


@pytest.mark.parametrize("columns", [1, 30, 1024, 1025, 3000])
def test_bits_equal_the_reference(generator, device, columns):
    logits = draw(generator, 6, columns)
    assert differing(logits, log_softmax(logits.to(device))) == 0
    temperature = torch.tensor([1.0, 0.7, 0.3, 1.0, 0.7, 2.0])
    assert differing(logits, log_softmax(logits.to(device), temperature.to(device)), temperature) == 0


def test_full_vocabulary(generator, device):
    logits = draw(generator, 2, 129_280)
    assert differing(logits, log_softmax(logits.to(device))) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_widened_first(generator, device, dtype):
    logits = draw(generator, 3, 500).to(dtype)
    assert differing(logits, log_softmax(logits.to(device))) == 0


def test_decode_has_the_bits_of_prefill(generator, device):
    """One row at a time, as decode computes it, against all rows at once, at both temperatures."""
    lengths = [1, 63, 64, 65, 96, 97, 127, 128, 129] + ([513] if device == "cuda" else [])
    logits = draw(generator, max(lengths), 70).to(device)
    for value in (1.0, 0.7):
        temperature = torch.full((len(logits),), value, device=device)
        prefill = log_softmax(logits, temperature)
        for length in lengths:
            row = slice(length - 1, length)
            decode = decode_logprobs(logits[row], temperature[row])
            assert np.array_equal(bits(decode), bits(prefill[row]))


def test_log_of_softmax_would_not(generator, device):
    logits = draw(generator, 8, 2000).to(device)
    mutant = torch.softmax(logits, dim=1).log()
    assert (bits(mutant) != bits(log_softmax(logits))).any()
    far = torch.zeros(1, 8, device=device)
    far[0, 2] = -200
    assert torch.softmax(far, dim=1).log()[0, 2] == -torch.inf
    assert torch.isfinite(log_softmax(far)).all()


def test_other_padding_of_the_vocabulary(generator, device):
    wide = draw(generator, 4, 1300).to(device)
    strided = log_softmax(wide[:, :1200])
    assert np.array_equal(bits(strided), bits(log_softmax(wide[:, :1200].contiguous())))
    masked = wide.clone()
    masked[:, 1200:] = -torch.inf
    assert np.array_equal(bits(log_softmax(masked)[:, :1200]), bits(strided))
    assert not np.array_equal(bits(log_softmax(wide)[:, :1200]), bits(strided))


def test_masks_and_poison(generator, device):
    logits = draw(generator, 5, 1100)
    logits[0, ::2] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 1050] = torch.nan
    logits[3, 3] = torch.inf
    got = log_softmax(logits.to(device)).cpu()
    assert differing(logits[[0, 1, 4]], got[[0, 1, 4]]) == 0
    assert (got[0, ::2] == -torch.inf).all()
    assert (got[1] == -torch.inf).all()
    assert got[2].isnan().all()
    assert got[3].isnan().all()


def test_one_token_has_the_bits_of_its_column(generator, device):
    logits = draw(generator, 6, 1500).to(device)
    temperature = torch.tensor([1.0, 0.7, 0.3, 1.0, 0.7, 2.0], device=device)
    tokens = torch.tensor([0, 1499, 1024, 7, -1, 1500], device=device)
    got = token_logprobs(logits, tokens, temperature)
    full = log_softmax(logits, temperature)
    assert np.array_equal(bits(got[:4]), bits(full[range(4), tokens[:4].tolist()]))
    assert (got[4:] == -torch.inf).all()


def test_switch(generator, device, monkeypatch):
    logits, temperature = draw(generator, 2, 600).to(device), torch.ones(2, device=device)
    invariant = log_softmax(logits, temperature)

    def fused(*_, **__):
        raise AssertionError("the fused path ran")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "softmax", fused)
        patch.delenv(INVARIANT_LOGPROBS, raising=False)
        assert np.array_equal(bits(decode_logprobs(logits, temperature)), bits(invariant))
        patch.setenv(INVARIANT_LOGPROBS, "1")
        assert np.array_equal(bits(decode_logprobs(logits, temperature)), bits(invariant))
        patch.setenv(INVARIANT_LOGPROBS, "0")  # read at the call: this module was imported long before
        with pytest.raises(AssertionError, match="fused"):
            decode_logprobs(logits, temperature)
    for value in ("", "true"):
        monkeypatch.setenv(INVARIANT_LOGPROBS, value)
        with pytest.raises(ValueError, match="0 or 1"):
            decode_logprobs(logits, temperature)


def test_wrong_arguments_are_named(device):
    logits = torch.zeros(2, 8, device=device)
    with pytest.raises(ValueError, match=r"logits are torch\.float64"):
        log_softmax(logits.double())
    with pytest.raises(ValueError, match="contiguous columns"):
        log_softmax(torch.zeros(8, 2, device=device).t())
    with pytest.raises(ValueError, match="temperature"):
        log_softmax(logits, torch.ones(3, device=device))
    with pytest.raises(ValueError, match="out is not"):
        log_softmax(logits, out=torch.zeros(2, 9, device=device))
    with pytest.raises(ValueError, match="tokens"):
        token_logprobs(logits, torch.zeros(3, dtype=torch.int64, device=device))
    assert log_softmax(logits[:0]).shape == (0, 8)
