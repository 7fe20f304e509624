"""Ids cannot be guessed and do not repeat, although many are drawn at once."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor

from kvloom.process.random_bytes import CHUNK_BYTES, random_hex, random_uint64


def test_ids_differ_across_refills_and_threads() -> None:
    """Bytes that are handed out twice would give two requests the same name."""
    count = 3 * CHUNK_BYTES // 8
    with ThreadPoolExecutor(4) as threads:
        drawn = [one for part in threads.map(lambda _: [random_hex(8) for _ in range(count)], range(4)) for one in part]
    assert len(set(drawn)) == 4 * count
    assert {len(one) for one in drawn} == {16}
    assert len({random_uint64() for _ in range(count)}) == count
    assert len(random_hex(CHUNK_BYTES + 1)) == 2 * CHUNK_BYTES + 2


def test_a_forked_process_draws_its_own() -> None:
    """Otherwise a parent and its child would draw the same names."""
    random_hex(8)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads that may be there: the child uses none
        pid = os.fork()
    if not pid:
        os.write(writer, random_hex(16).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 64).decode() != random_hex(16)
    os.close(reader)
    os.close(writer)
