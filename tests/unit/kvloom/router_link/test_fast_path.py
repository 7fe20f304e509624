"""Text that goes straight on: whoever has to go on with an answer must know all of it, and nothing comes twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from kvloom.router_link.deferred_token_log import MAX_FRAMES
from kvloom.router_link.link import GrpcRouterLink, LinkRequest
from kvloom.router_link.tracked_request import TrackedRequest
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import (
    FINISH_REASON_STOP,
    SamplingParams,
    SequenceFinish,
    SequenceStart,
    StepFrame,
    StopConditions,
)
from router.core.actions import FleetChanged
from router.core.frames import Finish, Step
from router.links.local_link import LocalRouterLink

NUM_TOKENS = 2 * MAX_FRAMES + 3


class FastPathAnswer:
    """Counts what it is told, and keeps the text in the order in which it came, whichever way."""

    def __init__(self) -> None:
        self.text = ""
        self.num_pushed = 0
        self.num_tokens = 0
        self.finish: SequenceFinish | None = None
        self.when_told: Callable[[], None] = lambda: None

    def on_start(self, index: int, start: SequenceStart) -> None: ...

    def on_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[Any]) -> None:
        self.text += delta
        self.num_tokens += len(token_ids)

    def on_finish(self, index: int, finish: SequenceFinish) -> None:
        self.finish = finish

    def fast_writer(self, index: int) -> Callable[[str], None]:
        return self.push

    def push(self, text: str) -> None:
        self.num_pushed += 1
        self.text += text

    def on_fast_path_tokens(self, index: int, token_ids: Sequence[int], num_chars: int) -> None:
        self.num_tokens += len(token_ids)
        self.when_told()


class Owner:
    def __init__(self) -> None:
        self.num_assignment_tokens: list[int] = []

    def on_lost(self, tracked: TrackedRequest) -> None:
        self.num_assignment_tokens.append(tracked.num_assignment_tokens)

    def on_over(self, tracked: TrackedRequest) -> None: ...

    def now(self) -> float:
        return 1.0


class Remote:
    """Frames of a router elsewhere."""

    def __init__(self) -> None:
        self.link = GrpcRouterLink("127.0.0.1:1", "edge")
        self.link._connected = True

    def tell(
        self, slots: Sequence[int], token_ids: Sequence[int], deltas: Sequence[str], counts: Sequence[int]
    ) -> None:
        self.link._on_step(StepFrame(slots=slots, num_tokens=counts, token_ids=token_ids, deltas=deltas))

    def finish(self, slot: int) -> None:
        self.link._on_step(StepFrame(finishes=[SequenceFinish(slot=slot, reason=FINISH_REASON_STOP)]))

    async def lose(self) -> None:
        self.link._drop_all("lost")


class NoRouter:
    """What a link inside the router's process asks of it."""

    fleet = FleetChanged(models=(), draining=False)
    core: Any

    def __init__(self) -> None:
        self.core = self

    def add_client(self, client_id: str, peer: object) -> None: ...

    def remove_client(self, client_id: str) -> None: ...

    def dispatch(self, event: object) -> None: ...

    def request_from_link(self, *_args: object) -> None: ...


class Local:
    """Steps of the router in the same process."""

    def __init__(self) -> None:
        router = cast(Any, NoRouter())
        self.link = LocalRouterLink(router, router, "edge")
        self.link._connected = True

    def tell(
        self, slots: Sequence[int], token_ids: Sequence[int], deltas: Sequence[str], counts: Sequence[int]
    ) -> None:
        self.link.send_step(Step(slots, counts, token_ids, deltas))

    def finish(self, slot: int) -> None:
        self.link.send_step(Step(finishes=[Finish(slot, FINISH_REASON_STOP)]))

    async def lose(self) -> None:
        await self.link.close()


Way = Remote | Local


@pytest.fixture(params=[Remote, Local])
def way(request: pytest.FixtureRequest) -> type[Way]:
    return request.param


def link_with(way: type[Way], num_requests: int) -> tuple[Way, list[TrackedRequest], list[FastPathAnswer], Owner]:
    """A connected link whose requests have the slots 1, 2, ..."""
    router, owner = way(), Owner()
    answers = [FastPathAnswer() for _ in range(num_requests)]
    requests: list[TrackedRequest] = []
    for number, answer in enumerate(answers):
        request = LinkRequest(f"r{number}", "m", [1, 2, 3], "", SamplingParams(), StopConditions())
        requests.append(TrackedRequest(number, request, answer, owner, b""))
        router.link.submit(request, requests[-1])
        requests[-1].on_submitted("link")
    return router, requests, answers, owner


def tell(router: Way, number: int, slots: list[int]) -> None:
    router.tell(slots, [100 * slot + number for slot in slots], [f"<{number}>"] * len(slots), [])


async def test_a_lost_router_s_answers_go_on_behind_every_token_that_flowed(way: type[Way]) -> None:
    """The next router is asked for what comes behind them; the lost one is told how many came."""
    router, requests, answers, owner = link_with(way, 2)
    for number in range(NUM_TOKENS):
        tell(router, number, [1, 2])
    await router.lose()
    assert owner.num_assignment_tokens == [NUM_TOKENS, NUM_TOKENS]
    for slot, (request, answer) in enumerate(zip(requests, answers, strict=True), 1):
        assert answer.num_pushed > NUM_TOKENS // 2
        assert answer.text == "".join(f"<{number}>" for number in range(NUM_TOKENS))
        assert request.error.reason == ErrorReason.ERROR_REASON_ROUTER_LOST
        [begun] = request.next_request().partial_choices
        assert begun.token_ids.tolist() == [100 * slot + number for number in range(NUM_TOKENS)]
        assert begun.num_chars == len(answer.text)


@pytest.mark.parametrize("is_mixed", [False, True])
async def test_a_frame_s_tokens_leave_before_answers_are_told_of_many(way: type[Way], is_mixed: bool) -> None:
    """To tell all answers takes longer than to pass a frame on: its tokens must not wait for that, not even where one
    of its slots does not flow."""
    router, _, answers, _ = link_with(way, 3)
    pushed_when_told: list[list[int]] = []
    answers[0].when_told = lambda: pushed_when_told.append([answer.num_pushed for answer in answers])
    for number in range(NUM_TOKENS):
        tell(router, number, [1, 2, 3, 99] if is_mixed else [1, 2, 3])
        if pushed_when_told:
            assert pushed_when_told.pop() == [answer.num_pushed for answer in answers], "behind all of this frame"
    assert answers[0].num_tokens > MAX_FRAMES


async def test_an_end_finds_all_tokens_counted_and_frees_the_slot(way: type[Way]) -> None:
    """A slot is used again by an answer that shares frames with those that were told nothing yet."""
    router, _, answers, owner = link_with(way, 2)
    for number in range(5):
        tell(router, number, [2, 1])
    router.finish(1)
    assert answers[0].finish is not None
    assert answers[0].num_tokens == 5
    late = FastPathAnswer()
    request = LinkRequest("late", "m", [1], "", SamplingParams(), StopConditions())
    router.link.submit(request, TrackedRequest(3, request, late, owner, b""))
    for number in range(5):
        tell(router, number, [1, 2])
    await router.lose()
    assert (answers[0].num_tokens, answers[1].num_tokens, late.num_tokens) == (5, 10, 5)


async def test_tokens_of_frames_with_several_an_entry_come_behind_those_that_flowed(way: type[Way]) -> None:
    """What piled up leaves as one frame: the order of the failover buffer must be that of the text."""
    router, requests, answers, _ = link_with(way, 1)
    for number in range(4):
        tell(router, number, [1])
    router.tell([1], [7, 8], ["ab"], [2])
    tell(router, 4, [1])
    await router.lose()
    [begun] = requests[0].next_request().partial_choices
    assert begun.token_ids.tolist() == [100, 101, 102, 103, 7, 8, 104]
    assert answers[0].text == "<0><1><2><3>ab<4>"


async def test_a_cancelled_answer_hears_no_more(way: type[Way]) -> None:
    """Its slot still has tokens in frames until the router has ended it."""
    router, _, answers, _ = link_with(way, 2)
    for number in range(3):
        tell(router, number, [1, 2])
    router.link.cancel(1)
    for number in range(3):
        tell(router, number, [1, 2])
    assert (answers[0].text, answers[0].num_tokens) == ("<0><1><2>", 3)
    assert answers[1].text == 2 * "<0><1><2>"
