"""A user over HTTP who expects servers to die: it retries what may be retried, and resumes resumable streams where they
broke."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import aiohttp

from lab.chaos.clients.questions import Behaviour, Endpoint, UserCall
from lab.chaos.clients.sse_reading import EventReader, error_in, take_body
from lab.chaos.clients.transcript import AnswerEnd, Transcript

MAX_TRIES: Final = 40
"""The largest number of connections for one answer."""
_RETRY_SECONDS: Final = 0.3
_MAX_RETRY_AFTER_SECONDS: Final = 2.0
_SLOW_PIECE_BYTES: Final = 256
_SLOW_PAUSE_SECONDS: Final = 0.02
PATHS: Final = {
    Endpoint.CHAT: "/v1/chat/completions",
    Endpoint.COMPLETION: "/v1/completions",
    Endpoint.RESPONSE: "/v1/responses",
}
_RESUMED: Final = frozenset({Behaviour.RESUMABLE, Behaviour.FLAKY})
_REJECTIONS: Final = frozenset({429, 503})


class HttpClient:
    """Sends requests to any of the edges. `edge_urls` maps the name of a proxy to its URL. Use `async with`."""

    def __init__(self, edge_urls: Mapping[str, str]) -> None:
        self._edge_urls = edge_urls

    async def __aenter__(self) -> HttpClient:
        # Every try has a connection of its own, so that a broken connection affects no other answer.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(
        self,
        call: UserCall,
        prompt_ids: Sequence[int],
        transcript: Transcript,
        rng: random.Random,
        name: str,
        key: Callable[[], str] | None = None,
    ) -> None:
        """Fill the transcript. `name` must be unique; it is the Idempotency-Key. `key` returns the user's key, which
        may be replaced at any time; None: any name will do. The caller sets the time limit."""
        body = self._body(call, prompt_ids)
        await _HttpCall(self._session, self._edge_urls, call, body, transcript, rng, name, key).run()

    async def stored_response(self, response_id: str, user: str) -> tuple[int, dict[str, Any]]:
        """Returns the status and the body for a response of that user; 0: there is no answer."""
        url = f"{next(iter(self._edge_urls.values()))}{PATHS[Endpoint.RESPONSE]}/{response_id}"
        try:
            async with self._session.get(url, headers={"Authorization": f"Bearer {user}"}) as answer:
                return answer.status, await answer.json()
        except (aiohttp.ClientError, OSError):
            return 0, {}

    def _body(self, call: UserCall, prompt_ids: Sequence[int]) -> dict[str, Any]:
        question = call.question
        if call.endpoint is Endpoint.RESPONSE:
            return {
                "model": question.model,
                "input": question.prompt,
                "max_output_tokens": question.max_tokens,
                "temperature": question.temperature,
                "stream": call.behaviour is not Behaviour.WHOLE,
                "background": call.behaviour in _RESUMED,
                "previous_response_id": question.previous_response_id or None,
            }
        body: dict[str, Any] = {
            "model": question.model,
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
            "n": question.n,
        }
        if question.stop:
            body["stop"] = list(question.stop)
        if call.behaviour is not Behaviour.WHOLE:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if call.endpoint is Endpoint.CHAT:
            return body | {"messages": [{"role": "user", "content": question.prompt}]}
        return body | {"prompt": list(prompt_ids)}


class _HttpCall:
    """One call, over any number of connections."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        edge_urls: Mapping[str, str],
        call: UserCall,
        body: dict[str, Any],
        transcript: Transcript,
        rng: random.Random,
        name: str,
        key: Callable[[], str] | None,
    ) -> None:
        self._session, self._edge_urls, self._call, self._body = session, edge_urls, call, body
        self._transcript, self._rng = transcript, rng
        self._has_own_key = key is not None
        self._key = key or (lambda: name.partition("-")[0])
        self._headers: dict[str, str] = {}
        self._can_resume = call.behaviour in _RESUMED
        if self._can_resume and call.endpoint is not Endpoint.RESPONSE:
            self._headers = {"x-kvloom-resume": "on", "Idempotency-Key": name}
        self._breaks = list(call.breaks)
        self._response_id = ""
        self._edge = rng.choice(list(edge_urls))

    async def run(self) -> None:
        for _ in range(MAX_TRIES):
            try:
                wait_seconds = await self._try_once()
            except aiohttp.ClientConnectorError:
                self._transcript.log("no connection")
                self._transcript.end = AnswerEnd.UNREACHABLE
                wait_seconds = _RETRY_SECONDS
            except (aiohttp.ClientError, OSError) as error:
                self._note_break(type(error).__name__)
                # Like usual clients, retry what broke before its status line.
                wait_seconds = _RETRY_SECONDS if self._can_resume or not self._response_id else None
            if wait_seconds is None:
                return
            await asyncio.sleep(wait_seconds)
            if not self._response_id or self._rng.random() < 0.5:
                self._edge = self._rng.choice(list(self._edge_urls))

    def _note_break(self, how: str) -> None:
        self._transcript.log(f"broken: {how}")
        self._transcript.end = AnswerEnd.BROKEN
        self._transcript.num_breaks += 1

    async def _try_once(self) -> float | None:
        """Returns the seconds until the next try, or None at the end. Raises aiohttp.ClientError or OSError."""
        transcript = self._transcript
        async with self._request() as response:
            transcript.log(f"answered {response.status}")
            if response.status == 204:
                # Nothing more will be sent, but the end was not received.
                transcript.event_fault = transcript.event_fault or "the end is lost: 204 before [DONE]"
                return None
            if response.status != 200:
                return await self._note_rejection(response)
            transcript.limited_by = response.headers.get("x-kvloom-limited-by", transcript.limited_by)
            response_id = response.headers.get("x-kvloom-response-id", "")
            if response_id and response_id != self._response_id:
                if self._response_id or transcript.num_events:
                    transcript.start_over()
                self._response_id = response_id
                transcript.request_ids.append(response_id)
            if self._call.behaviour is Behaviour.WHOLE:
                take_body(transcript, await response.json(), time.monotonic())
                return None
            return await self._read(response)

    def _request(self) -> Any:
        transcript, url = self._transcript, self._edge_urls[self._edge] + PATHS[self._call.endpoint]
        authorization = {"Authorization": f"Bearer {self._key()}"}
        if not (self._response_id and self._can_resume):
            transcript.log(f"POST at {self._edge}")
            return self._session.post(url, json=self._body, headers=self._headers | authorization)
        transcript.num_resumes += 1
        after = transcript.num_events
        transcript.log(f"GET at {self._edge} after event {after}")
        headers = authorization
        params = {"stream": "true"}
        if after and self._rng.random() < 0.5:
            headers["Last-Event-ID"] = str(after)
        elif self._call.endpoint is not Endpoint.RESPONSE:
            params["starting_after"] = str(after)
        elif after:
            params["starting_after"] = str(after - 1)  # these are counted from 0
        return self._session.get(f"{url}/{self._response_id}", params=params, headers=headers)

    async def _note_rejection(self, response: aiohttp.ClientResponse) -> float | None:
        transcript = self._transcript
        transcript.code, transcript.message = error_in(await response.read())
        transcript.code = transcript.code or str(response.status)
        if response.status == 401 and self._has_own_key:
            # It may have been replaced just now, or be so new that this edge has not heard of it.
            transcript.num_denials += 1
            transcript.end = AnswerEnd.REFUSED
            return _RETRY_SECONDS
        retry_after = response.headers.get("Retry-After")
        transcript.end = AnswerEnd.REFUSED if response.status in _REJECTIONS else AnswerEnd.ERROR
        if retry_after is None:
            return None
        transcript.num_refusals += 1
        return min(float(retry_after), _MAX_RETRY_AFTER_SECONDS)

    async def _read(self, response: aiohttp.ClientResponse) -> float | None:
        transcript, behaviour = self._transcript, self._call.behaviour
        reader = EventReader(transcript)
        max_events = transcript.num_events + self._breaks[0] if self._breaks else None
        if (
            behaviour is Behaviour.SLOW
            and response.connection is not None
            and response.connection.transport is not None
        ):
            sock = response.connection.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_PIECE_BYTES)
        while not reader.done and (max_events is None or transcript.num_events < max_events):
            if behaviour is Behaviour.SLOW:
                piece = await response.content.read(_SLOW_PIECE_BYTES)
                await asyncio.sleep(_SLOW_PAUSE_SECONDS)
            else:
                piece = await response.content.readany()
            if not piece:
                break
            reader.feed(piece, time.monotonic(), max_events)
        if reader.done:
            return None
        if max_events is not None and transcript.num_events >= max_events:
            return await self._break_off(response)
        return self._ended_early(reader)

    async def _break_off(self, response: aiohttp.ClientResponse) -> float | None:
        self._breaks.pop(0)
        self._transcript.log(f"left after event {self._transcript.num_events}")
        if response.connection is not None and response.connection.transport is not None:
            response.connection.transport.abort()
        await asyncio.sleep(0)
        if self._can_resume:
            self._transcript.was_away = True
            return self._call.away_seconds
        self._transcript.end = AnswerEnd.LEFT
        return None

    def _ended_early(self, reader: EventReader) -> float | None:
        """Handle a stream that was closed before its end."""
        transcript = self._transcript
        if reader.notice == "stream_taken_over":
            # No other client has the id, so this client itself has resumed the stream at another edge.
            transcript.log(f"closed because it is read elsewhere, after event {transcript.num_events}")
            transcript.num_takeovers += 1
            return _RETRY_SECONDS
        how = f"{reader.notice or 'no end'} after event {transcript.num_events}"
        if self._can_resume:
            self._note_break(how)
            return _RETRY_SECONDS
        if reader.notice:
            transcript.end, transcript.code = AnswerEnd.ERROR, reader.notice
        else:
            self._note_break(how)
        return None
