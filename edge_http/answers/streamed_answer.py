"""A streamed answer: every delta becomes one server-sent event as soon as it arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from edge_http.answers.answer import EdgeAnswer
from edge_http.answers.joined_logprobs import JoinedLogprobs
from edge_http.answers.parsed_output import CountedOutputParser
from edge_http.formatting.json_bytes import encode_json
from edge_http.formatting.response_formatter import ChoiceFinish, ResponseFormatter
from edge_http.wire.headers import BROWNOUT, explanation, start_headers
from edge_http.wire.sse import EventSink
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import SequenceFinish, TokenLogprobs
from kvloom_common.parsers.events import Event, TextDelta

SLOW_CLIENT_LINGER_SECONDS: Final = 5.0
"""How long a client that reads too slowly may take for the buffered bytes, including the error."""


class StreamedAnswer(EdgeAnswer):
    """Sends nothing before the first update of any choice, so that a refusal can still have an HTTP error status. If
    that takes long, it begins without one, and the connection is kept alive."""

    __slots__ = (
        "_began_early",
        "_begun",
        "_counts",
        "_events",
        "_formatter",
        "_headers",
        "_may_begin_early",
        "_prefixes",
        "_suffix",
        "_with_details",
        "_with_explanation",
        "continued_by",
    )

    def __init__(
        self,
        prompt_sizes: Sequence[int],
        n: int,
        formatter: ResponseFormatter,
        events: EventSink,
        headers: Mapping[str, str],
        *,
        parsed: Sequence[CountedOutputParser] = (),
        joined: Sequence[JoinedLogprobs] = (),
        with_details: bool,
        with_explanation: bool,
        may_begin_early: bool = True,
    ) -> None:
        """`parsed`, `joined`: see Answer. `may_begin_early`: its head may be sent before its fate is known."""
        super().__init__(prompt_sizes, n, parsed, joined)
        self._formatter = formatter
        self._suffix = formatter.suffix
        self._events = events
        self._headers = headers
        self._with_details = with_details
        self._with_explanation = with_explanation
        self.continued_by = ""
        """The model that has written the end, if it is not the one that began; the last chunk says so."""
        self._may_begin_early = may_begin_early
        self._began_early = False
        """Its head was sent before anything was known of its start."""
        self._begun: set[int] = set()
        """The choices whose opening was sent."""
        self._prefixes: list[bytes | None] = [None] * self.num_choices
        """By choice: the formatter's prefix, if the choice has begun and nothing but its text changes from one event to
        the next; None before, and after the answer has failed."""
        self._counts = [0] * self.num_choices if formatter.repeats_usage else []
        """The tokens of each choice, if all events tell."""

    def on_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        if self._counts:
            self._counts[index] += len(token_ids)
            self._formatter.repeat_usage(self._counts[index])
        super().on_tokens(index, delta, token_ids, logprobs)

    def fast_writer(self, index: int) -> Callable[[str], None] | None:
        """See FastPathSink (kvloom/router_link/fast_path.py). Not with several choices: the stream's fast path has one
        prefix."""
        prefix = self._prefixes[index] if self.num_choices == 1 else None
        return None if prefix is None else self._events.fast_writer(prefix, self._suffix, self._on_slow_reader)

    def on_fast_path_tokens(self, index: int, token_ids: Sequence[int], num_chars: int) -> None:  # noqa: ARG002
        self.num_output_tokens += len(token_ids)

    @property
    def num_events(self) -> int:
        return self._events.num_events

    @property
    def is_over(self) -> bool:
        """True when the stream has ended. See WatchedStream (edge_http/wire/keep_alive.py)."""
        return self.ended.done()

    def begin_early(self) -> None:
        """From here on an error can have no status of its own; nearly all of them have come by now."""
        if self._may_begin_early and not self._with_explanation:
            self._begin_now()

    def keep_alive(self) -> None:
        self._begin_now()
        self._events.comment(self._formatter.keep_alive)

    def _begin_now(self) -> None:
        if not self._events.has_begun:
            self._began_early = True
            self._events.begin(self._headers)

    @property
    def has_begun(self) -> bool:
        """The client may have a part of it."""
        return self._events.has_begun

    @property
    def _is_visible(self) -> bool:
        return self._events.has_begun

    def fail(self, error: KvloomError) -> None:
        if not self.ended.done() and self._events.has_begun:
            event = self._formatter.error(error)
            if error.reason == ErrorReason.ERROR_REASON_CLIENT_TOO_SLOW:
                self._events.break_off(event, SLOW_CLIENT_LINGER_SECONDS)
            else:
                self._events.send(event, b"", b"")
                self._events.end()
        self._prefixes = [None] * self.num_choices
        super().fail(error)

    def cut_short(self) -> None:
        """End a regular answer where it is, because its client goes on from here. It continues to its own end if it has
        not begun, if what the model writes now must be whole, or if others have a part in it: moderation in line,
        hidden texts, another model."""
        start = self.starts.get(0)
        if not self.is_direct or self._joined or start is None or self.ended.done() or not self._formatter.may_end:
            return
        self.finishes[0] = SequenceFinish(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=start.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
        )
        try:
            self._add_finish(0, ChoiceFinish("steered"))
            self._complete()
        except Exception:
            self._on_bug()
        else:
            self.ended.set_result(None)  # its choice is still open, so that it is cancelled

    def _add_start(self, index: int) -> None:
        if index not in self._begun:
            self._open(index)

    def _add_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        if index not in self._begun:
            self._open(index)
        prefix = self._prefixes[index]
        if prefix is not None and not logprobs:
            if delta and not self._events.send(prefix, encode_json(delta), self._suffix):
                self._on_slow_reader()
            return
        if self._formatter.drops_output:
            return
        events: list[Event] = [TextDelta(delta)] if delta else []
        if self._parsed:
            events = self._parsed[index].feed(delta, len(token_ids))
        if logprobs:
            entries = self._formatter.logprobs(index, token_ids, logprobs)
            self._send_all(self._formatter.output_with_logprobs(index, events, entries))
        else:
            self._send_all(self._formatter.output(index, events))

    def _add_cut_logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_cut_bytes: int
    ) -> None:
        if index not in self._begun:
            self._open(index)
        entries = self._formatter.cut_logprobs(self._formatter.logprobs(index, token_ids, logprobs), num_cut_bytes)
        self._send_all(self._formatter.output_with_logprobs(index, [], entries))

    def _add_finish(self, index: int, finish: ChoiceFinish) -> None:
        if index not in self._begun:
            self._open(index)
        if self._counts:
            self._formatter.repeat_usage(self._counts[index])
        self._events.cork()
        if self._parsed:
            self._send_all(self._formatter.output(index, self._parsed[index].finish()))
            finish = self._parsed[index].completed(finish)
        is_last_chunk = not self.num_open and not self._formatter.envelope.include_usage
        details = self._final_details() if is_last_chunk else None
        self._send_all(self._formatter.finish(index, finish, details))

    def _complete(self) -> None:
        self._send_all(self._formatter.ending(self.usage, self._final_details()))
        self._events.end()

    def _final_details(self) -> dict[str, Any] | None:
        """Returns the field `kvloom` of the last chunk; None: there is no such field."""
        details = None
        if self._with_details or self.features or self.limited_by:
            details = self.details(wanted=self._with_details)
        if self._began_early and (told := start_headers(self.first_start).get(BROWNOUT)):
            details = {**(details or {}), "brownout": told}
        return {**(details or {}), "continued_by": self.continued_by} if self.continued_by else details

    def _open(self, index: int) -> None:
        """Called at the first update of a choice."""
        self._begin(index)
        self._note_first_token()
        self._events.cork()  # the first token leaves together with the head
        if not self._events.has_begun:
            more = explanation(self.first_start) if self._with_explanation else {}
            for feature in self.features:
                more |= feature.headers(self, has_ended=False)
            self._events.begin({**self._headers, **start_headers(self.first_start), **more})
        if self._counts:
            self._formatter.repeat_usage(self._counts[index])
        start = self.starts.get(index)
        self._send_all(self._formatter.opening(index, 0 if start is None else start.num_cached_tokens))
        if self._formatter.report is not None:
            self._echo(index)

    def _echo(self, index: int) -> None:
        """Send the prompt, if the answer begins with it."""
        formatter, start = self._formatter, self.starts[index]
        echo = formatter.echo(index, start)
        start.ClearField("prompt_logprobs")  # they are large, and starts are kept
        if echo is None:
            return
        text, logprobs = echo
        if logprobs is not None:
            self._send(formatter.delta_with_logprobs(index, text, logprobs))
        else:
            self._send_all(formatter.output(index, [TextDelta(text)]))

    def _begin(self, index: int) -> None:
        self._begun.add(index)
        is_plain = not (self._parsed or self._joined or self._counts or self._formatter.drops_output)
        if self._formatter.prefixes and is_plain:
            self._prefixes[index] = self._formatter.prefixes[index]

    def _send_all(self, chunks: Sequence[bytes]) -> None:
        for chunk in chunks:
            self._send(chunk)

    def _send(self, chunk: bytes) -> None:
        if not self._events.send(chunk, b"", b""):
            self._on_slow_reader()

    def _on_slow_reader(self) -> None:
        self.fail(
            KvloomError(
                ErrorReason.ERROR_REASON_CLIENT_TOO_SLOW,
                "The stream was ended because the client reads it too slowly.",
            )
        )
