"""Keeps what has happened to the models of a data directory: loaded, unloaded, rolled out, rolled back, asleep,
awake."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvloom_common.private_file import make_private_folder, replacement


class ModelEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    at: float
    """Seconds since the epoch."""
    event: str
    """"load", "unload", "sleep", "wake" or "rollout"."""
    model: str
    outcome: str
    """"done", "failed" or, of a rollout, "rolled back"."""
    reason: str = ""
    """Why it failed, or was rolled back."""
    old: str = ""
    """The version that a rollout was to replace."""
    step: int = 0
    """The last step of a rollout, from 1."""
    num_steps: int = 0


class ModelHistory:
    """A file with one event a line, the latest last. Writing it is best effort: models are served without it too."""

    def __init__(self, data_dir: Path, report: Callable[[str], None] = lambda _: None, max_events: int = 1000) -> None:
        """`report` is called with a line for users."""
        self._path = data_dir / "model-history.jsonl"
        self._report = report
        self._max_events = max_events

    def add(self, event: str, model: str, outcome: str, reason: str = "", **more: str | int) -> None:
        """Adds an event that has just happened. A file that cannot be written is reported."""
        added = msgspec.convert(
            {"at": time.time(), "event": event, "model": model, "outcome": outcome, "reason": reason[:1000], **more},
            ModelEvent,
        )
        events = [*self.events(), added][-self._max_events :]
        try:
            make_private_folder(self._path.parent)
            with replacement(self._path) as file:
                file.writelines(msgspec.json.encode(one) + b"\n" for one in events)
        except OSError as error:
            self._report(f"the history of the models cannot be written to {self._path} ({error.strerror})")

    def events(self, model: str = "") -> list[ModelEvent]:
        """All, or those of a model, whichever version. Lines that are damaged are left out."""
        found: list[ModelEvent] = []
        try:
            lines = self._path.read_bytes().splitlines()
        except OSError:
            return found
        for line in lines:
            try:
                event = msgspec.json.decode(line, type=ModelEvent)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if not model or model in (event.model, event.old, event.model.partition("@")[0]):
                found.append(event)
        return found
