"""What edges know of one another through a Redis that was replaced by an empty one."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from edge_http.recovery.journal import EdgeRecord, EdgesUnknownError, ResumeJournal

NUM_ROUNDS = 50


async def test_an_edge_that_announces_itself_takes_nobody_for_dead(redis_url: str) -> None:
    """The other edges may only not have announced themselves yet. A client that came back at that moment got the error
    that its answer was gone (chaos, seed 1: an edge woke up just when Redis had been replaced)."""
    for number in range(NUM_ROUNDS):
        asking, announcing = (ResumeJournal(redis_url, f"journal-test-{number}") for _ in range(2))
        async with contextlib.aclosing(asking.redis), contextlib.aclosing(announcing.redis):
            record = EdgeRecord(address="127.0.0.1:1")
            keeping = asyncio.create_task(announcing.keep("asks", record, ttl_seconds=60.0, max_entries=1))
            while not keeping.done():
                with pytest.raises(EdgesUnknownError):
                    await asking.find_edge("another", own_tag="asks")
            assert await keeping == (False, set())
            with pytest.raises(EdgesUnknownError):
                await asking.find_edge("another", own_tag="asks")
            assert await announcing.keep("asks", record, ttl_seconds=60.0, max_entries=1) == (True, set())
            assert await asking.find_edge("asks", own_tag="other") == record
