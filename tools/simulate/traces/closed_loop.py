"""Users who play one session after another: each call follows a think time after the end of the previous one."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence

from tools.simulate.traces.trace import HashRuns, hash_base
from tools.simulate.workload import Call


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One call of a session."""

    think_seconds: float
    """The time from the end of the previous call."""
    num_prompt_tokens: int
    num_output_tokens: int
    id_runs: tuple[tuple[int, int], ...]
    """Block ids of the prompt as half-open runs (first, end), local to the session."""
    model: str = ""
    """The model that the trace names."""


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    turns: Sequence[Turn]
    shared: Sequence[tuple[int, int]]
    """(highest id, hash base), ascending. An id uses the base of the first entry whose bound is not below it, and
    shares these hashes with other sessions. All higher ids belong to the session alone."""

    def hashes(self, turn: Turn, own_base: int) -> HashRuns:
        runs: list[range] = []
        for first, end in turn.id_runs:
            for last_shared, base in self.shared:
                if first <= last_shared and first < end:
                    shared_end = min(end, last_shared + 1)
                    runs.append(range(base + first, base + shared_end))
                    first = shared_end
            if first < end:
                runs.append(range(own_base + first, own_base + end))
        return HashRuns(tuple(runs))


@dataclasses.dataclass(frozen=True, slots=True)
class ClosedTrace:
    sessions: Sequence[Session]
    block_size: int
    is_closed_loop: bool = True

    @property
    def num_calls(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    def workload(self, load: float, seed: int, max_requests: int | None = None) -> ClosedLoopWorkload:
        """`load` is the number of users. The workload ends after `max_requests` calls, by default as many as in the
        trace."""
        return ClosedLoopWorkload(self, round(load), seed, max_requests or self.num_calls)


class ClosedLoopWorkload:
    """Plays sessions in a random order, repeatedly if necessary. A repeated session has new hashes, except for those
    that it shares with other sessions.

    Users start at random times within one mean think time. All of them stay until `num_measured_calls` have ended, and
    only calls that arrived before that count. The tail with ever fewer users would flatter any policy.
    """

    def __init__(self, trace: ClosedTrace, num_users: int, seed: int, num_measured_calls: int) -> None:
        self.block_size = trace.block_size
        self.num_measured_calls = num_measured_calls
        self._trace = trace
        self._num_users = num_users
        self._random = random.Random(f"sessions {seed}")
        self._playing: dict[int, Iterator[tuple[float, Call]]] = {}
        """The session of each user, by the call that the user waits for or thinks about."""
        self._sessions = self._shuffled_sessions()
        self._num_calls = 0
        self._num_ended = 0

    def first_calls(self) -> Iterable[tuple[float, Call]]:
        turns = [turn for session in self._trace.sessions for turn in session.turns]
        mean_think_seconds = sum(turn.think_seconds for turn in turns) / len(turns)
        starts = sorted(self._random.random() * mean_think_seconds for _ in range(self._num_users))
        return [(start, self._follow(self._play())[1]) for start in starts]

    def next_calls(self, ended: Call, now: float) -> Iterable[tuple[float, Call]]:
        self._num_ended += 1
        playing = self._playing.pop(ended.call_id)
        if self._num_ended >= self.num_measured_calls:
            return ()
        think_seconds, call = self._follow(playing)
        return ((now + think_seconds, call),)

    def _follow(self, playing: Iterator[tuple[float, Call]]) -> tuple[float, Call]:
        think_seconds, call = next(playing)
        self._playing[call.call_id] = playing
        return think_seconds, call

    def _play(self) -> Iterator[tuple[float, Call]]:
        """The endless calls of one user."""
        for name, session in self._sessions:
            base = hash_base("session", name)
            for turn in session.turns:
                hashes = session.hashes(turn, base)
                call = Call(self._num_calls, turn.num_prompt_tokens, turn.num_output_tokens, hashes, name, turn.model)
                self._num_calls += 1
                yield turn.think_seconds, call

    def _shuffled_sessions(self) -> Iterator[tuple[str, Session]]:
        """An endless sequence of session names and sessions, shared by all users."""
        order = list(range(len(self._trace.sessions)))
        play = 0
        while True:
            self._random.shuffle(order)
            for index in order:
                yield f"{index}.{play}", self._trace.sessions[index]
            play += 1
