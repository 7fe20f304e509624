"""Webhooks, as OpenAI's client sets them up and verifies them, on SQLite and on PostgreSQL."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from aiohttp import web
from openai.types.webhooks import WebhookEndpointWithSecret

from kvloom.v1.error_reason_pb2 import ErrorReason
from orchestrator.database.schema import deliveries, jobs, objects
from orchestrator.webhooks.delivery import GIVE_UP_SECONDS, wait_seconds
from tests.fakes.fake_router_link import FakeRequest, answer
from tests.fakes.state_world import StateWorld, state_world_on
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests of a database share their world

DAY = 86_400.0
RESPONSES: Any = ["response.completed", "response.failed", "response.cancelled", "response.incomplete"]


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgres, pytest.mark.long])],
)
async def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StateWorld]:
    async with state_world_on(request, tmp_path_factory, webhook_private_hosts=["127.0.0.1"]) as started:
        yield started


@dataclasses.dataclass
class Receiver:
    """A tenant's own server: it answers with `statuses` in turn, then with 200, and keeps what it has got."""

    url: str
    statuses: list[int]
    got: list[tuple[dict[str, str], bytes]]

    def events(self) -> list[tuple[str, str]]:
        return [(event["type"], event["data"]["id"]) for event in (json.loads(body) for _, body in self.got)]


@pytest_asyncio.fixture(loop_scope="module")
async def receiver() -> AsyncIterator[Receiver]:
    async def receive(request: web.BaseRequest) -> web.Response:
        made.got.append((dict(request.headers), await request.read()))
        status = made.statuses.pop(0) if made.statuses else 200
        return web.Response(status=status, headers={"Location": "/elsewhere"} if status == 302 else {})

    runner = web.ServerRunner(web.Server(receive))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made = Receiver(f"http://127.0.0.1:{runner.addresses[0][1]}/hook", [], [])
    yield made
    await runner.cleanup()


@pytest_asyncio.fixture(loop_scope="module")
async def world(shared: StateWorld) -> AsyncIterator[StateWorld]:
    shared.edge.link.script = answer("Hello")
    yield shared
    async for one in shared.client.webhooks.list():
        await shared.client.webhooks.delete(one.id)


async def endpoint(world: StateWorld, receiver: Receiver, events: Any = RESPONSES) -> WebhookEndpointWithSecret:
    return await world.client.webhooks.create(name="app", url=receiver.url, event_types=events)


async def begun(world: StateWorld, **more: Any) -> str:
    return (await world.client.responses.create(model="tiny", input="the fox", background=True, **more)).id


async def num_waiting(world: StateWorld) -> int:
    async with world.database.reading() as connection:
        kept = (await connection.execute(deliveries.select())).all()
        held = (await connection.execute(jobs.select().where(jobs.c.kind == "webhook"))).all()
    assert {row.id for row in kept} <= {row.id for row in held}
    return len(held)


async def idle(world: StateWorld) -> None:
    async def is_empty() -> bool:
        return await num_waiting(world) == 0

    await eventually(is_empty, "the last delivery")


async def test_an_endpoint_is_made_shown_changed_and_deleted(world: StateWorld, receiver: Receiver) -> None:
    """Its secret is shown once, and is nowhere in the database."""
    hooks = world.client.webhooks
    made = await endpoint(world, receiver)
    assert made.signing_secret.startswith("whsec_")
    assert made.signing_secret_hint is not None
    assert made.signing_secret_hint.endswith(made.signing_secret[-4:])
    found = await hooks.retrieve(made.id)
    assert found.model_dump() == made.model_dump(exclude={"signing_secret"})
    world.now += 10
    assert await hooks.update(made.id, name="app") == found
    changed = await hooks.update(made.id, name="other", event_types=["batch.completed"])
    assert (changed.name, changed.url, changed.event_types) == ("other", receiver.url, ["batch.completed"])
    assert changed.updated_at == (found.updated_at or 0) + 10
    second = await endpoint(world, receiver)
    assert [one.id async for one in hooks.list(limit=1)] == [second.id, made.id]
    async with world.database.reading() as connection:
        kept = b"".join(row.body for row in await connection.execute(objects.select()))
    for secret in (made.signing_secret, second.signing_secret):
        assert secret.removeprefix("whsec_").encode() not in kept
    assert (await hooks.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await hooks.retrieve(made.id)
    assert "response.completed" in (await hooks.event_types.list()).data


async def test_a_message_is_verified_by_the_official_client(world: StateWorld, receiver: Receiver) -> None:
    """Also while a secret is being replaced: for a day both are good, if that was asked for."""
    hooks = world.client.webhooks
    made = await endpoint(world, receiver)
    tried = await hooks.test(made.id, event_type="batch.failed")
    assert (tried.status_code, tried.event_type) == (200, "batch.failed")
    headers, body = receiver.got[-1]
    event = hooks.unwrap(body, headers, secret=made.signing_secret)
    assert (event.type, event.id) == ("batch.failed", headers["webhook-id"])
    with pytest.raises(openai.InvalidWebhookSignatureError):
        hooks.unwrap(body + b" ", headers, secret=made.signing_secret)
    rotated = await hooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=True)
    assert rotated.signing_secret != made.signing_secret
    for is_old_good in (True, False):
        await hooks.test(made.id, event_type="response.completed")
        headers, body = receiver.got[-1]
        hooks.unwrap(body, headers, secret=rotated.signing_secret)
        if is_old_good:
            hooks.unwrap(body, headers, secret=made.signing_secret)
        else:
            with pytest.raises(openai.InvalidWebhookSignatureError):
                hooks.unwrap(body, headers, secret=made.signing_secret)
        world.now += DAY
    again = await hooks.rotate_secret(made.id)
    await hooks.test(made.id, event_type="response.completed")
    headers, body = receiver.got[-1]
    assert len(headers["webhook-signature"].split()) == 1
    hooks.unwrap(body, headers, secret=again.signing_secret)


async def test_each_end_of_a_response_is_told_once(world: StateWorld, receiver: Receiver) -> None:
    made = await endpoint(world, receiver)
    await endpoint(world, receiver, ["batch.completed"])  # which is told nothing of it
    completed, cancelled = await begun(world), await begun(world)
    await world.client.responses.cancel(cancelled)
    await world.client.responses.cancel(cancelled)
    stored = await world.client.responses.create(model="tiny", input="the fox")
    async with world.jobs():
        await eventually(lambda: len(receiver.got) >= 2, "the messages")

        def refuse(request: FakeRequest) -> None:
            request.fail(ErrorReason.ERROR_REASON_CONTENT_FILTERED)

        world.edge.link.script = refuse
        failed = await begun(world)
        await eventually(lambda: len(receiver.got) >= 3, "the third message")
        await idle(world)
    told = {("response.completed", completed), ("response.cancelled", cancelled), ("response.failed", failed)}
    assert set(receiver.events()) == told
    assert len(receiver.got) == 3
    assert stored.id not in str(receiver.events())
    for headers, body in receiver.got:
        world.client.webhooks.unwrap(body, headers, secret=made.signing_secret)


async def test_the_end_of_a_batch_is_told(world: StateWorld, receiver: Receiver) -> None:
    await endpoint(world, receiver, ["batch.completed", "batch.failed"])
    body = {"model": "tiny", "messages": [{"role": "user", "content": "the fox"}]}
    line = json.dumps({"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body})
    made: list[str] = []
    for text in (line, "{"):
        file = await world.client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
        batch = await world.client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        made.append(batch.id)
    async with world.jobs():
        await eventually(lambda: len(receiver.got) >= 2, "the messages")
        await idle(world)
    assert sorted(receiver.events()) == [("batch.completed", made[0]), ("batch.failed", made[1])]


async def test_a_message_that_is_not_taken_is_sent_again_under_its_id(world: StateWorld, receiver: Receiver) -> None:
    """Less and less often, whatever dies meanwhile. The endpoint's others wait as long, and a redirect is followed
    nowhere."""
    await endpoint(world, receiver)
    receiver.statuses = [500, 302, 200]
    first = await begun(world)
    async with world.jobs():
        await eventually(lambda: len(receiver.got) == 1, "the first try")
        await eventually(lambda: held_until(world, world.now + wait_seconds(0)), "the end of the first try")
    world.now += wait_seconds(0) + 0.1
    async with world.jobs("another"):  # the orchestrator that has tried it has died
        await eventually(lambda: len(receiver.got) == 2, "the second try")
        await eventually(lambda: held_until(world, world.now + wait_seconds(1)), "the end of the second try")
        world.now += wait_seconds(1) + 0.1
        await eventually(lambda: len(receiver.got) == 3, "the third try")
        await idle(world)
    assert receiver.events() == [("response.completed", first)] * 3
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert len({body for _, body in receiver.got}) == 1


async def held_until(world: StateWorld, when: float) -> bool:
    async with world.database.reading() as connection:
        rows = (await connection.execute(jobs.select().where(jobs.c.kind == "webhook"))).all()
    return [(row.holder, row.held_until) for row in rows] == [("", pytest.approx(when))]


async def test_a_message_is_given_up_after_a_day(world: StateWorld, receiver: Receiver) -> None:
    """Or at once, if the endpoint says that it is gone."""
    await endpoint(world, receiver)
    receiver.statuses = [500, 410]
    await begun(world)
    async with world.jobs():
        await eventually(lambda: len(receiver.got) == 1, "the first try")
        await eventually(lambda: held_until(world, world.now + wait_seconds(0)), "the end of the first try")
        receiver.statuses = [500, 410]
        world.now += GIVE_UP_SECONDS
        await idle(world)
        await begun(world)
        await eventually(lambda: len(receiver.got) == 3, "the other message")
        await idle(world)
    assert len(receiver.got) == 3


async def test_deleted_endpoints_are_told_nothing(world: StateWorld, receiver: Receiver) -> None:
    made = await endpoint(world, receiver)
    await world.client.responses.cancel(await begun(world))
    await world.client.webhooks.delete(made.id)
    async with world.jobs():
        await idle(world)
    assert receiver.got == []


NOT_PUBLIC = [
    "http://example.com/hook",
    "ftp://example.com/",
    "https://127.0.0.2/",
    "https://[::1]/",
    "https://[::ffff:10.0.0.1]/",
    "https://169.254.169.254/latest/meta-data",
    "https://2130706433/",
    "https://user:password@example.com/",
    "https:///nothing",
    "https://example.com/ a",
    "https://example.com:99999/",
    "file:///etc/passwd",
]


async def test_urls_that_are_not_public_are_refused(world: StateWorld) -> None:
    for url in (*NOT_PUBLIC, NOT_PUBLIC[-1].upper()):
        with pytest.raises(openai.BadRequestError) as refused:
            await world.client.webhooks.create(name="app", url=url, event_types=RESPONSES)
        assert refused.value.param == "url", url


async def test_a_name_that_resolves_to_a_private_address_is_not_called(world: StateWorld, receiver: Receiver) -> None:
    """A name is checked when it has been resolved for the connection, so that it cannot change in between."""
    port = receiver.url.split(":")[2]
    made = await world.client.webhooks.create(name="app", url=f"https://localhost:{port}", event_types=RESPONSES)
    with pytest.raises(openai.ConflictError, match="cannot be reached"):
        await world.client.webhooks.test(made.id, event_type="response.completed")
    await world.client.responses.cancel(await begun(world))
    async with world.jobs():
        await eventually(lambda: held_until(world, world.now + wait_seconds(0)), "the try")
    assert receiver.got == []


async def test_endpoints_are_their_tenants(world: StateWorld, receiver: Receiver) -> None:
    """Another tenant finds none, and is told of nothing that is not its own."""
    made = await endpoint(world, receiver)
    other = world.other.webhooks
    for ask in (
        other.retrieve,
        other.delete,
        other.rotate_secret,
        lambda one: other.update(one, name="mine"),
        lambda one: other.test(one, event_type="response.completed"),
    ):
        with pytest.raises(openai.NotFoundError) as foreign:
            await ask(made.id)
        with pytest.raises(openai.NotFoundError) as unknown:
            await ask("we_nothing")
        assert {**foreign.value.body, "message": ""} == {**unknown.value.body, "message": ""}
    assert [one async for one in other.list()] == []
    theirs = await world.other.responses.create(model="tiny", input="the fox", background=True)
    await world.other.responses.cancel(theirs.id)
    assert await num_waiting(world) == 0
    assert receiver.got == []


async def test_a_tenant_has_a_bounded_number(
    world: StateWorld, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.api.webhooks.MAX_ENDPOINTS", 2)
    for _ in range(2):
        await endpoint(world, receiver)
    with pytest.raises(openai.ConflictError, match="2 webhook endpoints"):
        await endpoint(world, receiver)
