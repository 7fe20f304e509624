"""Output of a choice that its client must not see yet: text that the safety service has not cleared, and what follows
it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from router.core.frames import Finish, Start
from router.core.held_calls import HeldCalls

WithheldEntry = tuple[Sequence[int], str, int, Sequence[object]]
"""Token ids, their text, the number of characters up to its end, logprobs."""


class UnclearedOutput:
    """The withheld output of one choice, in order.

    To save a call per token, the relay, Screening.clear, Verdicts.on_answers and Choice.record_forwarded write the
    entries and the counters themselves.
    """

    __slots__ = ("calls", "entries", "finish", "last_shown_char", "num_clear_chars", "num_tokens", "start")

    def __init__(self, num_clear_chars: int | None, calls: HeldCalls | None = None) -> None:
        self.calls = calls
        """None: what is clear is sent at once."""
        self.entries: deque[WithheldEntry] = deque()
        self.num_tokens = 0
        self.start: Start | None = None
        self.finish: Finish | None = None
        self.num_clear_chars = num_clear_chars
        """Number of characters, from the beginning, that the safety service has cleared; None: all of them."""
        self.last_shown_char = ""

    @property
    def num_chars(self) -> int:
        """How many characters are withheld."""
        return sum(len(delta) for _, delta, _, _ in self.entries)

    def clear_all(self) -> None:
        """No verdict is needed any more: everything may be shown, what is yet to come included."""
        self.num_clear_chars = None

    def withhold_all(self) -> None:
        """Withhold everything until a verdict, where nothing has been shown yet."""
        self.num_clear_chars = 0

    def take_clear(self) -> tuple[Sequence[int], str, Sequence[object]] | None:
        """Remove and return everything that may be shown, as one entry. A token is never split."""
        entries, clear = self.entries, self.num_clear_chars
        if clear is not None and self.calls is not None:
            clear = self.calls.limit(clear)
        if not entries or (clear is not None and entries[0][2] > clear):
            return None
        token_ids, delta, _, logprobs = entries.popleft()
        if entries and (clear is None or entries[0][2] <= clear):
            ids, deltas, all_logprobs = list(token_ids), [delta], list(logprobs)
            while entries and (clear is None or entries[0][2] <= clear):
                more_ids, more_text, _, more_logprobs = entries.popleft()
                ids += more_ids
                deltas.append(more_text)
                all_logprobs += more_logprobs
            token_ids, delta, logprobs = ids, "".join(deltas), all_logprobs
        self.num_tokens -= len(token_ids)
        if delta:
            self.last_shown_char = delta[-1]
        return token_ids, delta, logprobs

    def unclear(self) -> tuple[str, str]:
        """(the last cleared character, "" if there is none; all text that is withheld after it)."""
        last_char, texts, clear = self.last_shown_char, [], self.num_clear_chars
        for _, delta, end, _ in self.entries:
            num_clear = len(delta) if clear is None else min(len(delta), max(0, clear - (end - len(delta))))
            if num_clear:
                last_char = delta[num_clear - 1]
            texts.append(delta[num_clear:])
        return last_char, "".join(texts)

    def cut(self, num_chars: int) -> int:
        """Drop everything after `num_chars`, and a call that is not over there, which clears the rest. Returns how many
        tokens were dropped. A delta that straddles the limit is cut, and its tokens are dropped."""
        if self.calls is not None:
            num_chars = self.calls.limit(num_chars)
        kept: deque[WithheldEntry] = deque()
        num_kept_tokens = 0
        for token_ids, delta, end, logprobs in self.entries:
            if end <= num_chars:
                kept.append((token_ids, delta, end, logprobs))
                num_kept_tokens += len(token_ids)
                continue
            if end - len(delta) < num_chars:
                kept.append(((), delta[: num_chars - end], num_chars, ()))
            break
        num_forgotten = self.num_tokens - num_kept_tokens
        self.entries = kept
        self.num_tokens = num_kept_tokens
        self.num_clear_chars = None
        return num_forgotten
