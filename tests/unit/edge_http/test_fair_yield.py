"""Long bodies are handled one in each turn of the event loop: tokens of streams are sent in between."""

from __future__ import annotations

import asyncio

from edge_http.wire.fair_yield import LONG_BODY_BYTES, FairYield


async def turns_of(turns: FairYield, sizes: list[int]) -> list[int]:
    """Returns the turn of the loop in which each body of these sizes was admitted, if all arrive in the same turn."""
    loop = asyncio.get_running_loop()
    turn = 0

    def count() -> None:
        nonlocal turn
        turn += 1
        counter.append(loop.call_soon(count))

    counter = [loop.call_soon(count)]

    async def one(size: int) -> int:
        await turns.take(size)
        return turn

    try:
        async with asyncio.timeout(10):
            return await asyncio.gather(*(one(size) for size in sizes))
    finally:
        counter[-1].cancel()


async def test_long_bodies_have_a_turn_each():
    """Several clients' long prompts at the same time would hold up every other stream for as long as all take."""
    found = await turns_of(FairYield(), [LONG_BODY_BYTES] * 5)
    assert found == sorted(found)
    assert len(set(found)) == 5


async def test_short_bodies_wait_for_nobody():
    """A chat message takes less time than a turn."""
    found = await turns_of(FairYield(), [LONG_BODY_BYTES] * 3 + [LONG_BODY_BYTES - 1] * 3)
    assert found[3:] == [found[0]] * 3


async def test_who_goes_away_keeps_nobody_waiting():
    """A client that hangs up while it waits is passed over; after it all is as before."""
    turns = FairYield()
    first, gone, last = (asyncio.create_task(turns.take(LONG_BODY_BYTES)) for _ in range(3))
    await asyncio.sleep(0)
    gone.cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(first, last)
        assert (await asyncio.gather(gone, return_exceptions=True))[0].__class__ is asyncio.CancelledError
        await turns.take(LONG_BODY_BYTES)
