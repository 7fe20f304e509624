"""A safety service that is killed, hangs and sends garbage, and notes what it has judged."""

from __future__ import annotations

import asyncio
import random
import resource
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc

from kvloom.v1.safety_service_pb2 import DECISION_ALLOW, DESCRIPTOR, ScreenRequest, ScreenResponse
from kvloom_common.process.service import SERVER_OPTIONS
from lab.redteam.processes import JudgedText, shared_state
from safety_svc.policy_file import PolicyFile
from safety_svc.server import SafetyServicer

MAX_FAULTS: Final = 60
_SERVICE: Final = DESCRIPTOR.services_by_name["SafetyService"].full_name
_FAR: Final = 10_000
"""More characters than any answer has."""


def clears_too_much(response: ScreenResponse) -> ScreenResponse:
    """All that is still to come would be cleared, too."""
    for number in range(len(response.num_clear_chars)):
        response.num_clear_chars[number] += _FAR
    return response


def halts_too_late(response: ScreenResponse) -> ScreenResponse:
    """Every answer is halted behind its end."""
    for slot in response.slots:
        response.halts.add(slot=slot, num_clear_chars=_FAR)
    del response.slots[:], response.num_clear_chars[:]
    return response


def is_uneven(response: ScreenResponse) -> ScreenResponse:
    """The arrays do not fit together."""
    response.num_clear_chars.append(_FAR)
    return response


def is_no_message(_response: ScreenResponse) -> bytes:
    """The bytes cannot be read."""
    return b"\xff\xff garbage"


Garble = Callable[[ScreenResponse], object]
GARBLES: Final[Mapping[str, Garble]] = {
    garble.__name__.replace("_", " "): garble for garble in (clears_too_much, halts_too_late, is_uneven, is_no_message)
}
"""They make what no service may say. It is sent in the place of a verdict on answers."""
KILLED: Final = "killed"
HUNG: Final = "hung"


class UnreliableSafety:
    """The real service at one port. Faults strike verdicts on answers, all kinds in turn, in an order from a seed."""

    def __init__(self, policy: Path, port: int, judged: JudgedText, seed: int) -> None:
        """`judged` is told what was judged, before anybody can hear of it."""
        self._policy = policy
        self._port = port
        self._rng = random.Random(seed)
        self.judged = judged
        self.faults: Counter[str] = Counter()
        self._num_until_fault = 1
        self._kinds: list[str] = []
        self._server: grpc.aio.Server
        self._servicer: SafetyServicer
        self._restart: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen."""
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._servicer = SafetyServicer(PolicyFile(str(self._policy)))
        handler = grpc.stream_stream_rpc_method_handler(self._screen, ScreenRequest.FromString, _as_bytes)
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, {"Screen": handler})])
        self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._restart is not None:
            await self._restart
        await self._kill()

    async def _kill(self) -> None:
        """Break all streams off. What was judged and not sent is lost."""
        await self._server.stop(0)
        self._servicer.close()

    async def _kill_and_restart(self) -> None:
        await self._kill()
        await asyncio.sleep(self._rng.uniform(0.0, 0.3))
        await self.start()

    async def _screen(self, _requests: object, context: Any) -> None:
        # The service needs no more of a context than this.
        await self._servicer.Screen(None, _JudgedStream(self, context))  # pyrefly: ignore[bad-argument-type]

    async def send(self, response: ScreenResponse, context: Any, on_sent: Callable[[ScreenResponse], None]) -> None:
        """Send a response, unless a fault is due. `on_sent` is called with what was judged, before anything leaves:
        garbage may say that more is clear, and may not let more be shown."""
        kind = self._next_fault() if response.slots else ""
        if kind == KILLED:
            self._restart = asyncio.create_task(self._kill_and_restart())
            await asyncio.Event().wait()  # until the stream is broken off
        if kind == HUNG:
            await asyncio.sleep(self._rng.uniform(0.0, 0.5))
        on_sent(response)
        await context.write(GARBLES[kind](response) if kind in GARBLES else response)

    def _next_fault(self) -> str:
        self._num_until_fault -= 1
        if self._num_until_fault or self.faults.total() == MAX_FAULTS:
            return ""
        self._num_until_fault = self._rng.randint(1, 4)
        if not self._kinds:
            self._kinds = [KILLED, HUNG, *GARBLES]
            self._rng.shuffle(self._kinds)
        kind = self._kinds.pop()
        self.faults[kind] += 1
        return kind


class _JudgedStream:
    """A router's stream, as the service sees it. Notes what is asked, and what is answered."""

    def __init__(self, service: UnreliableSafety, context: Any) -> None:
        self._service = service
        self._context = context
        self._prompts: dict[int, int] = {}
        """The number of the answer by check."""
        self._answers: dict[int, int] = {}
        """The same by slot."""
        self._num_chars: dict[int, int] = {}
        """By slot, what has come of the answer."""
        self._halted: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> object:
        frame = await self._context.read()
        if isinstance(frame, ScreenRequest):
            self._prompts.update((check.check_id, int(check.safety_identifier)) for check in frame.prompts)
            self._answers.update((scope.slot, int(scope.safety_identifier)) for scope in frame.scopes)
            for slot, num_chars in (
                *((cleared.slot, cleared.num_chars) for cleared in frame.cleared_texts),
                *((slot, len(delta)) for slot, delta in zip(frame.slots, frame.deltas, strict=True)),
            ):
                self._num_chars[slot] = self._num_chars.get(slot, 0) + num_chars
        return frame

    async def write(self, response: ScreenResponse) -> None:
        await self._service.send(response, self._context, self._note)

    def _note(self, response: ScreenResponse) -> None:
        judged = self._service.judged
        for verdict in response.prompts:
            number = self._prompts.pop(verdict.check_id)
            if verdict.decision == DECISION_ALLOW:
                judged.allow(number)
        for halt in response.halts:
            self._halted.add(halt.slot)
            judged.clear(self._answers[halt.slot], halt.num_clear_chars)
        for slot, num_chars in zip(response.slots, response.num_clear_chars, strict=True):
            judged.clear(self._answers[slot], num_chars)
        for slot in response.closed_slots:
            number, num_chars = self._answers.pop(slot), self._num_chars.pop(slot, 0)
            if slot not in self._halted:
                judged.clear(number, num_chars)
            self._halted.discard(slot)


def _as_bytes(response: Any) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


class SafetyEnd(NamedTuple):
    """Tells what has become of the service."""

    faults: Counter[str]
    max_rss_mb: float


def break_safety(policy: Path, port: int, seed: int) -> SafetyEnd:
    """Serve in this process, until the run is over."""
    return asyncio.run(_break_safety(policy, port, seed))


async def _break_safety(policy: Path, port: int, seed: int) -> SafetyEnd:
    state = shared_state()
    safety = UnreliableSafety(policy, port, state.judged, seed)
    await safety.start()
    state.safety_listens.set()
    try:
        await asyncio.to_thread(state.is_over.wait)
    finally:
        await safety.stop()
    return SafetyEnd(safety.faults, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
