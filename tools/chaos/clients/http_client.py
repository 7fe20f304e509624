"""Asks over HTTP, as a client that knows that servers die: it tries again what may be tried again, and takes resumable
streams up where they broke."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import socket
import time
from collections.abc import Sequence
from typing import Any, Final

import aiohttp

from tools.chaos.clients.questions import Door, Errand, Manner
from tools.chaos.clients.sse_reading import EventReader, error_in, take_body
from tools.chaos.clients.transcript import End, Transcript

MAX_TRIES: Final = 40
"""Connections for one answer, over all."""
_RETRY_SECONDS: Final = 0.3
_MAX_RETRY_AFTER_SECONDS: Final = 2.0
_SLOW_PIECE_BYTES: Final = 256
_SLOW_PAUSE_SECONDS: Final = 0.02
_PATHS: Final = {Door.CHAT: "/v1/chat/completions", Door.COMPLETION: "/v1/completions"}
_TAKEN_UP: Final = frozenset({Manner.RESUMABLE, Manner.FLAKY})
_NOT_NOW: Final = frozenset({429, 503})


@dataclasses.dataclass(frozen=True, slots=True)
class Doorway:
    """A proxy before the edges."""

    name: str
    url: str


class HttpClient:
    """Asks at any of the doorways. Use `async with`."""

    def __init__(self, doorways: Sequence[Doorway], model: str) -> None:
        self._doorways = doorways
        self._model = model

    async def __aenter__(self) -> HttpClient:
        # A connection of its own for each try, so that what breaks one breaks no other.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(
        self, errand: Errand, prompt_ids: Sequence[int], transcript: Transcript, rng: random.Random, name: str
    ) -> None:
        """Fills the transcript. `name`: unique; the Idempotency-Key. The caller sets the time limit."""
        await _Asking(
            self._session, self._doorways, errand, self._body(errand, prompt_ids), transcript, rng, name
        ).run()

    def _body(self, errand: Errand, prompt_ids: Sequence[int]) -> dict[str, Any]:
        question = errand.question
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
            "n": question.n,
        }
        if question.stop:
            body["stop"] = list(question.stop)
        if errand.manner is not Manner.WHOLE:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if errand.door is Door.CHAT:
            return body | {"messages": [{"role": "user", "content": question.prompt}]}
        return body | {"prompt": list(prompt_ids)}


class _Asking:
    """One errand."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        doorways: Sequence[Doorway],
        errand: Errand,
        body: dict[str, Any],
        transcript: Transcript,
        rng: random.Random,
        name: str,
    ) -> None:
        self._session = session
        self._doorways = doorways
        self._errand = errand
        self._body = body
        self._transcript = transcript
        self._rng = rng
        self._headers = {"Authorization": f"Bearer {name.partition('-')[0]}"}
        self._can_resume = errand.manner in _TAKEN_UP
        if self._can_resume:
            self._headers |= {"x-kvloom-resume": "on", "Idempotency-Key": name}
        self._breaks = list(errand.breaks)
        self._response_id = ""
        self._door = rng.choice(doorways)

    async def run(self) -> None:
        for _ in range(MAX_TRIES):
            self._transcript.door = self._door.name
            try:
                wait_seconds = await self._try_once()
            except aiohttp.ClientConnectorError:
                self._transcript.tell("no connection")
                self._transcript.end = End.UNREACHABLE
                wait_seconds = _RETRY_SECONDS
            except (aiohttp.ClientError, OSError) as error:
                self._note_break(type(error).__name__)
                # As usual clients do: what broke before its status line is asked again.
                wait_seconds = _RETRY_SECONDS if self._can_resume or not self._response_id else None
            if wait_seconds is None:
                return
            await asyncio.sleep(wait_seconds)
            if not self._response_id or self._rng.random() < 0.5:
                self._door = self._other_door()

    def _other_door(self) -> Doorway:
        return self._rng.choice(self._doorways)

    def _note_break(self, how: str) -> None:
        self._transcript.tell(f"broken: {how}")
        self._transcript.end = End.BROKEN
        self._transcript.num_breaks += 1

    async def _try_once(self) -> float | None:
        """Seconds until the next try; None when it is over. Raises aiohttp.ClientError, OSError."""
        transcript = self._transcript
        async with self._request() as response:
            transcript.tell(f"answered {response.status}")
            if response.status == 204:
                # Nothing more will come, and the end has not been seen.
                transcript.event_fault = transcript.event_fault or "the end is lost: 204 before [DONE]"
                return None
            if response.status != 200:
                return await self._refused(response)
            response_id = response.headers.get("x-kvloom-response-id", "")
            if response_id and response_id != self._response_id:
                if self._response_id or transcript.num_events:
                    transcript.start_over()
                self._response_id = response_id
                transcript.request_ids.append(response_id)
            if self._errand.manner is Manner.WHOLE:
                take_body(transcript, await response.json(), time.monotonic())
                return None
            return await self._read(response)

    def _request(self) -> Any:
        transcript, url = self._transcript, self._door.url + _PATHS[self._errand.door]
        if not (self._response_id and self._can_resume):
            transcript.tell(f"POST at {self._door.name}")
            return self._session.post(url, json=self._body, headers=self._headers)
        transcript.num_resumes += 1
        after = transcript.num_events
        transcript.tell(f"GET at {self._door.name} behind event {after}")
        headers = {"Authorization": self._headers["Authorization"]}
        params = {"stream": "true"}
        if after and self._rng.random() < 0.5:
            headers["Last-Event-ID"] = str(after)
        else:
            params["starting_after"] = str(after)
        return self._session.get(f"{url}/{self._response_id}", params=params, headers=headers)

    async def _refused(self, response: aiohttp.ClientResponse) -> float | None:
        transcript = self._transcript
        transcript.code, transcript.message = error_in(await response.read())
        transcript.code = transcript.code or str(response.status)
        retry_after = response.headers.get("Retry-After")
        transcript.end = End.REFUSED if response.status in _NOT_NOW else End.ERROR
        if retry_after is None:
            return None
        transcript.num_refusals += 1
        return min(float(retry_after), _MAX_RETRY_AFTER_SECONDS)

    async def _read(self, response: aiohttp.ClientResponse) -> float | None:
        transcript, manner = self._transcript, self._errand.manner
        reader = EventReader(transcript)
        max_events = transcript.num_events + self._breaks[0] if self._breaks else None
        if manner is Manner.SLOW and response.connection is not None and response.connection.transport is not None:
            sock = response.connection.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_PIECE_BYTES)
        while not reader.done and (max_events is None or transcript.num_events < max_events):
            if manner is Manner.SLOW:
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
        self._transcript.tell(f"left behind event {self._transcript.num_events}")
        if response.connection is not None and response.connection.transport is not None:
            response.connection.transport.abort()
        await asyncio.sleep(0)
        if self._can_resume:
            self._transcript.was_away = True
            return self._errand.away_seconds
        self._transcript.end = End.LEFT
        return None

    def _ended_early(self, reader: EventReader) -> float | None:
        """The stream was closed before its end."""
        transcript = self._transcript
        if reader.notice == "stream_taken_over":
            # Nobody else has its id, so it was this client itself, at another door.
            transcript.tell(f"told that it is read elsewhere, behind event {transcript.num_events}")
            transcript.num_takeovers += 1
            return _RETRY_SECONDS
        how = f"{reader.notice or 'no end'} behind event {transcript.num_events}"
        if self._can_resume:
            self._note_break(how)
            return _RETRY_SECONDS
        if reader.notice:
            transcript.end, transcript.code = End.ERROR, reader.notice
        else:
            self._note_break(how)
        return None
