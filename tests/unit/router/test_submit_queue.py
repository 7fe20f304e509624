"""A client's submits and cancels are processed in order, with one long prompt per turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvloom.errors import KvloomError, protocol_violation
from kvloom.v1.router_service_pb2 import RouterServiceConnectRequest, Submit
from router.links.submit_queue import LONG_PROMPT_TOKENS, MAX_WAITING, SubmitQueue
from tests.fakes.link_requests import make_submit

FAULTY = "faulty"


class Client:
    def __init__(self) -> None:
        self.taken: list[str] = []
        self.faults: list[KvloomError] = []
        self.num_empty = 0
        self.queue = SubmitQueue(self._submit, self._cancel, self.faults.append, self._count)

    def _submit(self, submit: Submit) -> None:
        if submit.request.request_id == FAULTY:
            raise protocol_violation("It is faulty.")
        self.taken.append(submit.request.request_id)

    def _cancel(self, slots: Sequence[int]) -> None:
        self.taken.append(f"cancel {list(slots)}")

    def _count(self) -> None:
        self.num_empty += 1

    async def taken_by_turn(self) -> list[list[str]]:
        """Returns what each further turn processes, until the queue is empty."""
        turns: list[list[str]] = []
        for _ in range(2 * MAX_WAITING):
            if not self.queue:
                return turns
            before = len(self.taken)
            await asyncio.sleep(0)
            turns.append(self.taken[before:])
        raise AssertionError("the queue never becomes empty")


def long(name: str) -> Submit:
    return make_submit(request_id=name, packed_prompt_token_ids=bytes(4 * LONG_PROMPT_TOKENS))


def short(name: str) -> Submit:
    return make_submit(request_id=name, prompt_token_ids=[1, 2, 3])


def frame(*submits: Submit, cancels: Sequence[int] = ()) -> RouterServiceConnectRequest:
    return RouterServiceConnectRequest(submits=submits, cancel_slots=cancels)


async def test_long_prompts_have_a_turn_each_and_nothing_overtakes_them():
    """A cancel that overtook its submit would have no effect, and the request would run to its end."""
    client = Client()
    client.queue.add(frame(long("a"), long("b"), short("c"), long("d")))
    assert client.taken == ["a"]
    client.queue.add(frame(short("e"), cancels=[7]))
    assert await client.taken_by_turn() == [["b"], ["c", "d"], ["e", "cancel [7]"]]
    assert (client.num_empty, client.faults) == (1, [])


async def test_frames_that_come_together_share_a_turn():
    """One read from the socket may return several frames. A long prompt in each would delay other clients' tokens as
    much as one frame with all of them would."""
    client = Client()
    for name in "abc":
        client.queue.add(frame(long(name)))
    client.queue.add(frame(cancels=[7]))
    assert client.taken == ["a"]
    assert await client.taken_by_turn() == [["b"], ["c"], ["cancel [7]"]]
    assert (client.num_empty, client.faults) == (1, [])


async def test_short_prompts_are_taken_at_once():
    """Waiting for a turn would only add to their latency."""
    client = Client()
    client.queue.add(frame(*(short(str(i)) for i in range(9)), cancels=[1, 2]))
    assert client.taken == [*map(str, range(9)), "cancel [1, 2]"]


async def test_a_client_cannot_make_the_router_keep_what_it_sends():
    """Entries beyond the limit are processed at once, so that the socket makes the client wait."""
    client = Client()
    client.queue.add(frame(*(long("x") for _ in range(MAX_WAITING + 10))))
    assert len(client.queue) == MAX_WAITING
    client.queue.add(frame(*(long("y") for _ in range(5))))
    assert len(client.queue) <= MAX_WAITING


async def test_a_fault_that_shows_later_ends_the_stream_too():
    """No caller awaits what a later turn processes, but its error must reach the stream all the same."""
    client = Client()
    with pytest.raises(KvloomError):
        client.queue.add(frame(short(FAULTY)))
    client.queue.clear()
    client.queue.add(frame(long("a"), long(FAULTY), short("b")))
    await client.taken_by_turn()
    assert [error.message for error in client.faults] == ["It is faulty."]
    assert (client.taken, client.num_empty) == (["a"], 0)
