"""Asks over gRPC, through the Python SDK."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Final

from kvloom.client import Client
from kvloom.errors import KvloomError
from kvloom.generate_request import GenerateOptions
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from tools.chaos.questions import Door, Errand, Manner
from tools.chaos.transcript import End, Transcript

_FINISH_REASONS: Final = {FINISH_REASON_STOP: "stop", FINISH_REASON_LENGTH: "length"}


class SdkClient:
    """A connection to each router. Use `async with`."""

    def __init__(self, addresses: Sequence[str], model: str) -> None:
        self._clients = [Client(address, client_id="chaos") for address in addresses]
        self._model = model

    async def __aenter__(self) -> SdkClient:
        for client in self._clients:
            await client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            await client.close()

    async def ask(
        self, errand: Errand, prompt_ids: Sequence[int], transcript: Transcript, rng: random.Random, name: str
    ) -> None:
        """Fills the transcript. `name` is the request's id. The caller sets the time limit."""
        transcript.request_ids.append(name)
        try:
            await self._ask(rng.choice(self._clients), errand, prompt_ids, transcript, name)
        except KvloomError as error:
            transcript.code, transcript.message = error.kind.openai_code or "", error.message
            is_broken = error.reason == ErrorReason.ERROR_REASON_ROUTER_LOST and transcript.first_at is not None
            is_refused = error.kind.http_status in (429, 503) and transcript.first_at is None
            transcript.end = End.BROKEN if is_broken else End.REFUSED if is_refused else End.ERROR

    async def _ask(
        self, client: Client, errand: Errand, prompt_ids: Sequence[int], transcript: Transcript, name: str
    ) -> None:
        question = errand.question
        leave_after = errand.breaks[0] if errand.manner is Manner.LEAVER else None
        answer = client.generate(**self._options(errand, prompt_ids, name))
        num_prompt_tokens, num_output_tokens, num_open = 0, 0, question.n
        try:
            async for delta in answer:
                transcript.num_events += 1
                transcript.note_news(time.monotonic())
                seen = transcript.choices[delta.index]
                seen.text += delta.text
                if seen.token_ids is not None:
                    seen.token_ids.extend(delta.token_ids)
                if delta.finish is not None:
                    num_open -= 1
                    seen.finish_reason = _FINISH_REASONS.get(delta.finish.reason, "")
                    num_prompt_tokens = delta.finish.num_prompt_tokens
                    num_output_tokens += delta.finish.num_output_tokens
                elif transcript.num_events == leave_after:
                    transcript.end = End.LEFT
                    return
        finally:
            await answer.aclose()
        if not num_open:
            transcript.end = End.COMPLETE
            transcript.num_prompt_tokens, transcript.num_output_tokens = num_prompt_tokens, num_output_tokens

    def _options(self, errand: Errand, prompt_ids: Sequence[int], name: str) -> GenerateOptions:
        question = errand.question
        options: GenerateOptions = {
            "model": self._model,
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
            "n": question.n,
            "stop": question.stop,
            "request_id": name,
        }
        if errand.door is Door.SDK_TOKENS:
            options["token_ids"] = prompt_ids
        else:
            options["messages"] = [{"role": "user", "content": question.prompt}]
        return options
