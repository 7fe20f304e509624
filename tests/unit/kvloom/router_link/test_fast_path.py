"""Text on the fast path: a router that continues an answer must know all of it, and no token is delivered twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from kvloom.router_link.deferred_token_log import MAX_FRAMES
from kvloom.router_link.link import GrpcRouterLink
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
from tests.fakes.link_requests import link_request

NUM_TOKENS = 2 * MAX_FRAMES + 3


class FastPathAnswer:
    """Counts the tokens that are reported to it, and keeps the text in the order of arrival, on either path."""

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
    """The frames of a router in another process."""

    def __init__(self) -> None:
        self.link = GrpcRouterLink("127.0.0.1:1", "edge")
        self.link._connected = True

    def send(
        self, slots: Sequence[int], token_ids: Sequence[int], deltas: Sequence[str], counts: Sequence[int]
    ) -> None:
        self.link._on_step(StepFrame(slots=slots, num_tokens=counts, token_ids=token_ids, deltas=deltas))

    def finish(self, slot: int) -> None:
        self.link._on_step(StepFrame(finishes=[SequenceFinish(slot=slot, reason=FINISH_REASON_STOP)]))

    async def lose(self) -> None:
        self.link._drop_all("lost")


class NoRouter:
    """What a link in the router's own process needs of the router."""

    fleet = FleetChanged(models=(), draining=False)
    core: Any

    def __init__(self) -> None:
        self.core = self

    def add_client(self, client_id: str, peer: object) -> None: ...

    def remove_client(self, client_id: str) -> None: ...

    def dispatch(self, event: object) -> None: ...

    def request_from_link(self, *_args: object) -> None: ...


class Local:
    """The steps of a router in the same process."""

    def __init__(self) -> None:
        router = cast(Any, NoRouter())
        self.link = LocalRouterLink(router, router, "edge")
        self.link._connected = True

    def send(
        self, slots: Sequence[int], token_ids: Sequence[int], deltas: Sequence[str], counts: Sequence[int]
    ) -> None:
        self.link.send_step(Step(slots, counts, token_ids, deltas))

    def finish(self, slot: int) -> None:
        self.link.send_step(Step(finishes=[Finish(slot, FINISH_REASON_STOP)]))

    async def lose(self) -> None:
        await self.link.close()


LinkDriver = Remote | Local


@pytest.fixture(params=[Remote, Local])
def driver_type(request: pytest.FixtureRequest) -> type[LinkDriver]:
    return request.param


def link_with(
    driver_type: type[LinkDriver], num_requests: int
) -> tuple[LinkDriver, list[TrackedRequest], list[FastPathAnswer], Owner]:
    """A connected link whose requests have the slots 1, 2, ..."""
    router, owner = driver_type(), Owner()
    answers = [FastPathAnswer() for _ in range(num_requests)]
    requests: list[TrackedRequest] = []
    for number, answer in enumerate(answers):
        request = link_request(f"r{number}", "m", [1, 2, 3], "", SamplingParams(), StopConditions())
        requests.append(TrackedRequest(number, request, answer, owner, b""))
        router.link.submit(request, requests[-1])
        requests[-1].on_submitted("link")
    return router, requests, answers, owner


def send(router: LinkDriver, number: int, slots: list[int]) -> None:
    router.send(slots, [100 * slot + number for slot in slots], [f"<{number}>"] * len(slots), [])


async def test_a_lost_router_s_answers_continue_after_every_forwarded_token(driver_type: type[LinkDriver]) -> None:
    """The next router is asked to continue after these tokens, and their number is reported to the lost one."""
    router, requests, answers, owner = link_with(driver_type, 2)
    for number in range(NUM_TOKENS):
        send(router, number, [1, 2])
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
async def test_a_frame_s_tokens_leave_before_answers_get_their_reports(
    driver_type: type[LinkDriver], is_mixed: bool
) -> None:
    """Reporting to all answers takes longer than forwarding a frame. Its tokens must not wait for that, even if one of
    its slots is not on the fast path."""
    router, _, answers, _ = link_with(driver_type, 3)
    pushed_when_told: list[list[int]] = []
    answers[0].when_told = lambda: pushed_when_told.append([answer.num_pushed for answer in answers])
    for number in range(NUM_TOKENS):
        send(router, number, [1, 2, 3, 99] if is_mixed else [1, 2, 3])
        if pushed_when_told:
            assert pushed_when_told.pop() == [answer.num_pushed for answer in answers], "behind all of this frame"
    assert answers[0].num_tokens > MAX_FRAMES


async def test_an_end_finds_all_tokens_counted_and_frees_the_slot(driver_type: type[LinkDriver]) -> None:
    """A slot is reused by an answer that shares frames with answers that have had no report yet."""
    router, _, answers, owner = link_with(driver_type, 2)
    for number in range(5):
        send(router, number, [2, 1])
    router.finish(1)
    assert answers[0].finish is not None
    assert answers[0].num_tokens == 5
    late = FastPathAnswer()
    request = link_request("late", "m", [1], "", SamplingParams(), StopConditions())
    router.link.submit(request, TrackedRequest(3, request, late, owner, b""))
    for number in range(5):
        send(router, number, [1, 2])
    await router.lose()
    assert (answers[0].num_tokens, answers[1].num_tokens, late.num_tokens) == (5, 10, 5)


async def test_tokens_of_frames_with_several_an_entry_come_after_those_forwarded(driver_type: type[LinkDriver]) -> None:
    """Pending tokens are sent as one frame. The failover buffer must have the order of the text."""
    router, requests, answers, _ = link_with(driver_type, 1)
    for number in range(4):
        send(router, number, [1])
    router.send([1], [7, 8], ["ab"], [2])
    send(router, 4, [1])
    await router.lose()
    [begun] = requests[0].next_request().partial_choices
    assert begun.token_ids.tolist() == [100, 101, 102, 103, 7, 8, 104]
    assert answers[0].text == "<0><1><2><3>ab<4>"


async def test_a_cancelled_answer_gets_no_more(driver_type: type[LinkDriver]) -> None:
    """A cancelled slot still has tokens in frames until the router has ended it."""
    router, _, answers, _ = link_with(driver_type, 2)
    for number in range(3):
        send(router, number, [1, 2])
    router.link.cancel(1)
    for number in range(3):
        send(router, number, [1, 2])
    assert (answers[0].text, answers[0].num_tokens) == ("<0><1><2>", 3)
    assert answers[1].text == 2 * "<0><1><2>"
