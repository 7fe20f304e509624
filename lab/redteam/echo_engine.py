"""An engine that answers with the text that its prompt tells it to write, in parts of a given length.

The prompt spells that text in letters from a to p, two for each byte, which no rule reads. So the model's answer has a
text that the prompt has not, and the answer is what is screened.
"""

from __future__ import annotations

import asyncio
import random
import re
from array import array
from collections.abc import AsyncIterator, Iterator
from typing import Final

from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import (
    Capability,
    EngineError,
    EngineInfo,
    EngineRequest,
    SequenceEnd,
    SequenceFinishReason,
    SequenceStart,
    StepOutput,
)

MODEL: Final = "echo"
OTHERWISE: Final = "ok"
"""The answer to a prompt that tells nothing."""
_TOLD: Final = re.compile(r"write (\d+) ([a-p]+)\.")
_FIRST_LETTER: Final = ord("a")
_EMBEDDING: Final = array("f", [1.0, 0.0, 0.0, 0.0])
_CAPABILITIES: Final = frozenset({Capability.GENERATE, Capability.EMBED, Capability.RERANK, Capability.SCORE})


def told_to_write(text: str, max_part_chars: int) -> str:
    """A prompt that lets the engine answer with this text, in parts of 1 to `max_part_chars` characters; 0: at once."""
    letters = "".join(chr(_FIRST_LETTER + half) for byte in text.encode() for half in divmod(byte, 16))
    return f"write {max_part_chars} {letters}."


def parts_told(prompt: str) -> Iterator[str]:
    """The answer to a prompt."""
    told = _TOLD.search(prompt)
    if told is None:
        yield OTHERWISE
        return
    halves = [ord(letter) - _FIRST_LETTER for letter in told[2]]
    text = bytes(16 * high + low for high, low in zip(halves[::2], halves[1::2], strict=True)).decode()
    most, rng, start = int(told[1]) or len(text), random.Random(told[2]), 0
    while start < len(text):
        end = start + (most if told[1] == "0" else rng.randint(1, most))
        yield text[start:end]
        start = end


class EchoEngine:
    """See the module. Each part is one step."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self.info = EngineInfo(
            engine="echo",
            model=MODEL,
            block_size=16,
            num_blocks=8192,
            max_batch=64,
            max_model_len=16_384,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            capabilities=_CAPABILITIES,
            embedding_size=len(_EMBEDDING),
        )
        self._outputs: asyncio.Queue[StepOutput | None] = asyncio.Queue()

    async def start(self) -> None:
        """There is nothing to load."""

    def submit(self, request: EngineRequest) -> None:
        """Queue all steps of the answer."""
        name = request.request_id
        start = SequenceStart(name, 0, 0.0)
        if request.pooling is not None:
            end = SequenceEnd(name, SequenceFinishReason.STOP, embedding=_EMBEDDING.tobytes())
            self._outputs.put_nowait(StepOutput(starts=[start], ends=[end]))
            return
        prompt = self._tokenizer.decode(request.prompt_token_ids)
        steps = [self._tokenizer.encode_now(part) for part in parts_told(prompt)]
        if sum(map(len, steps)) > request.max_tokens:
            raise EngineError("the answer is longer than max_tokens")
        for number, token_ids in enumerate(steps):
            self._outputs.put_nowait(StepOutput([name], [token_ids], starts=[] if number else [start]))
        self._outputs.put_nowait(StepOutput(ends=[SequenceEnd(name, SequenceFinishReason.STOP)]))

    def cancel(self, request_id: str) -> None:
        """The answer's end is queued already."""

    async def steps(self) -> AsyncIterator[StepOutput]:
        while (output := await self._outputs.get()) is not None:
            yield output
            await asyncio.sleep(0)

    async def close(self) -> None:
        self._outputs.put_nowait(None)
