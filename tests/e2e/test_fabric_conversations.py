"""The default placement on real shards: conversations find their KV again."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.fabric import RunningFabric

NUM_CONVERSATIONS = 3
NUM_TURNS = 5
BLOCK_SIZE = 16
SYSTEM_PROMPT = "You explain crafts to curious people, in two or three short sentences and in plain words. " * 8
WORDS = "the old workshop keeps a record of every thread that passes over its wooden frame while rain falls".split()  # noqa: SIM905


async def converse(client: openai.AsyncOpenAI, conversation: int) -> tuple[int, int]:
    """How many prompt tokens the conversation's earlier turns had left in whole blocks, and how many of these were
    cached."""
    model = (await client.models.list()).data[0].id
    draw = random.Random(conversation)
    messages: list[Any] = [{"role": "system", "content": f"{conversation}: {SYSTEM_PROMPT}"}]
    num_left = num_possible = num_cached = 0
    for _ in range(NUM_TURNS):
        messages.append({"role": "user", "content": " ".join(draw.choices(WORDS, k=70))})
        answer = await client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=8)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        num_possible += num_left
        num_cached += min(num_left, usage.prompt_tokens_details.cached_tokens or 0)
        computed = usage.prompt_tokens + usage.completion_tokens - 1  # the last token is sampled, and not computed
        num_left = computed // BLOCK_SIZE * BLOCK_SIZE
    return num_possible, num_cached


async def converse_with(fabric: RunningFabric) -> list[tuple[int, int]]:
    async with openai.AsyncOpenAI(base_url=f"{fabric.http_url}/v1", api_key="none", max_retries=0) as client:
        return await asyncio.gather(*(converse(client, number) for number in range(NUM_CONVERSATIONS)))


def cached_share(model_dir: Path, folder: Path, policy: str) -> float:
    folder.mkdir()
    (folder / "kvloom.toml").write_text(f'[router.placement]\npolicy = "{policy}"\n')
    flags = ("--model", str(model_dir), "--shards", "2", "--config", str(folder / "kvloom.toml"))
    fabric = RunningFabric.start(folder / "data", *flags)
    try:
        figures = asyncio.run(converse_with(fabric))
    finally:
        fabric.stop()
    num_possible, num_cached = map(sum, zip(*figures, strict=True))
    return num_cached / num_possible


@pytest.mark.long
@pytest.mark.timeout(480)  # two fabrics are started, one after the other; a minute, or five without bf16 arithmetic
def test_conversations_find_nearly_all_that_they_have_left(model_dir: Path, tmp_path: Path) -> None:
    """What the fabric is for: at least 90% of it with the default policy, and more than by turns; two torch shards,
    real processes, and nothing left of them."""
    by_default = cached_share(model_dir, tmp_path / "ect", "ect")
    assert by_default >= 0.9
    assert by_default > cached_share(model_dir, tmp_path / "round_robin", "round_robin")
