"""The paths of the admin page: who may use them, and what they say."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH
from kvloom.v1.overview_pb2 import ExplainRequestResponse, FleetSample, GetOverviewResponse, ShardOverview
from kvloom.v1.router_service_pb2 import ExplainResponse, RequestOutcome, ShardScore
from kvloom_common.access.api_keys import ApiKey, ApiKeys, digest_of
from kvloom_common.callers import Callers
from kvloom_common.transport.plain_messages import as_plain
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import answer
from tests.integration.test_edge_admin import admin_world, ask

GONE = KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, "It is not remembered.")


@contextlib.asynccontextmanager
async def world_of(**more) -> AsyncIterator[EdgeWorld]:
    async with edge_world(**more) as world:
        world.link.overview = {
            "GetOverview": GetOverviewResponse(
                router_id="r0", shards=[ShardOverview(shard_id="shard-0")], samples=[FleetSample(at_seconds=9.0)]
            ),
            "ExplainRequest": ExplainRequestResponse(explanation=ExplainResponse(request_id="r")),
        }
        yield world


async def status(world: EdgeWorld, path: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> int:
    async with world.http.request(method, f"{world.url}/admin/v1/{path}", headers=headers) as response:
        await response.read()
        return response.status


async def test_without_tenants_only_this_machine_is_served() -> None:
    """No key says that its holder is an operator. A page of another site must not get at it through the browser of this
    machine, neither by its own origin nor by a name that it makes point here; and a proxy's clients are elsewhere."""
    async with world_of() as world:
        assert await status(world, "overview") == 200
        port = world.address[1]
        for name in ("localhost", "[::1]"):
            assert await status(world, "overview", {"Host": f"{name}:{port}"}) == 200
        for headers in (
            {"Host": f"rebound.example:{port}"},
            {"Sec-Fetch-Site": "cross-site"},
            {"X-Forwarded-For": "192.0.2.1"},
            {"Forwarded": "for=192.0.2.1"},
        ):
            for path in ("overview", "access", "requests/r", "rollouts", "overview/events"):
                assert await status(world, path, headers) == 403
            assert await status(world, "shards/drain", headers, "POST") == 403
        assert await status(world, "usage") == 404


async def test_without_tenants_a_key_is_needed_where_all_need_one() -> None:
    """This machine may have users who are not operators."""
    keys = ApiKeys([ApiKey("k", digest_of("a-secret-of-sufficient-length"))])
    async with world_of(callers=Callers(api_keys=keys)) as world:
        assert await status(world, "overview") == 401
        assert await status(world, "overview", {"Authorization": "Bearer a-secret-of-sufficient-length"}) == 200


async def test_administrators_ask_for_their_organisation(tmp_path: Path) -> None:
    """The router is asked on behalf of the key's organisation; what concerns all is the operator's."""
    async with admin_world(tmp_path, operator_organisation="staff") as (world, _, secrets):
        world.link.overview = {
            "GetOverview": GetOverviewResponse(router_id="r0"),
            "ExplainRequest": ExplainRequestResponse(explanation=ExplainResponse(request_id="r")),
        }
        assert (await ask(world, secrets["admin"], "GET", "access"))["organisation"] == "acme"
        assert (await ask(world, secrets["operator"], "GET", "access"))["is_operator"]
        for secret, organisation in (("admin", "acme"), ("operator", "")):
            await ask(world, secrets[secret], "GET", "overview")
            await ask(world, secrets[secret], "GET", "requests/r")
            assert [one.organisation for _, one in world.link.asked] == [organisation] * 2
            world.link.asked.clear()
        await ask(world, secrets["member"], "GET", "overview", status=403)
        await ask(world, secrets["admin"], "GET", "rollouts", status=403)
        await ask(world, secrets["admin"], "POST", "shards/drain", {"shard_id": "shard-0"}, status=403)
        await ask(world, secrets["admin"], "GET", "usage")
        await ask(world, secrets["admin"], "GET", "usage?tenant=acme/search")
        for query in ("tenant=staff/admin", "organisation=staff", "organisation=", "tenant=acm/x"):
            await ask(world, secrets["admin"], "GET", f"usage?{query}", status=403)
        await ask(world, secrets["operator"], "GET", "usage?organisation=acme")


async def test_events_follow_until_the_key_is_not_accepted_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of events must not outlive the right to read it."""
    monkeypatch.setattr("edge_http.operating.overview.EVENT_SECONDS", 0.01)
    keys = ApiKeys([ApiKey("k", digest_of("a-secret-of-sufficient-length"))])
    async with world_of(callers=Callers(api_keys=keys)) as world:
        headers = {"Authorization": "Bearer a-secret-of-sufficient-length"}
        async with world.http.get(f"{world.url}/admin/v1/overview/events", headers=headers) as response:
            lines = response.content
            first = msgspec.json.decode((await lines.readline()).removeprefix(b"data: "))
            assert first["shards"][0]["shard_id"] == "shard-0"
            await lines.readline()
            await lines.readline()
            assert world.edge.num_watchers == 1
            keys._use([])
            rest = await response.text()
        assert "event: error" in rest
        assert world.edge.num_watchers == 0


async def test_a_request_is_explained_by_either_of_its_ids() -> None:
    """People have the id of the answer, or the x-request-id of their own; and the edge adds what it has seen."""
    async with world_of() as world:
        world.link.script = answer("x")
        _, body = await world.chat()
        outcome = RequestOutcome(e2e_latency_seconds=0.0, end="finished")
        response = ExplainRequestResponse(explanation=ExplainResponse(request_id=body["id"], outcome=outcome))
        world.link.overview["ExplainRequest"] = response
        async with world.http.get(f"{world.url}/admin/v1/requests/{body['id']}") as found:
            assert (await found.json())["time"] is not None
        assert world.edge.metrics.seconds_of(body["id"]) is not None
        assert world.edge.metrics.seconds_of("another") is None
        world.link.overview["ExplainRequest"] = GONE
        world.link.asked.clear()
        assert await status(world, "requests/of/client") == 404
        assert [(one.request_id, one.client_request_id) for _, one in world.link.asked] == [
            ("of/client", ""),
            ("", "of/client"),
        ]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("overview?max_requests=1001", "max_requests"),
        ("overview?samples_after=x", "samples_after"),
        ("overview?a=1", "a"),
    ],
)
async def test_wrong_parameters_are_named(path: str, field: str) -> None:
    """An operator's script with a mistake must not get something else."""
    async with world_of() as world, world.http.get(f"{world.url}/admin/v1/{path}") as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == field


async def test_without_a_supervisor_there_are_no_rollouts(tmp_path: Path) -> None:
    """An edge that was started by itself says so."""
    async with world_of() as world:
        world.edge.run_folder = tmp_path
        assert await status(world, "rollouts") == 501
        drained = {"shard_id": "shard-0"}
        async with world.http.post(f"{world.url}/admin/v1/shards/drain", json=drained) as response:
            assert response.status == 501
        wrong = {"shard_id": "s", "deadline_seconds": -1}
        async with world.http.post(f"{world.url}/admin/v1/shards/drain", json=wrong) as no:
            assert (await no.json())["error"]["param"] == "deadline_seconds"


async def test_at_most_so_many_pages_watch() -> None:
    """Forgotten pages must not add up to work without end."""
    async with world_of() as world, contextlib.AsyncExitStack() as streams:
        world.edge.num_watchers = 16
        assert await status(world, "overview/events") == 429
        world.edge.num_watchers = 0
        response: aiohttp.ClientResponse = await streams.enter_async_context(
            world.http.get(f"{world.url}/admin/v1/overview/events")
        )
        assert response.content_type == "text/event-stream"


def test_maps_and_enums_of_messages_are_plain() -> None:
    """JSON has words and objects where protobuf has numbers and maps."""
    assert as_plain(ShardScore(cost_terms={"ttft": 1.5}))["cost_terms"] == {"ttft": 1.5}
    outcome = as_plain(RequestOutcome(reason=FINISH_REASON_LENGTH, error_reason=ErrorReason.ERROR_REASON_SHARD_LOST))
    assert (outcome["reason"], outcome["error_reason"]) == ("length", "shard_lost")
    plain = as_plain(RequestOutcome())
    assert plain["reason"] == ""
    assert plain["queue_time_seconds"] == 0
    assert "ttft_seconds" not in plain, "a time that is not known is not 0"
