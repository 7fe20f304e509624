"""An engine that answers with the text that its prompt tells it to write, in parts of a given length.

The prompt spells that text in letters from a to p, two for each byte, which no rule reads. So the model's answer has a
text that the prompt has not, and the answer is what is screened.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from array import array
from collections.abc import AsyncIterator, Iterator
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvloom_common.text.chat_template import ChatTemplate
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
MAX_PARTS: Final = 1024
"""So many parts a step has at most."""
OTHERWISE: Final = "ok"
"""The answer to a prompt that tells nothing."""
_END: Final = "<|end|>"
_TEMPLATE: Final = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }} {{ m.reasoning_content or '' }} {{ m.content }}"
    "{% for call in m.tool_calls or [] %} {{ call.id }} {{ call.function | tojson }}{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}"
)
"""Shows the model all that stands in a request's messages and tools."""
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


def byte_tokenizer() -> ModelTokenizer:
    """A token for every byte, so that any text can be written in any parts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: token_id for token_id, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END, normalized=False)])
    ends = frozenset({len(alphabet)})  # the token that was added behind those of the bytes
    return ModelTokenizer(tokenizer, template=ChatTemplate(_TEMPLATE, {}), eos_token_ids=ends)


class EchoEngine:
    """See the module. A step has the next part of every answer, or of as many as fit; then it is the others' turn."""

    def __init__(self, tokenizer: ModelTokenizer, step_seconds: float = 0.0) -> None:
        """`step_seconds`: the pause between steps."""
        self._tokenizer = tokenizer
        self._step_seconds = step_seconds
        self.num_submitted = 0
        self.may_write = asyncio.Event()
        """While it is not set, nothing is written."""
        self.may_write.set()
        self.info = EngineInfo(
            engine="echo",
            model=MODEL,
            block_size=16,
            num_blocks=2**20,
            max_batch=2**14,
            max_model_len=16_384,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            capabilities=_CAPABILITIES,
            prefill_tokens_per_second=1e9,  # it computes nothing
            decode_step_seconds=max(step_seconds, 0.001),
            embedding_size=len(_EMBEDDING),
        )
        self._next = StepOutput()
        """Starts and ends that the next step has."""
        self._parts: dict[str, Iterator[list[int]]] = {}
        """By request, what is still to be written."""
        self._wake = asyncio.Event()
        self._is_open = True

    async def start(self) -> None:
        """There is nothing to load."""

    def submit(self, request: EngineRequest) -> None:
        """Let the answer take part in the next step."""
        name = request.request_id
        start = SequenceStart(name, 0, 0.0)
        if request.pooling is not None:
            end = SequenceEnd(name, SequenceFinishReason.STOP, embedding=_EMBEDDING.tobytes())
            self._next.ends.append(end)
        else:
            prompt = self._tokenizer.decode(request.prompt_token_ids)
            parts = [self._tokenizer.encode_now(part) for part in parts_told(prompt)]
            if sum(map(len, parts)) > request.max_tokens:
                raise EngineError("the answer is longer than max_tokens")
            self._parts[name] = iter(parts)
        self._next.starts.append(start)
        self.num_submitted += 1
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """End the answer with the next step."""
        if self._parts.pop(request_id, None) is not None:
            self._next.ends.append(SequenceEnd(request_id, SequenceFinishReason.CANCELLED))

    async def steps(self) -> AsyncIterator[StepOutput]:
        while self._is_open:
            await self._wake.wait()
            await self.may_write.wait()
            yield self._step()
            await asyncio.sleep(self._step_seconds)
            if not self._parts:
                self._wake.clear()

    def _step(self) -> StepOutput:
        output, self._next = self._next, StepOutput()
        for name in list(itertools.islice(self._parts, MAX_PARTS)):
            parts = self._parts.pop(name)
            part = next(parts, None)
            if part is None:
                output.ends.append(SequenceEnd(name, SequenceFinishReason.STOP))
            else:
                self._parts[name] = parts
                output.request_ids.append(name)
                output.token_ids.append(part)
        return output

    async def close(self) -> None:
        self._is_open = False
        self._wake.set()
        self.may_write.set()
