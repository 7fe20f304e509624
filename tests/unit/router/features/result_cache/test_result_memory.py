"""The answers that one router keeps: how many, how large, how long."""

from __future__ import annotations

import random

from router.features.result_cache.cache import ENTRY_BYTES, ResultMemory

FAR = 1e9


def test_the_least_recently_used_go_first() -> None:
    """An answer that is asked for again and again must outlive those that are not."""
    memory = ResultMemory(max_bytes=2**20, max_entries=3)
    for name in (b"a", b"b", b"c"):
        memory.put(name, b"x", "t", FAR)
    assert memory.get(b"a", 0.0) == b"x"
    memory.put(b"d", b"x", "t", FAR)
    assert [name for name in (b"a", b"b", b"c", b"d") if memory.get(name, 0.0)] == [b"a", b"c", b"d"]
    assert memory.num_evicted == 1


def test_an_answer_expires() -> None:
    """TTL is a promise: data that a tenant has deleted elsewhere is gone here after it."""
    memory = ResultMemory(max_bytes=2**20, max_entries=3)
    memory.put(b"a", b"x", "t", 10.0)
    assert memory.get(b"a", 9.9) == b"x"
    assert memory.get(b"a", 10.0) is None
    assert (len(memory), memory.num_bytes) == (0, 0)


def test_its_size_is_exact_whatever_happens() -> None:
    """A bound in bytes holds only if the count never drifts."""
    rng = random.Random(7)
    memory = ResultMemory(max_bytes=20_000, max_entries=30)
    kept: dict[bytes, bytes] = {}
    for _ in range(3000):
        key = b"%d" % rng.randrange(60)
        if rng.random() < 0.7:
            kept[key] = rng.randbytes(rng.randrange(900))
            memory.put(key, kept[key], f"t{rng.randrange(3)}", FAR)
        elif rng.random() < 0.1:
            memory.clear({f"t{rng.randrange(3)}"})
        else:
            memory.drop(key)
        found = [answer for name in kept if (answer := memory.get(name, 0.0)) is not None]
        assert memory.num_bytes == sum(len(answer) + ENTRY_BYTES for answer in found) <= 20_000
        assert len(found) == len(memory) <= 30
        assert all(memory.get(name, 0.0) in (None, answer) for name, answer in kept.items())


def test_too_large_an_answer_evicts_nothing() -> None:
    """One request must not empty the cache of all."""
    memory = ResultMemory(max_bytes=2000, max_entries=30)
    memory.put(b"a", b"x", "t", FAR)
    memory.put(b"b", b"x" * 2000, "t", FAR)
    assert memory.get(b"a", 0.0) == b"x"
    assert memory.get(b"b", 0.0) is None


def test_clearing_one_tenant() -> None:
    """What is cleared for one must stay for the others."""
    memory = ResultMemory(max_bytes=2**20, max_entries=30)
    for number in range(6):
        memory.put(b"%d" % number, b"x", f"t{number % 2}", FAR)
    assert memory.clear({"t0"}) == 3
    assert len(memory) == 3
    assert memory.clear(None) == 3
    assert memory.num_bytes == 0
