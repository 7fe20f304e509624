"""Requests that are being received do not add up to any number of bytes, and slow senders take no place from others."""

from __future__ import annotations

from router.rpc.receipts import GRACE_SECONDS, Receipts

OLD = 10 * GRACE_SECONDS


def test_the_slowest_of_the_largest_caller_gives_way() -> None:
    """A sender that holds many places by sending nothing must not keep others from sending."""
    receipts, ended = Receipts(3), []
    receipts.begin("one", 0.0, lambda: ended.append("one"))
    for name in ("first", "second"):
        receipts.begin("attacker", 0.1, lambda name=name: ended.append(name))
    receipts.begin("two", OLD, lambda: ended.append("two"))
    assert ended == ["first"]
    assert receipts.num_receipts == 3


def test_fast_senders_are_never_ended() -> None:
    """A hundred small requests that arrive at once have arrived before anything needs to give way."""
    receipts, ended = Receipts(2), []
    begun = [receipts.begin("one", 0.0, lambda: ended.append(1)) for _ in range(100)]
    for receipt in begun:
        receipts.finish(receipt)
    assert not ended
    assert receipts.num_receipts == 0


def test_short_memory_ends_all_that_take_long() -> None:
    """What is being received is the only memory whose size is not known yet."""
    receipts, ended = Receipts(100), []
    old = receipts.begin("one", 0.0, lambda: ended.append("old"))
    new = receipts.begin("one", OLD, lambda: ended.append("new"))
    receipts.end_old(OLD)
    assert ended == ["old"]
    receipts.finish(old)
    receipts.finish(new)
    assert receipts.num_receipts == 0
