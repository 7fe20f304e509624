"""The contract of every `RouterLink` implementation. test_router_links.py runs it; adding a link is one class there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import pytest

from kvloom.errors import KvloomError
from kvloom.router_link.link import ChoiceProgress, RouterLink
from kvloom.v1 import generation_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from tests.fakes.fake_shard import expected_text, expected_tokens, token_text
from tests.fakes.router_world import MODEL, Answer, link_request
from tests.waiting import eventually

LENGTH = generation_pb2.FINISH_REASON_LENGTH
_NOT_SERVED = (ErrorReason.ERROR_REASON_MODEL_NOT_FOUND, ErrorReason.ERROR_REASON_NO_SHARD_READY)
"""The model is unknown, or it is known and its last shard was lost."""


class LinkRig(Protocol):
    """A connected link to a router whose shards answer as in tests/fakes/fake_shard.py."""

    @property
    def link(self) -> RouterLink: ...

    def hold(self) -> None:
        """The shards make no more steps until `go_on`."""
        ...

    def go_on(self) -> None: ...

    @property
    def num_running(self) -> int:
        """How many sequences the shards are working on."""
        ...

    async def add_model(self, name: str) -> None:
        """From now on a shard serves this model, too."""
        ...

    async def remove_model(self, name: str) -> None:
        """The shard of a model that was added stops."""
        ...


class RaisingSink(Answer):
    def on_tokens(self, *_: object) -> None:
        raise RuntimeError("a bug in a sink")


class CancellingSink(Answer):
    """Cancels a request, which may be its own, when its first tokens arrive."""

    def __init__(self, link: RouterLink, n: int = 1) -> None:
        super().__init__(n)
        self._link = link
        self.victim = 0

    def on_tokens(
        self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[generation_pb2.TokenLogprobs]
    ) -> None:
        super().on_tokens(index, delta, token_ids, logprobs)
        self._link.cancel(self.victim)


class RouterLinkSuite:
    """A subclass implements `open_rig`."""

    def open_rig(self, request: pytest.FixtureRequest) -> AbstractAsyncContextManager[LinkRig]:
        raise NotImplementedError

    @pytest.fixture
    async def rig(self, request: pytest.FixtureRequest) -> AsyncIterator[LinkRig]:
        async with self.open_rig(request) as rig:
            yield rig

    async def test_each_choice_hears_its_start_its_tokens_and_its_end(self, rig: LinkRig) -> None:
        """The finish has the counts of the tokens that the sink received."""
        answer = Answer(3)
        rig.link.submit(link_request([5, 6], 8, request_id="a", n=3), answer)
        await eventually(lambda: answer.done, "the end")
        for index in range(3):
            assert answer.token_ids[index] == expected_tokens([5, 6], index, 8)
            assert answer.texts[index] == expected_text([5, 6], index, 8)
            assert answer.starts[index] is not None
            finish = answer.finishes[index]
            assert finish is not None
            assert (finish.reason, finish.num_prompt_tokens, finish.num_output_tokens) == (LENGTH, 2, 8)

    async def test_many_requests_at_once_are_kept_apart(self, rig: LinkRig) -> None:
        """Repeats requests, so that their slots and handles are reused."""
        for turn in range(3):
            answers = [Answer() for _ in range(40)]
            for i, answer in enumerate(answers):
                rig.link.submit(link_request([i, turn], 4, request_id=f"{turn}-{i}"), answer)
            await eventually(lambda: all(answer.done for answer in answers), "all ends")  # noqa: B023
            for i, answer in enumerate(answers):
                assert answer.token_ids == [expected_tokens([i, turn], 0, 4)]

    async def test_a_request_continues_after_the_tokens_delivered(self, rig: LinkRig) -> None:
        """Only the wanted choices are delivered, by their indexes; given tokens count as output."""
        begun = ChoiceProgress(1)
        begun.token_ids.extend(expected_tokens([7], 1, 3))
        begun.num_chars = len("".join(map(token_text, begun.token_ids)))
        answer = Answer(2)
        rig.link.submit(link_request([7], 8, request_id="a", n=2, partial_choices=[begun]), answer)
        await eventually(lambda: answer.finishes[1], "the end")
        assert answer.token_ids == [[], expected_tokens([7], 1, 8)[3:]]
        assert answer.finishes[0] is None
        assert answer.finishes[1] is not None
        assert answer.finishes[1].num_output_tokens == 8

    async def test_a_cancelled_sink_hears_no_more(self, rig: LinkRig) -> None:
        """Its generation stops as well. Handles that are unknown or were used before are ignored."""
        answer, other = Answer(2), Answer()
        handle = rig.link.submit(link_request([1], 1000, request_id="a", n=2), answer)
        await eventually(lambda: all(answer.token_ids), "tokens")
        rig.link.cancel(handle)
        num_tokens = sum(map(len, answer.token_ids))
        rig.link.cancel(handle)
        rig.link.cancel(123_456)
        await eventually(lambda: not rig.num_running, "the engine's end")
        rig.link.submit(link_request([2], 8, request_id="b"), other)
        await eventually(lambda: other.done, "the other one's end")
        assert not any(answer.finishes)
        assert sum(map(len, answer.token_ids)) == num_tokens

    async def test_a_sink_may_cancel_from_within(self, rig: LinkRig) -> None:
        """A sink may cancel its own request and others."""
        self_ending, other_ending, victim = CancellingSink(rig.link, 2), CancellingSink(rig.link), Answer()
        rig.hold()
        self_ending.victim = rig.link.submit(link_request([1], 1000, request_id="a", n=2), self_ending)
        other_ending.victim = rig.link.submit(link_request([2], 1000, request_id="b"), victim)
        rig.link.submit(link_request([3], 8, request_id="c"), other_ending)
        rig.go_on()
        await eventually(lambda: other_ending.done, "the end of the request that continues")
        await eventually(lambda: not rig.num_running, "the engine's end")
        assert not any((*self_ending.finishes, *victim.finishes))
        assert other_ending.token_ids == [expected_tokens([3], 0, 8)]

    async def test_a_sink_that_raises_ends_only_its_own_request(self, rig: LinkRig) -> None:
        """One request's bug must not fail all answers."""
        bad, good = RaisingSink(), Answer()
        rig.link.submit(link_request([1], 1000, request_id="a"), bad)
        rig.link.submit(link_request([2], 8, request_id="b"), good)
        await eventually(lambda: good.done, "the good one's end")
        assert good.token_ids == [expected_tokens([2], 0, 8)]
        await eventually(lambda: not rig.num_running, "the bad one's end")
        assert not any(bad.finishes)

    async def test_a_refused_request_ends_every_choice_once(self, rig: LinkRig) -> None:
        """The rejection arrives as a finish, like every event after submit."""
        answer = Answer(2)
        rig.link.submit(link_request([1], 8, request_id="a", n=2, model="nobody"), answer)
        await eventually(lambda: answer.done, "the end")
        assert answer.finish.error.reason == ErrorReason.ERROR_REASON_MODEL_NOT_FOUND

    async def test_the_fleet_is_known_while_connected(self, rig: LinkRig) -> None:
        """The slots are not in use any longer than the request."""
        assert rig.link.connected
        assert [model.name for model in rig.link.fleet.models] == [MODEL]
        await rig.link.close()
        assert not rig.link.connected
        assert not rig.link.fleet.models

    async def test_models_come_and_go_while_connected(self, rig: LinkRig) -> None:
        """Requests for a model are taken while a shard serves it, and those for another model notice nothing."""

        async def ask(model: str) -> Answer:
            answer = Answer()
            rig.link.submit(link_request([4], 8, request_id=f"{model} {next(numbers)}", model=model), answer)
            await eventually(lambda: answer.done, "the end")
            return answer

        def names() -> set[str]:
            return {model.name for model in rig.link.fleet.models if model.num_ready_shards}

        numbers = itertools.count()
        for _ in range(2):
            await rig.add_model("other")
            await eventually(lambda: names() == {MODEL, "other"}, "both models")
            for model in (MODEL, "other"):
                assert (await ask(model)).token_ids == [expected_tokens([4], 0, 8)]
            await rig.remove_model("other")
            await eventually(lambda: names() == {MODEL}, "one model")
            refused = await ask("other")
            assert refused.finish.error.reason in _NOT_SERVED
            assert (await ask(MODEL)).token_ids == [expected_tokens([4], 0, 8)]

    async def test_a_waiting_task_is_woken_by_a_fleet_change(self, rig: LinkRig) -> None:
        """A cancel at the end must not produce a second finish."""
        waiting = asyncio.create_task(rig.link.wait_fleet_change())
        await asyncio.sleep(0)
        await rig.link.close()
        async with asyncio.timeout(5):
            await waiting

    async def test_closing_ends_what_runs_and_refuses_what_comes(self, rig: LinkRig) -> None:
        """No request waits forever. Calling `close` again is safe."""
        answer = Answer(2)
        rig.link.submit(link_request([1], 100_000, request_id="a", n=2, timeout_seconds=30.0), answer)
        await asyncio.sleep(0)
        await rig.link.close()
        await rig.link.close()
        for finish in answer.finishes:
            assert finish is not None
            assert finish.error.reason == ErrorReason.ERROR_REASON_ROUTER_LOST
        with pytest.raises(KvloomError) as caught:
            rig.link.submit(link_request([1], 8, request_id="b"), Answer())
        assert caught.value.reason == ErrorReason.ERROR_REASON_ROUTER_LOST
        assert caught.value.retry_after_seconds > 0
