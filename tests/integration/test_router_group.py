"""RouterGroup over scripted routers on real sockets: losses, rejections, drains, and their bounds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from kvloom.errors import KvloomError
from kvloom.router_link import members
from kvloom.router_link.group import MAX_LOSSES, RouterGroup
from kvloom.router_link.link import ChoiceProgress, LinkRequest
from kvloom.v1 import generation_pb2, router_service_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import CancelRequest, LostRequest
from tests.fakes.fake_router import TIMEOUT_SECONDS, Connection, FakeRouter, serve_fake_router, text_of
from tests.fakes.link_requests import link_request
from tests.fakes.router_world import Answer
from tests.waiting import eventually

R = ErrorReason
LOST = R.ERROR_REASON_ROUTER_LOST
DRAINING = KvloomError(R.ERROR_REASON_DRAINING, "I stop.")


def request(ids: list[int], n: int = 1, name: str = "r", **fields) -> LinkRequest:
    sampling, stop = generation_pb2.SamplingParams(), generation_pb2.StopConditions()
    return link_request(name, "m", ids, "", sampling, stop, n=n, **fields)


class Routers:
    """Two scripted routers and a group that is connected to both."""

    def __init__(self, group: RouterGroup, routers: list[FakeRouter]) -> None:
        self.group = group
        self.routers = routers

    async def taken(self, name: str, count: int = 1) -> tuple[FakeRouter, Connection, router_service_pb2.Submit]:
        """Where the request was submitted last, once it has been `count` times."""

        def submits() -> list[tuple[FakeRouter, Connection, router_service_pb2.Submit]]:
            return [
                (router, connection, submit)
                for router in self.routers
                for connection in router.connections
                for submit in connection.submits
                if submit.request.request_id == name
            ]

        await eventually(lambda: len(submits()) == count, f"{count} submits of {name}")
        return max(submits(), key=lambda found: sum(len(choice.output_token_ids) for choice in found[2].choices))

    def tell_fleet(self, router: FakeRouter, **fields) -> None:
        router.fleet = router_service_pb2.FleetState(
            models=[router_service_pb2.ModelInfo(name="m", num_ready_shards=1)], **fields
        )
        frame = router_service_pb2.RouterServiceConnectResponse(fleet=router.fleet)
        router.connections[-1].frames.put_nowait(frame)


@contextlib.asynccontextmanager
async def routers(count: int = 2, reattach_seconds: float = 5.0) -> AsyncIterator[Routers]:
    async with contextlib.AsyncExitStack() as cleanup:
        served = [await cleanup.enter_async_context(serve_fake_router()) for _ in range(count)]
        for router, address in served:
            router.answers = False
            router.address = address
        group = RouterGroup("edge", [address for _, address in served], reattach_seconds=reattach_seconds)
        cleanup.push_async_callback(group.close)
        await group.start()
        await eventually(lambda: all(router.connections for router, _ in served), "all connections")
        await eventually(lambda: group.connected, "the group's connection")
        await asyncio.wait_for(_all_take(group, count), TIMEOUT_SECONDS)
        yield Routers(group, [router for router, _ in served])


async def _all_take(group: RouterGroup, count: int) -> None:
    while sum(member.link.connected for member in group._members._members.values()) < count:
        await group.wait_fleet_change()


def start(connection: Connection, slot: int, num_cached_tokens: int) -> None:
    step = generation_pb2.StepFrame()
    step.starts.add(slot=slot, num_cached_tokens=num_cached_tokens, shard_id="shard-0")
    connection.frames.put_nowait(router_service_pb2.RouterServiceConnectResponse(step=step))


def lose(connection: Connection) -> None:
    connection.frames.put_nowait(None)


async def test_a_lost_router_s_answers_go_on_at_another_behind_what_was_delivered() -> None:
    """Only the open choices are requested, with the same name and seed, and the time that is left; the counts are those
    of the whole request."""
    async with routers() as fabric:
        answer = Answer(2)
        fabric.group.submit(request([1, 2, 3], n=2, timeout_seconds=50.0, session_key="chat"), answer)
        _, connection, submit = await fabric.taken("r")
        slots = [choice.slot for choice in submit.choices]
        start(connection, slots[0], 2)
        fabric.routers[0].tokens(connection, (slots[0], [7, 8]), (slots[1], [9]))
        fabric.routers[0].finish(connection, slots[1], num_output_tokens=1)
        await eventually(lambda: answer.finishes[1], "the first choice's end")
        lose(connection)
        router, other, again = await fabric.taken("r", 2)
        assert other is not connection
        (choice,) = again.choices
        assert (choice.index, list(choice.output_token_ids)) == (0, [7, 8])
        assert choice.num_delivered_chars == len(text_of(7) + text_of(8))
        wanted, before = again.request, submit.request
        assert before.sampling.HasField("seed")
        assert (wanted.sampling, wanted.stop, wanted.session_key) == (before.sampling, before.stop, "chat")
        assert 0 < wanted.timeout_seconds < 50.0
        start(other, choice.slot, 1)
        router.tokens(other, (choice.slot, [10]))
        router.finish(other, choice.slot, num_output_tokens=3)
        await eventually(lambda: answer.done, "the end")
        assert answer.token_ids == [[7, 8, 10], [9]]
        assert answer.starts[0] is not None
        assert answer.starts[0].num_cached_tokens == 2
        assert (answer.finish.num_cached_tokens, answer.finish.num_output_tokens) == (2, 3)
        assert fabric.group.num_reattached == 1
        assert not fabric.group.num_parked


def begun_by_another_model(*token_ids: int) -> LinkRequest:
    progress = ChoiceProgress(0)
    progress.token_ids.extend(token_ids)
    progress.num_chars = 3
    return request([1, 2], partial_choices=[progress], is_new=True)


async def test_what_another_model_has_begun_is_a_new_request() -> None:
    """Nothing was lost here, so no loss is counted, and a rejection is final at once: the next model may have room."""
    async with routers() as fabric:
        answer = Answer()
        fabric.group.submit(begun_by_another_model(7, 8), answer)
        router, connection, submit = await fabric.taken("r")
        (choice,) = submit.choices
        assert (list(choice.output_token_ids), choice.num_delivered_chars) == ([7, 8], 3)
        router.finish(connection, choice.slot, error=KvloomError(R.ERROR_REASON_QUEUE_FULL, "full"))
        await eventually(lambda: answer.done, "the end")
        assert answer.finish.error.reason == R.ERROR_REASON_QUEUE_FULL
        assert (fabric.group.num_parked, fabric.group.num_reattached, fabric.group.num_given_up) == (0, 0, 0)


async def test_what_another_model_has_begun_survives_its_router() -> None:
    """From then on it is as any other answer: the loss is reported without the tokens that this router did not
    deliver."""
    async with routers(1) as fabric:
        answer = Answer()
        fabric.group.submit(begun_by_another_model(7, 8), answer)
        router, connection, submit = await fabric.taken("r")
        router.tokens(connection, (submit.choices[0].slot, [9]))
        await eventually(lambda: answer.token_ids[0], "a token")
        lose(connection)
        router, other, again = await fabric.taken("r", 2)
        assert list(again.choices[0].output_token_ids) == [7, 8, 9]
        assert other.hello.lost == [LostRequest(request_id="r", num_received_tokens=1)]
        router.tokens(other, (again.choices[0].slot, [10]))
        router.finish(other, again.choices[0].slot)
        await eventually(lambda: answer.done, "the end")
        assert answer.token_ids == [[9, 10]]


async def test_the_same_router_takes_it_up_when_it_is_the_only_one() -> None:
    """A broken connection alone causes a pause."""
    async with routers(1) as fabric:
        answer = Answer()
        fabric.group.submit(request([1]), answer)
        _, connection, submit = await fabric.taken("r")
        fabric.routers[0].tokens(connection, (submit.choices[0].slot, [7]))
        await eventually(lambda: answer.token_ids[0], "a token")
        lose(connection)
        router, other, again = await fabric.taken("r", 2)
        router.tokens(other, (again.choices[0].slot, [8]))
        router.finish(other, again.choices[0].slot)
        await eventually(lambda: answer.done, "the end")
        assert answer.token_ids == [[7, 8]]


async def test_a_router_at_a_shared_address_gets_its_losses_at_its_own() -> None:
    """The next connection may reach another router. The link then has another id: the settlement, which may be late,
    must not hit the same request when it returns to the same router. Without the router's own address, nothing
    changes."""
    async with serve_fake_router() as (owner, own_address), routers(1) as fabric:
        (router,) = fabric.routers
        answer = Answer()
        fabric.group.submit(request([1, 2]), answer)
        _, connection, submit = await fabric.taken("r")
        router.tokens(connection, (submit.choices[0].slot, [7, 8]))
        await eventually(lambda: len(answer.token_ids[0]) == 2, "tokens")
        router.own_address = own_address
        lose(connection)
        _, second, submit = await fabric.taken("r", 2)
        assert second.hello.link_id == connection.hello.link_id
        assert second.hello.lost == [LostRequest(request_id="r", num_received_tokens=2)]
        router.tokens(second, (submit.choices[0].slot, [9]))
        await eventually(lambda: len(answer.token_ids[0]) == 3, "another token")
        assert not fabric.group._cancel_notifier.num_waiting
        lose(second)
        _, third, _ = await fabric.taken("r", 3)
        link_id = second.hello.link_id
        assert third.hello.link_id != link_id
        assert third.hello.lost == [LostRequest(request_id="r", num_received_tokens=1, link_id=link_id)]
        await eventually(lambda: owner.cancels, "the settlement")
        assert owner.cancels == [CancelRequest(request_id="r", num_received_tokens=1, link_id=link_id)]
        await eventually(lambda: not fabric.group._cancel_notifier.num_waiting, "its answer")


async def test_no_router_takes_over_within_the_bound() -> None:
    """Both routers are lost: the client gets ROUTER_LOST, with each token counted once, and new requests are rejected
    at once."""
    async with routers(2, reattach_seconds=0.4) as fabric:
        answer = Answer()
        fabric.group.submit(request([1, 2]), answer)
        router, connection, submit = await fabric.taken("r")
        router.tokens(connection, (submit.choices[0].slot, [7]))
        await eventually(lambda: answer.token_ids[0], "a token")
        lost_at = asyncio.get_running_loop().time()
        for gone in fabric.routers:
            gone.refuses = True
            lose(gone.connections[-1])
        await eventually(lambda: answer.done, "the end")
        took_seconds = asyncio.get_running_loop().time() - lost_at
        assert answer.finish.error.reason == LOST
        assert (answer.finish.num_prompt_tokens, answer.finish.num_output_tokens) == (2, 1)
        assert 0.35 < took_seconds < 4.0
        assert fabric.group.num_given_up == 1
        with pytest.raises(KvloomError) as caught:
            fabric.group.submit(request([1]), Answer())
        assert caught.value.reason == LOST


async def test_without_patience_a_loss_is_an_error_at_once() -> None:
    """With `edge.reattach_seconds = 0` a request fails at once."""
    async with routers(2, reattach_seconds=0.0) as fabric:
        answer = Answer()
        fabric.group.submit(request([1]), answer)
        _, connection, _ = await fabric.taken("r")
        lose(connection)
        await eventually(lambda: answer.done, "the end")
        assert answer.finish.error.reason == LOST


async def test_what_is_new_goes_around_a_router_that_is_silent_with_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung router is abandoned only after 15 s, but new requests need not wait for that. A router that merely has
    nothing to send gets requests as before, and so does one that has sent again."""
    async with routers() as fabric:
        first = Answer()
        fabric.group.submit(request([1], session_key="chat", name="r0"), first)
        router, connection, submit = await fabric.taken("r0")
        monkeypatch.setattr(members, "MAX_SILENT_SECONDS", 0.05)
        link = fabric.group._members._members[router.address].link
        await eventually(lambda: link.silent_seconds > 0.05, "the silence")
        fabric.group.submit(request([1], session_key="chat", name="r1"), Answer())
        other, around, slots = await fabric.taken("r1")
        assert other is not router
        other.finish(around, slots.choices[0].slot)
        monkeypatch.setattr(members, "MAX_SILENT_SECONDS", 5.0)
        router.tokens(connection, (submit.choices[0].slot, [7]))
        await eventually(lambda: first.token_ids[0], "a token")
        assert link.silent_seconds < 5.0
        fabric.group.submit(request([1], session_key="chat", name="r2"), Answer())
        assert (await fabric.taken("r2"))[0] is router
        for name in ("r0", "r2"):
            router.finish(connection, (await fabric.taken(name))[2].choices[0].slot)
        await eventually(lambda: not link.silent_seconds, "nothing to answer")


async def test_a_draining_router_keeps_what_it_runs_and_gets_nothing_new() -> None:
    """Another router continues the requests that it abandons at its deadline."""
    async with routers() as fabric:
        answer = Answer()
        fabric.group.submit(request([1], name="old"), answer)
        router, connection, submit = await fabric.taken("old")
        fabric.tell_fleet(router, draining=True)
        other = next(r for r in fabric.routers if r is not router)
        await eventually(lambda: len(fabric.group._members.available) == 1, "the drain is known")
        for i in range(5):
            fabric.group.submit(request([1], name=f"new-{i}"), Answer())
            assert (await fabric.taken(f"new-{i}"))[0] is other
        router.tokens(connection, (submit.choices[0].slot, [7]))
        await eventually(lambda: answer.token_ids[0] == [7], "the old one's token")
        router.finish(connection, submit.choices[0].slot, error=DRAINING)
        taker, new_connection, again = await fabric.taken("old", 2)
        assert taker is other
        other.finish(new_connection, again.choices[0].slot)
        await eventually(lambda: answer.done, "the end")
        assert answer.finish.reason == generation_pb2.FINISH_REASON_STOP


async def test_all_routers_draining_refuse_with_a_reason() -> None:
    """A client whose whole fabric is stopping is told to retry."""
    async with routers(1) as fabric:
        fabric.tell_fleet(fabric.routers[0], draining=True)
        await eventually(lambda: fabric.group.fleet.draining, "the drain is known")
        with pytest.raises(KvloomError) as caught:
            fabric.group.submit(request([1]), Answer())
        assert caught.value.reason == R.ERROR_REASON_DRAINING
        assert caught.value.retry_after_seconds > 0


@pytest.mark.parametrize("reason", ["SAFETY_UNAVAILABLE", "NO_SHARD_READY", "QUEUE_FULL", "DUPLICATE_REQUEST_ID"])
async def test_a_router_that_cannot_take_it_yet_is_asked_again(reason: str) -> None:
    """It has just started and does not know its shards and its safety service yet."""
    async with routers() as fabric:
        answer = Answer()
        fabric.group.submit(request([1]), answer)
        router, connection, submit = await fabric.taken("r")
        router.tokens(connection, (submit.choices[0].slot, [7]))
        await eventually(lambda: answer.token_ids[0], "a token")
        for each in fabric.routers:
            each.fail_with = KvloomError(ErrorReason.Value(f"ERROR_REASON_{reason}"), "Not yet.")
        lose(connection)
        await fabric.taken("r", 3)
        for each in fabric.routers:
            each.fail_with = None
            each.answers = True
        await eventually(lambda: answer.done, "the end")
        assert answer.finish.reason == generation_pb2.FINISH_REASON_STOP


async def test_what_is_wrong_with_a_request_is_no_reason_to_try_again() -> None:
    """Errors of the request itself end it at once, before and after a loss."""
    async with routers() as fabric:
        for router in fabric.routers:
            router.fail_with = KvloomError(R.ERROR_REASON_NO_SHARD_READY, "None.")
        answer = Answer()
        fabric.group.submit(request([1]), answer)
        await eventually(lambda: answer.done, "the end")
        assert answer.finish.error.reason == R.ERROR_REASON_NO_SHARD_READY
        assert sum(len(c.submits) for router in fabric.routers for c in router.connections) == 1


async def test_a_request_that_breaks_its_routers_is_given_up() -> None:
    """The request itself may be what kills them: it is not sent to every router of a fabric."""
    async with routers() as fabric:
        answer = Answer()
        fabric.group.submit(request([1]), answer)
        for number in range(1, MAX_LOSSES + 2):
            await eventually(lambda: _num_submits(fabric) == number, f"submit {number}")  # noqa: B023
            tracked, member = next(iter(fabric.group._attached.values()))
            tracked._submitted_at -= 2.0  # it was taken a while ago
            router = next(r for r in fabric.routers if r.address == member.address)
            lose(router.connections[-1])
        await eventually(lambda: answer.done, "the end")
        assert answer.finish.error.reason == LOST
        assert _num_submits(fabric) == MAX_LOSSES + 1


def _num_submits(fabric: Routers) -> int:
    return sum(len(c.submits) for router in fabric.routers for c in router.connections)


async def test_hundreds_of_lost_answers_come_over_bit_by_bit() -> None:
    """The surviving router is not stormed: the requests are spread over time, and all of them arrive."""
    async with routers() as fabric:
        answers = [Answer() for _ in range(300)]
        for i, answer in enumerate(answers):
            fabric.group.submit(request([i], name=f"r{i}", session_key="all of one"), answer)
        await eventually(lambda: _num_submits(fabric) == 300, "all submits")
        lost_at = asyncio.get_running_loop().time()
        for router in fabric.routers:
            router.answers = True
        busiest = max(fabric.routers, key=lambda router: len(router.connections[-1].submits))
        lose(busiest.connections[-1])
        num_lost = len(busiest.connections[-1].submits)
        assert num_lost >= 100
        lost = [answers[int(submit.request.request_id[1:])] for submit in busiest.connections[-1].submits]
        await eventually(lambda: all(answer.done for answer in lost), "all ends")
        took_seconds = asyncio.get_running_loop().time() - lost_at
        assert all(answer.finish.reason == generation_pb2.FINISH_REASON_STOP for answer in lost)
        assert took_seconds > 0.02 * (num_lost // 32 - 1)


async def test_cancelled_while_it_looks_for_a_router() -> None:
    """No router generates for a client that left during the pause."""
    async with routers(1) as fabric:
        answer = Answer()
        handle = fabric.group.submit(request([1]), answer)
        _, connection, _ = await fabric.taken("r")
        fabric.routers[0].fleet.ClearField("models")  # it comes back without a shard
        lose(connection)
        await eventually(lambda: fabric.group.num_parked, "the loss")
        fabric.group.cancel(handle)
        assert not fabric.group.num_parked
        await eventually(lambda: len(fabric.routers[0].connections) == 2, "the router's return")
        await eventually(lambda: fabric.group.connected, "the group's return")
        fabric.tell_fleet(fabric.routers[0])
        fabric.group.submit(request([2], name="next"), Answer())
        await fabric.taken("next")
        assert _num_submits(fabric) == 2
        assert not answer.done


async def test_its_time_runs_out_while_it_looks_for_a_router() -> None:
    """The deadline that the client gave holds across routers."""
    async with routers(1) as fabric:
        answer = Answer()
        fabric.group.submit(request([1], timeout_seconds=0.2), answer)
        _, connection, _ = await fabric.taken("r")
        fabric.routers[0].fleet.ClearField("models")
        lose(connection)
        await eventually(lambda: len(fabric.routers[0].connections) == 2, "the router's return")
        await asyncio.sleep(0.25)  # sleep: the client's time must have passed
        fabric.tell_fleet(fabric.routers[0])
        await eventually(lambda: answer.done, "the end")
        assert answer.finish.error.reason == R.ERROR_REASON_DEADLINE_EXCEEDED


async def test_closing_tells_those_that_look_for_a_router() -> None:
    """A process that shuts down leaves no request waiting."""
    async with routers(1) as fabric:
        answer = Answer()
        fabric.group.submit(request([1]), answer)
        _, connection, _ = await fabric.taken("r")
        fabric.routers[0].fleet.ClearField("models")
        lose(connection)
        await eventually(lambda: fabric.group.num_parked, "the loss")
        await fabric.group.close()
        assert answer.finish.error.reason == LOST


async def test_routers_come_and_go_by_their_addresses() -> None:
    """A new router is used; one that is no longer listed ends its requests and is dropped."""
    async with routers(1) as fabric:
        answer = Answer()
        (first,) = fabric.routers
        fabric.group.submit(request([1], name="old"), answer)
        _, connection, submit = await fabric.taken("old")
        async with serve_fake_router() as (second, address):
            second.answers = False
            fabric.routers.append(second)
            fabric.group.set_routers({address: ""})
            await eventually(lambda: [m.address for m in fabric.group._members.available] == [address], "the change")
            fabric.group.submit(request([1], name="new"), Answer())
            assert (await fabric.taken("new"))[0] is second
            assert first.address in fabric.group.addresses
            first.finish(connection, submit.choices[0].slot)
            await eventually(lambda: answer.done, "the old one's end")
            fabric.group.set_routers({address: ""})
            await eventually(lambda: fabric.group.addresses == [address], "the old router is left")
            await fabric.group.close()
