"""Conversations while the orchestrator is away."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from tests.fakes.fake_router_link import answer
from tests.fakes.state_world import state_world


async def test_a_conversation_goes_on_with_what_is_known_of_it(tmp_path: Path) -> None:
    """With a warning. What cannot be stored is not acknowledged, and nothing is known of what others have, or of what
    was deleted."""
    async with state_world(f"sqlite:///{tmp_path}/state.db", tmp_path) as world:
        world.edge.link.script = answer("Hello", " you")
        first = await world.client.responses.create(model="tiny", input="the quick fox")
        second = await world.client.responses.create(model="tiny", input="brown", previous_response_id=first.id)
        await world.server.stop(None)
        raw = await world.client.responses.with_raw_response.create(
            model="tiny", input="dog", previous_response_id=second.id, store=False
        )
        assert raw.headers["x-kvloom-context"] == "last-known"
        assert all(text in world.prompt() for text in ("the quick fox", "brown", "dog"))
        for client, is_stored in ((world.client, True), (world.other, False)):
            with pytest.raises(openai.InternalServerError) as refused:
                await client.responses.create(
                    model="tiny", input="dog", previous_response_id=second.id, store=is_stored
                )
            assert refused.value.code == "orchestrator_unavailable"
        with pytest.raises(openai.InternalServerError):
            await world.client.responses.delete(first.id)
        with pytest.raises(openai.InternalServerError):
            await world.client.responses.create(model="tiny", input="x", previous_response_id=second.id, store=False)
