"""`kvloom-lab bench conversations`: what an infinite cache would have, and texts that are the same in every run."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner

from lab.bench.conversations import play, user_message
from lab.bench.conversations_command import bench_conversations
from lab.bench.infinite_cache import CachedRequest, infinite_cache_tokens
from tools.failures import CommandError

BLOCK_SIZE = 4


def request(prompt: list[int], sent_at: float, *, num_output_tokens: int = 6, seconds: float = 1.0) -> CachedRequest:
    return CachedRequest(prompt, num_output_tokens, sent_at, sent_at + seconds / 2, sent_at + seconds)


def test_the_next_turn_finds_prompt_and_answer_in_whole_blocks():
    """10 prompt tokens and 5 of the 6 answered ones were computed: 15, that is three blocks of four."""
    first = request(list(range(10)), 0.0)
    second = request(list(range(30)), 2.0)
    assert infinite_cache_tokens([first, second], BLOCK_SIZE) == [0, 12]


def test_only_what_was_finished_when_a_request_was_sent_counts():
    """Before the first token there is nothing for others; before the end, only the prompt."""
    first = request(list(range(10)), 0.0)
    too_early, early, late = [request(list(range(30)), sent_at, seconds=100.0) for sent_at in (0.4, 0.6, 1.1)]
    assert infinite_cache_tokens([first, too_early, early, late], BLOCK_SIZE) == [0, 0, 8, 12]


def test_prefixes_are_shared_up_to_the_first_difference():
    """A common system prompt helps every conversation; what lies behind it only its own."""
    system = list(range(9))
    first = request([*system, 100, 101, 102, 103], 0.0)
    other = request([*system, 200, 201, 202, 203], 2.0)
    assert infinite_cache_tokens([first, other], BLOCK_SIZE) == [0, 8]


def test_the_last_token_is_always_computed():
    """Else a perfect repetition could never reach the bound."""
    first, again = request(list(range(8)), 0.0), request(list(range(8)), 2.0)
    assert infinite_cache_tokens([first, again], BLOCK_SIZE) == [0, 4]


def test_messages_are_fixed_and_all_different():
    """Runs can be compared, and no conversation reuses another's words."""
    messages = {user_message(conversation, turn) for conversation in range(30) for turn in range(6)}
    assert len(messages) == 180
    assert user_message(3, 2) == user_message(3, 2)
    assert all(60 <= len(message.split()) <= 100 for message in messages)


def test_an_unknown_policy_is_named_before_anything_starts():
    """A typing error must not cost a start of the fabric."""
    result = CliRunner().invoke(bench_conversations, ["--policies", "ect,nonsense"])
    assert result.exit_code == 2
    assert "nonsense" in result.output


async def play_against(*lines: str, status: int = 200) -> None:
    """Every request is answered with these lines."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body="\n".join(lines), status=status, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        url = f"http://127.0.0.1:{server.port}"
        await play(url, "m", num_conversations=2, num_turns=2, max_tokens=1, think_seconds=0)


async def test_a_refusal_a_failure_and_a_broken_answer_are_said_in_one_line():
    """The figures of a run in which requests failed would be worth nothing."""
    with pytest.raises(CommandError, match=r"refused a request \(429\): too many"):
        await play_against("too many", status=429)
    with pytest.raises(CommandError, match=r"failed a request.*shard_lost"):
        await play_against('data: {"error": {"code": "shard_lost"}}')
    with pytest.raises(CommandError, match="broke an answer off"):
        await play_against('data: {"choices": [{"delta": {"content": "Hi"}}]}')


async def test_a_fabric_that_is_not_there_is_said_in_one_line():
    """It may die while it is measured."""
    with pytest.raises(CommandError, match="did not answer"):
        await play("http://127.0.0.1:1", "m", num_conversations=2, num_turns=2, max_tokens=1, think_seconds=0)
