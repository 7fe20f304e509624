"""Records what an edge told a request."""

from __future__ import annotations

import dataclasses

from kvloom_common.discovery.records import RolloutRecord


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    script_key: str
    """The key of the request's answer, which it keeps wherever it is continued."""
    name: str
    """By which the client asked for the model."""
    session: str
    """The session, or else the caller."""
    models: tuple[str, ...]
    """The first one gets the request, the others if it can not take it."""
    rollout: RolloutRecord | None
    """The rollout of that name that the edge knew; None: it knew of none."""
    is_continued: bool
    """True when the request brings along the beginning of an answer."""
    is_chosen: bool
    """True when there was a choice. Otherwise an answer is continued, the edge knows only one of the versions (it
    fetches the card of the other one, or that has been withdrawn or unloaded), or a model before this one could not
    take the request."""
