"""APIs that kvloom does not have are refused by name."""

from __future__ import annotations

import openai
import pytest

from tests.fakes.edge_world import edge_world


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/audio/transcriptions", "Audio"),
        ("/v1/images/generations", "Images"),
        ("/v1/realtime", "Realtime"),
        ("/v1/assistants", "Assistants"),
        ("/v1/threads/t1/runs", "Threads"),
        ("/v1/files", "Files"),
        ("/v1/batches/b1/cancel", "Batch"),
        ("/v1/fine_tuning/jobs", "Fine-tuning"),
        ("/v1/vector_stores/v/files", "Vector stores"),
        ("/v1/uploads", "Uploads"),
        ("/v1/edits", "Edits"),
    ],
)
async def test_named_refusals(path: str, name: str) -> None:
    """A user learns that the API is missing, and what there is instead, whatever the method."""
    async with edge_world() as world:
        for method in ("GET", "POST", "DELETE"):
            async with world.http.request(method, world.url + path) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (501, "not_implemented")
                assert f"does not have the {name} API" in error["message"]


async def test_unknown_paths_stay_unknown() -> None:
    """A typo is not taken for a missing API."""
    async with edge_world() as world:
        for path in ("/v1/audiobooks", "/v1/filesystem", "/audio", "/v1", "/v1/", "/v1/chat/embeddings"):
            async with world.http.get(world.url + path) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")


async def test_official_client_shows_the_reason() -> None:
    """Users of the official client read the sentence in its exception."""
    async with (
        edge_world() as world,
        openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError, match="does not have the Files API"):
            await client.files.list()
