"""Each coin is consumed once, and what two purposes share is visible."""

from __future__ import annotations

import pytest
from dsv4_reference.coin_streams import CoinLedger, CoinReusedError, Stream


def test_distinct_requests_and_steps_share_nothing():
    ledger = CoinLedger()
    for seed in (1, -1, 2**40):
        for length in (5, 6):
            ledger.consume_verify(seed, length, 4)
    assert ledger.shared() == ()
    assert len(ledger.used) == 3 * 2 * 5


def test_one_verify_twice_is_an_error():
    ledger = CoinLedger()
    ledger.consume_verify(12345, 7, 4)
    with pytest.raises(CoinReusedError, match="12345"):
        ledger.consume_verify(12345, 7, 4)


def test_two_requests_with_one_seed_at_one_length_are_an_error():
    ledger = CoinLedger()
    ledger.consume(Stream.PLAIN_SAMPLE, -42, 9, 3)
    with pytest.raises(CoinReusedError):
        ledger.consume(Stream.PLAIN_SAMPLE, 2**64 - 42, 9 + 2**32, 3)


def test_the_missing_domain_tag_shows():
    ledger = CoinLedger()
    ledger.consume_verify(7, 10, 2)
    ledger.consume(Stream.PLAIN_SAMPLE, 7, 10, 1)
    ledger.consume(Stream.PLAIN_SAMPLE, 7, 10, 3)
    assert ledger.shared() == ((7, 10, 1),)


def test_another_number_of_drafts_moves_the_final_coin_onto_a_rejection_coin():
    ledger = CoinLedger()
    ledger.consume_verify(7, 10, 4)
    ledger.consume(Stream.VERIFY_FINAL, 7, 10, 3)
    assert ledger.shared() == ((7, 10, 3),)
