"""What was hidden from the model is in clear nowhere where it is stored, and clients get it back from there: stored
responses and their input, events of background responses, conversations, files, the journal of resumable answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from edge_http.recovery.edge_membership import join_edges
from kvloom.errors import KvloomError
from kvloom_common.config import KvloomConfig, RedisConfig
from kvloom_common.replay.stream_retention import ResumeSettings
from kvloom_common.trust.fabric_trust import NO_SECRET
from kvloom_common.trust.secret import FabricSecret
from kvloom_common.trust.shared_secret import SharedSecret
from kvloom_common.trust.state_seal import StateSealer
from orchestrator.files.contents import FileContents
from orchestrator.files.sealed import FRAME_BYTES, TenantContents
from orchestrator.seal import BodySeal
from tests.fakes.edge_peers import die, published
from tests.fakes.edge_world import chat_body, edge_world
from tests.fakes.masking_link import MAIL, MaskingLink
from tests.fakes.resume_world import client
from tests.fakes.scripted_answer import PARSED
from tests.fakes.state_world import StateWorld, state_world
from tests.waiting import eventually

SEAL = BodySeal(StateSealer(b"the fabric's"), seals=True)
TOOL = {"type": "function", "function": {"name": "send", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "send", "arguments": json.dumps({"to": MAIL})}}
HISTORY: list[Any] = [
    {"role": "user", "content": f"Ask {MAIL}"},
    {"role": "assistant", "content": None, "reasoning_content": f"Who is {MAIL}?", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": f"{MAIL} said no"},
]


def written(placeholder: str) -> list[str]:
    """Reasoning, text and a call, with the placeholder in each, cut into pieces."""
    call = f"<tool_call>\n{json.dumps({'name': 'send', 'arguments': {'to': placeholder}})}\n</tool_call>"
    text = f"<think>It is {placeholder}.</think>I ask {placeholder}.{call}"
    return [text[start : start + 7] for start in range(0, len(text), 7)]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[StateWorld]:
    link = MaskingLink(tmp_path, written)
    async with state_world(f"sqlite:///{tmp_path}/state.db", tmp_path, seal=SEAL, link=link, output=PARSED) as started:
        started.edge.edge.config.masks_prompts = True
        yield started


def stored_in(folder: Path) -> bytes:
    """All that is in the files of a folder, as it is and as hex and JSON would show it."""
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


async def test_the_database_and_the_files_have_nothing_in_clear(world: StateWorld, tmp_path: Path) -> None:
    """Whatever API has made it: it is read back whole, and no byte of the data directory has it. Another tenant's key
    does not open it."""
    api = world.client
    more: Any = {"model": "tiny", "tools": [{"type": "function", **TOOL["function"]}], "instructions": f"For {MAIL}."}
    made = await api.responses.create(input=f"Ask {MAIL}", **more)
    assert MAIL in made.output_text
    assert await api.responses.retrieve(made.id) == made
    conversation = await api.conversations.create(items=[{"role": "user", "content": f"I am {MAIL}"}])
    async with api.responses.stream(input=f"Ask {MAIL}", conversation=conversation.id, **more) as stream:
        final = await stream.get_final_response()
    assert (await api.responses.retrieve(final.id)).output_text == final.output_text == f"I ask {MAIL}."
    kept = [item.model_dump_json() async for item in api.conversations.items.list(conversation.id)]
    assert all(MAIL in item for item in kept)
    assert {json.loads(item)["type"] for item in kept} == {"message", "reasoning", "function_call"}
    chat = await api.chat.completions.create(model="tiny", messages=HISTORY, tools=[TOOL], store=True)
    again = (await api.chat.completions.retrieve(chat.id)).model_dump_json()
    assert again.count(MAIL) == 3  # the text, the reasoning, and the call
    messages = [message.model_dump_json() async for message in api.chat.completions.messages.list(chat.id)]
    assert sum(message.count(MAIL) for message in messages) == json.dumps(HISTORY).count(MAIL)
    async with world.jobs():
        begun = await api.responses.create(input=f"Ask {MAIL}", background=True, **more)

        async def is_over() -> bool:
            return (await api.responses.retrieve(begun.id)).status == "completed"

        await eventually(is_over, "the end of the response")
        line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "tiny"}}
        line["body"]["messages"] = HISTORY
        file = await api.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = await api.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        async def output() -> str | None:
            return (await api.batches.retrieve(batch.id)).output_file_id

        output_id = await eventually(output, "the output of the batch")
    events = [event.model_dump_json() async for event in await api.responses.retrieve(begun.id, stream=True)]
    assert any(MAIL in event for event in events)
    assert output_id is not None
    for file_id in (file.id, output_id):
        assert MAIL in (await api.files.content(file_id)).text
    assert all("@" not in prompt for prompt in world.edge.link.prompts)
    stored = stored_in(tmp_path)
    assert stored.count(b"\x01") > 0
    for clear in (MAIL, MAIL.partition("@")[0] + "@", "I ask", "Who is"):
        assert clear.encode() not in stored, clear


async def test_what_was_stored_before_is_still_read(tmp_path: Path) -> None:
    """A fabric that begins to hide personal data does not lose what it has, nor does one that ends it."""
    link = MaskingLink(tmp_path, written)
    url = f"sqlite:///{tmp_path}/state.db"
    ids: list[str] = []
    for seals in (False, True, False):
        seal = BodySeal(StateSealer(b"the fabric's"), seals=seals)
        async with state_world(url, tmp_path, seal=seal, link=link, output=PARSED) as world:
            world.edge.edge.config.masks_prompts = True
            ids.append((await world.client.responses.create(model="tiny", input=f"Ask {MAIL}")).id)
            for response_id in ids:
                assert MAIL in (await world.client.responses.retrieve(response_id)).output_text
    async with state_world(url, tmp_path, seal=BodySeal(StateSealer(b"another's"), seals=True), link=link) as world:
        for response_id, status in zip(ids, (200, 409, 200), strict=True):
            path = f"{world.edge.url}/v1/responses/{response_id}"
            headers = {"Authorization": f"Bearer {world.client.api_key}"}
            async with world.edge.http.get(path, headers=headers) as answer:
                assert answer.status == status


@pytest.mark.parametrize("size", [1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES + 5])
async def test_a_part_of_a_sealed_file_is_read_by_itself(tmp_path: Path, size: int) -> None:
    """Batches read one line of gigabytes. A frame that was changed or moved is refused, and so is another tenant."""
    store = FileContents(KvloomConfig().orchestrator, tmp_path)
    contents = TenantContents(store, SEAL)
    content = bytes(range(256)) * (size // 256 + 1)
    content, file_id = content[:size], contents.id_prefix("file-") + "ab"

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, size, 5000):
            yield content[start : start + 5000]

    await contents.write("acme", file_id, pieces())
    assert b"".join([piece async for piece in contents.read("acme", file_id)]) == content
    for offset in {0, size // 2, size - 1}:
        for num_bytes in {1, min(100, size - offset), size - offset}:
            part = await contents.read_part("acme", file_id, offset, num_bytes)
            assert part == content[offset : offset + num_bytes]
    with pytest.raises(KvloomError):
        await contents.read_part("globex", file_id, 0, 1)


async def test_an_encrypted_journal_replays_it(redis_url: str, tmp_path: Path) -> None:
    """With the fabric's secret, another edge replays an answer that has ended: the journal has it encrypted."""
    secret = SharedSecret(FabricSecret.draw(), ("edge",), "edge-0")
    dump, first, again = await _resumed(redis_url, tmp_path, secret)
    assert MAIL in first
    assert again == first
    assert MAIL.encode() not in dump


async def test_a_journal_in_clear_does_not_get_it(redis_url: str, tmp_path: Path) -> None:
    """Without a secret, only the edge that has made the answer has it; with its end, the answer is gone."""
    dump, first, again = await _resumed(redis_url, tmp_path, NO_SECRET)
    assert MAIL in first
    assert "no such response" in again
    assert MAIL.encode() not in dump


async def _resumed(redis_url: str, folder: Path, trust: Any) -> tuple[bytes, str, str]:
    """What Redis has of an answer, the answer, and what its client gets from another edge once the first is dead."""
    settings = RedisConfig(url=redis_url, key_prefix=f"masked-{trust.has_secret}")
    config = KvloomConfig(resume=ResumeSettings())
    async with (
        edge_world(config, MaskingLink(folder, written), output=PARSED) as one,
        edge_world(config, MaskingLink(folder, written), output=PARSED) as two,
    ):
        memberships = []
        for world in (one, two):
            world.edge.config.masks_prompts = True
            peers = join_edges(world.edge, settings, world.url.removeprefix("http://"), trust)
            assert peers is not None
            memberships.append(peers)
        try:
            streamed = client(one)
            await streamed.begin(chat_body(stream=True, messages=HISTORY, tools=[TOOL]))
            first = b"".join(streamed.events).decode()
            await asyncio.gather(*map(published, memberships))
            dump = await _dump(settings)
            await die(one, memberships[0])
            again = client(two)
            again.response_id = streamed.response_id
            await again.resume()
        finally:
            for peers in memberships:
                await peers.close()
    return dump, first, b"".join([*again.events, *again.notices]).decode()


async def _dump(settings: RedisConfig) -> bytes:
    found: list[Any] = []
    async with redis.asyncio.from_url(settings.url) as connection:
        async for key in connection.scan_iter(f"{settings.key_prefix}*"):
            kind = await connection.type(key)
            match kind:
                case b"string":
                    found.append((key, await connection.get(key)))
                case b"hash":
                    found.append((key, await connection.hgetall(key)))
                case b"stream":
                    found.append((key, await connection.xrange(key)))
                case _:
                    found.append((key, await connection.smembers(key)))
    assert found
    return repr(found).encode()
