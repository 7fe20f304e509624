"""Responses over WebSocket that the orchestrator stores."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.fake_control import OTHER_KEY, SEARCH_KEY
from tests.fakes.fake_router_link import answer
from tests.fakes.socket_client import connected
from tests.fakes.state_world import state_world


async def test_responses_of_a_connection_are_stored(tmp_path: Path) -> None:
    """It names what others have stored, also what was only prepared or was steered, and nobody else's."""
    async with state_world(f"sqlite:///{tmp_path}/state.db", tmp_path) as world:
        link = world.edge.link
        link.script = answer("Hello", " you")
        made = await world.client.responses.create(model="tiny", input="the quick fox")
        async with connected(world.edge, headers={"Authorization": f"Bearer {SEARCH_KEY}"}) as client:
            await client.create("brown", previous_response_id=made.id, generate=False)
            prepared = await client.ended()
            assert (prepared["output"], prepared["store"]) == ([], True)
            await client.create("dog", previous_response_id=prepared["id"])
            followed = await client.ended()
            assert all(text in world.prompt() for text in ("the quick fox", "Hello you", "brown", "dog"))
            link.script = None
            await client.create("lazy", previous_response_id=followed["id"])
            request = await link.next_request()
            request.start()
            request.tokens("Hm")
            await client.steer((await client.until("response.output_text.delta"))[0]["response"]["id"], "cat")
            steered = await client.ended()
            answer("Miau")(await link.next_request())
            final = await client.ended()
        assert final["previous_response_id"] == steered["id"]
        assert all(text in world.prompt() for text in ("the quick fox", "lazy", "Hm", "cat"))
        stored = await world.client.responses.retrieve(steered["id"])
        assert (stored.status, stored.output_text) == ("incomplete", "Hm")
        assert (await world.client.responses.retrieve(final["id"])).output_text == "Miau"
        async with connected(world.edge, headers={"Authorization": f"Bearer {OTHER_KEY}"}) as client:
            await client.create("dog", previous_response_id=final["id"])
            error = await client.error()
            assert (error["status"], error["error"]["code"]) == (404, "previous_response_not_found")
