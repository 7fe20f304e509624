"""An edge whose model decides by itself to call a tool: no small model does so reliably.

To a question with tools it answers with a thought and a call, and once it sees the call's result, with text.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvloom_common.parsers.spec import ParserSpec
from tests.fakes.edge_world import edge_world
from tests.fakes.fake_router_link import FakeRequest, FakeRouterLink, answer
from tests.fakes.tiny_tokenizer import model_tokenizer

CALL = ["<think>I have to ", "look.</think>", "<tool_call>", '{"name": "get_weather", "argu', 'ments": {"city": "Os']
CALL += ['lo", "unit": "C"}}', "</tool_call>"]
RESULT = "Snow."
ANSWER = ["It snows ", "in Oslo."]


def play(request: FakeRequest) -> None:
    prompt = model_tokenizer().decode(request.request.prompt_token_ids)
    answer(*(ANSWER if RESULT in prompt else CALL))(request)


@asynccontextmanager
async def scripted_edge() -> AsyncIterator[str]:
    """Yields its URL. The model is `tiny`."""
    link = FakeRouterLink()
    link.script = play
    async with edge_world(link=link, output=ParserSpec(tools="hermes", reasoning="qwen3")) as world:
        yield world.url
