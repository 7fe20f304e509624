"""A user over gRPC, through the Python SDK."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Final

from kvloom.client.client import Client
from kvloom.client.generate_request import GenerateOptions
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FinishReason
from lab.chaos.clients.questions import Behaviour, Endpoint, UserCall
from lab.chaos.clients.transcript import AnswerEnd, Transcript

MAX_TRIES: Final = 40
RETRY_SECONDS: Final = 0.5
_FINISH_REASONS: Final = {FINISH_REASON_STOP: "stop", FINISH_REASON_LENGTH: "length"}


class SdkClient:
    """Keeps several connections to the address that the routers share. Use `async with`."""

    def __init__(self, address: str, num_connections: int, api_key: str = "", other_cells: str = "") -> None:
        self._clients = [
            Client(address, client_id=f"chaos-{number}", api_key=api_key, other_cells=other_cells or ())
            for number in range(num_connections)
        ]

    async def __aenter__(self) -> SdkClient:
        for client in self._clients:
            await client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            await client.close()

    async def ask(
        self, call: UserCall, prompt_ids: Sequence[int], transcript: Transcript, rng: random.Random, name: str
    ) -> None:
        """Fill the transcript. `name` is the id of the request. The caller sets the time limit."""
        for attempt in range(MAX_TRIES):
            # An id stays in use until the router has released it.
            request_id = f"{name}.{attempt}" if attempt else name
            transcript.request_ids.append(request_id)
            try:
                await self._ask(rng.choice(self._clients), call, prompt_ids, transcript, request_id)
            except KvloomError as error:
                _note_failure(transcript, error)
            if transcript.end is not AnswerEnd.REFUSED or transcript.code == "insufficient_quota":
                return
            transcript.num_refusals += 1
            await asyncio.sleep(RETRY_SECONDS)

    async def _ask(
        self, client: Client, call: UserCall, prompt_ids: Sequence[int], transcript: Transcript, name: str
    ) -> None:
        question = call.question
        leave_after = call.breaks[0] if call.behaviour is Behaviour.LEAVER else None
        answer = client.generate(**self._options(call, prompt_ids, name))
        transcript.code = ""
        num_prompt_tokens, num_output_tokens, num_open = 0, 0, question.n
        try:
            async for delta in answer:
                transcript.num_events += 1
                if delta.text or delta.token_ids:  # not a refusal, which is an event as well
                    transcript.record_piece(time.monotonic())
                received = transcript.choices[delta.index]
                received.text += delta.text
                if received.token_ids is not None:
                    received.token_ids.extend(delta.token_ids)
                if delta.finish is not None:
                    num_open -= 1
                    transcript.limited_by = delta.finish.limited_by or transcript.limited_by
                    received.finish_reason = _FINISH_REASONS.get(delta.finish.reason)
                    if received.finish_reason is None:
                        transcript.end, transcript.code = AnswerEnd.ERROR, FinishReason.Name(delta.finish.reason)
                    num_prompt_tokens = delta.finish.num_prompt_tokens
                    num_output_tokens += delta.finish.num_output_tokens
                elif transcript.num_events == leave_after:
                    transcript.end = AnswerEnd.LEFT
                    return
        finally:
            await answer.aclose()
        if not num_open and not transcript.code:
            transcript.end = AnswerEnd.COMPLETE
            transcript.num_prompt_tokens, transcript.num_output_tokens = num_prompt_tokens, num_output_tokens

    def _options(self, call: UserCall, prompt_ids: Sequence[int], name: str) -> GenerateOptions:
        question = call.question
        options: GenerateOptions = {
            "model": question.model,
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
            "n": question.n,
            "stop": question.stop,
            "request_id": name,
            "resumable": call.behaviour is Behaviour.RESUMABLE,
        }
        if call.endpoint is Endpoint.SDK_TOKENS:
            options["token_ids"] = prompt_ids
        else:
            options["messages"] = [{"role": "user", "content": question.prompt}]
        return options


def _note_failure(transcript: Transcript, error: KvloomError) -> None:
    transcript.code, transcript.message = error.kind.openai_code or error.reason_name.lower(), error.message
    if transcript.first_at is None and error.kind.http_status in (429, 503):
        transcript.end = AnswerEnd.REFUSED
    else:
        is_lost = error.reason == ErrorReason.ERROR_REASON_ROUTER_LOST
        transcript.end = AnswerEnd.BROKEN if is_lost else AnswerEnd.ERROR
