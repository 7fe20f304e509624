"""A core that logs what it is given and what it decides."""

from __future__ import annotations

import base64
import importlib.metadata
import math
from collections import deque
from pathlib import Path
from typing import Final

import msgspec
import structlog

from kvloom_common.private_file import make_private_folder
from kvloom_common.process.service import StartError
from router.core import events as ev
from router.core.actions import Action
from router.core.core import CoreConfig, RouterCore
from router.core.events import Event, Request, TextFilter
from router.core.live import LiveRequest, StreamClient
from router.decisions.file import DecisionWriter, RotatingFile
from router.incidents.checkpoint import checkpoint
from router.incidents.plain_events import Decision, WitnessedCalls, WitnessedFilter, decisions, encode, raised, to_plain

log = structlog.get_logger()

FOLDER: Final = "incidents"

FORMAT_VERSION: Final = 1
CHECKPOINT_BYTES: Final = 24 * 2**20
"""After so many bytes of events the state is logged again. Two files of 64 MiB (router/decisions/file.py) have at least
one whole run from there."""


class Recorder:
    """Writes the lines of one core: `[number, time, class, event, verdicts, decisions]`, and now and then a state."""

    def __init__(self, writer: DecisionWriter, versions: dict[str, str]) -> None:
        """`versions`: what the run is of, for readers."""
        self.writer = writer
        self.verdicts: deque[bool] = deque()
        self._versions = versions
        self._number = 0
        self._block_sizes: set[int] = set()
        self._num_bytes = math.inf
        """Since the last state."""

    def begin(self, core: RouterCore, now: float) -> None:
        """Log the state if that is due. A state that cannot be logged is a fault of this module, and not of the
        request: the run ends there."""
        if self._num_bytes < CHECKPOINT_BYTES:
            return
        self._num_bytes = 0
        try:
            state = checkpoint(core, self.verdicts)
        except Exception as error:
            log.exception("incident_state_failed", cause=repr(error))
            return
        header = [FORMAT_VERSION, self._number, now, self._versions, base64.b64encode(state).decode()]
        line = encode(header) + b"\n"
        if not self.writer.put(b"", line):
            log.warning("incident_state_failed", cause=f"there is no room for {len(line)} bytes")

    def prepared(self, event: Event) -> Event:
        """The event as it is to be handled: one that can be read twice, and whose filters are witnessed."""
        match event:
            case ev.TokensOnlyFrame():
                rest = event.read_rest()
                return ev.TokensOnlyFrame(event.shard_id, event.step, lambda: rest)
            case ev.RequestArrived():
                return msgspec.structs.replace(event, request=self._witnessed_calls(self._hashed(event.request)))
            case ev.SafetyUp():
                filters = {"prefilter": event.prefilter, "prompt_filter": event.prompt_filter}
                return msgspec.structs.replace(event, **{name: self._witnessed(one) for name, one in filters.items()})
            case ev.ShardUp():
                self._block_sizes.add(event.shard.block_size)
        return event

    def note(self, now: float, event: Event, plain: bytes, decided: list[Decision]) -> None:
        verdicts = "".join("01"[verdict] for verdict in self.verdicts)
        self.verdicts.clear()
        line = encode([self._number, now, type(event).__name__, msgspec.Raw(plain), verdicts, decided]) + b"\n"
        self._number += 1
        self._num_bytes += len(line)
        if not self.writer.put(b"", line):
            self._num_bytes = math.inf  # there is a gap: what follows needs a state of its own

    def _hashed(self, request: Request) -> Request:
        """With the hashes that the core would compute itself: they stand for the prompt."""
        if request.block_hashes is not None:
            return request
        live = LiveRequest(request, StreamClient(""), 0.0)
        return msgspec.structs.replace(
            request, block_hashes={size: live.prompt_hashes(size) for size in sorted(self._block_sizes)}
        )

    def _witnessed_calls(self, request: Request) -> Request:
        reader, verdicts = request.call_reader, self.verdicts
        if reader is None:
            return request
        return msgspec.structs.replace(request, call_reader=lambda choice: WitnessedCalls(reader(choice), verdicts))

    def _witnessed(self, text_filter: TextFilter | None) -> TextFilter | None:
        return None if text_filter is None else WitnessedFilter(text_filter, self.verdicts)


class RecordedCore(RouterCore):
    """Handles every event as a RouterCore does."""

    def __init__(self, config: CoreConfig, seed: int, recorder: Recorder) -> None:
        super().__init__(config, seed)
        self.recorder = recorder

    def handle(self, event: Event, now: float) -> list[Action]:
        recorder = self.recorder
        recorder.begin(self, now)
        event = recorder.prepared(event)
        plain = encode(to_plain(event, self.config.handoffs))  # before the event is handled, which may change it
        try:
            actions = super().handle(event, now)
        except Exception as error:
            recorder.note(now, event, plain, [raised(error)])
            raise
        recorder.note(now, event, plain, decisions(actions))
        return actions


def new_recorder(data_dir: Path, router_id: str, policy: str) -> Recorder:
    """Raises StartError when its folder cannot be made."""
    folder = data_dir / FOLDER
    try:
        make_private_folder(folder)
    except OSError as error:
        raise StartError(f"{folder}: {error.strerror}") from error
    writer = DecisionWriter(
        RotatingFile(folder / f"{router_id}.jsonl"), lambda _count: None, config_key="router.records_incidents"
    )
    versions = {"kvloom": importlib.metadata.version("kvloom"), "policy": policy, "router_id": router_id}
    return Recorder(writer, versions)
