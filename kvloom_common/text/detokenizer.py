"""Turns token ids into text while they are generated: safe for UTF-8, with stop strings, and independent of how the
tokens are batched."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Protocol, overload

from kvloom.errors import invalid_argument
from kvloom.v1.generation_pb2 import StopConditions

_new_decoder: Final = codecs.getincrementaldecoder("utf-8")


class TokenText(Protocol):
    """The part of ModelTokenizer that a detokenizer needs."""

    @property
    def token_texts(self) -> Sequence[str | None]: ...

    def shown_bytes(self, token_id: int) -> bytes: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class IncrementalDetokenizer:
    """The text of one sequence. However the tokens are split into pushes, the pushed texts and the flushed one add up
    to the same text: the decoding of all bytes without special tokens (but those in `shown_special_token_ids`), cut
    before the stop string that is complete first (if two are complete at once, the longer one)."""

    __slots__ = ("_decoder", "_has_partial", "_held", "_owed", "_stops", "_texts", "_tokenizer", "stop_string")

    def __init__(
        self,
        tokenizer: TokenText,
        stop_strings: Sequence[str] = (),
        output_token_ids: Sequence[int] = (),
        num_delivered_chars: int = 0,
        shown_special_token_ids: Collection[int] = (),
    ) -> None:
        """`output_token_ids` and `num_delivered_chars`: continue after the tokens that an earlier attempt generated and
        the characters that it delivered. Raises KvloomError (INVALID_ARGUMENT) when those tokens have fewer
        characters."""
        if shown_special_token_ids:
            tokenizer = ShownTokens(tokenizer, shown_special_token_ids)
        self._tokenizer = tokenizer
        self._texts = tokenizer.token_texts
        self._decoder: codecs.IncrementalDecoder | None = None
        self._has_partial = False
        """True while the decoder holds the first bytes of an incomplete character."""
        self._stops = [_StopMatcher(stop) for stop in stop_strings]
        self._held = ""
        """Text that may be the beginning of a stop string; not shown yet."""
        self._owed = ""
        """Text of earlier attempts that is safe to show and was not delivered."""
        self.stop_string: str | None = None
        """The stop string that was hit; the text ends before it."""
        if output_token_ids or num_delivered_chars:
            text = self.push(output_token_ids)
            if num_delivered_chars > len(text):
                raise invalid_argument(
                    f"num_delivered_chars is {num_delivered_chars}, but the output tokens have {len(text)} characters.",
                    "choices.num_delivered_chars",
                )
            self._owed = text[num_delivered_chars:]

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens; returns the new text that is safe to show. Text after a stop string is dropped."""
        if len(token_ids) == 1 and not self._has_partial:
            token_id = token_ids[0]
            text = self._texts[token_id] if token_id < len(self._texts) else ""
            if text is None:
                text = self._decode(token_ids)
        else:
            text = self._decode(token_ids)
        if self._stops:
            text = self._cut(text)
        if self._owed:
            text, self._owed = self._owed + text, ""
        return text

    def flush(self) -> str:
        """The rest of the text, at the end of the sequence. An incomplete character becomes U+FFFD."""
        text, self._owed = self._owed, ""
        if self._has_partial and self._decoder is not None:
            self._has_partial = False
            rest = self._decoder.decode(b"", final=True)
            text += self._cut(rest) if self._stops else rest
        text += self._held
        self._held = ""
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._decoder is None:
            self._decoder = _new_decoder(errors="replace")
        text = self._decoder.decode(b"".join(map(self._tokenizer.shown_bytes, token_ids)))
        self._has_partial = bool(self._decoder.getstate()[0])
        return text

    def _cut(self, text: str) -> str:
        if self.stop_string is not None or not text:
            return ""
        hit: _StopMatcher | None = None
        hit_end = 0
        num_held = 0
        for stop in self._stops:
            end = stop.push(text)
            if end and (hit is None or (end, -len(stop.text)) < (hit_end, -len(hit.text))):
                hit, hit_end = stop, end
            num_held = max(num_held, stop.num_matched)
        unseen = self._held + text
        if hit is not None:
            self.stop_string = hit.text
            end = len(self._held) + hit_end - len(hit.text)
            self._held = ""
            return unseen[:end]
        end = len(unseen) - num_held
        self._held = unseen[end:]
        return unseen[:end]


class LateStopDetokenizer(IncrementalDetokenizer):
    """Does not look for stop strings in the text of the first `num_exempt_tokens` tokens, nor in the reasoning."""

    __slots__ = ("_is_exempt", "_num_exempt_tokens", "_reasoning")

    def __init__(
        self,
        tokenizer: TokenText,
        stop_strings: Sequence[str],
        output_token_ids: Sequence[int] = (),
        num_delivered_chars: int = 0,
        shown_special_token_ids: Collection[int] = (),
        *,
        num_exempt_tokens: int = 0,
        reasoning: ReasoningText | None = None,
    ) -> None:
        """`reasoning` finds where it ends; None: there is none."""
        # Before the output tokens are pushed.
        self._num_exempt_tokens = num_exempt_tokens
        self._is_exempt = False
        self._reasoning = reasoning
        super().__init__(tokenizer, stop_strings, output_token_ids, num_delivered_chars, shown_special_token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        num_exempt = min(self._num_exempt_tokens, len(token_ids))
        if not num_exempt:
            return super().push(token_ids)
        self._num_exempt_tokens -= num_exempt
        self._is_exempt = True
        text = super().push(token_ids[:num_exempt])
        self._is_exempt = False
        return text + super().push(token_ids[num_exempt:]) if num_exempt < len(token_ids) else text

    def flush(self) -> str:
        if self._reasoning is not None:
            self._owed += super()._cut(self._reasoning.give_up())
            self._reasoning = None
        return super().flush()

    def _cut(self, text: str) -> str:
        before = ""
        if self._reasoning is not None:
            before, text = self._reasoning.split(text)
        return before + (text if self._is_exempt else super()._cut(text))


class ReasoningText:
    """Divides the text of an answer, which arrives in pieces, into the reasoning at its beginning and what follows."""

    __slots__ = ("_closings", "_is_inside", "_lead", "_openings", "_tail")

    def __init__(self, openings: Sequence[str], closings: Sequence[str], *, begins_inside: bool) -> None:
        self._openings = tuple(openings)
        self._closings = tuple(closings)
        self._is_inside: bool | None = True if begins_inside else None
        """None: the text so far may be the beginning of an opening."""
        self._lead = ""
        """That text."""
        self._tail = ""
        """The end of the reasoning so far, which may be the beginning of a closing."""

    def split(self, piece: str) -> tuple[str, str]:
        """The parts of this piece that are reasoning, and that follow it. The beginning of a possible opening is held
        back."""
        if self._is_inside is None:
            self._lead += piece
            begun = self._lead.lstrip()
            if not begun.startswith(self._openings) and any(one.startswith(begun) for one in self._openings):
                return "", ""
            self._is_inside = begun.startswith(self._openings)
            piece, self._lead = self._lead, ""
        if not self._is_inside:
            return "", piece
        seen = self._tail + piece
        ends = [(at, at + len(one)) for one in self._closings if (at := seen.find(one)) >= 0]
        if not ends:
            most = max(map(len, self._closings), default=1) - 1
            self._tail = seen[-most:] if most else ""
            return piece, ""
        self._is_inside = False
        end = min(ends)[1] - len(self._tail)
        return piece[:end], piece[end:]

    def give_up(self) -> str:
        """Returns what was held back, at the end of the answer."""
        lead, self._lead = self._lead, ""
        return lead


def stopping_detokenizer(
    tokenizer: TokenText,
    stop: StopConditions,
    output_token_ids: Sequence[int] = (),
    num_delivered_chars: int = 0,
    shown_special_token_ids: Collection[int] = (),
) -> IncrementalDetokenizer:
    """The detokenizer for an answer with these conditions; the other arguments are those of IncrementalDetokenizer.
    Raises KvloomError (INVALID_ARGUMENT)."""
    output = output_token_ids, num_delivered_chars, shown_special_token_ids
    if not stop.stop or not (stop.min_tokens or stop.HasField("reasoning")):
        return IncrementalDetokenizer(tokenizer, stop.stop, *output)
    span = stop.reasoning if stop.HasField("reasoning") else None
    reasoning = None
    if span is not None:
        reasoning = ReasoningText(span.openings, span.closings, begins_inside=span.begins_inside)
    return LateStopDetokenizer(tokenizer, stop.stop, *output, num_exempt_tokens=stop.min_tokens, reasoning=reasoning)


class ShownTokens:
    """The texts of a tokenizer's tokens, with the names of some of its special tokens."""

    def __init__(self, tokenizer: TokenText, shown: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = {token_id: tokenizer.token_bytes(token_id) for token_id in shown}
        self.token_texts = _ShownTexts(tokenizer.token_texts, self._shown)

    def shown_bytes(self, token_id: int) -> bytes:
        name = self._shown.get(token_id)
        return self._tokenizer.shown_bytes(token_id) if name is None else name

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)


class _ShownTexts(Sequence[str | None]):
    """The texts as in ModelTokenizer.token_texts, with None for the shown tokens, which are decoded from their
    bytes."""

    def __init__(self, texts: Sequence[str | None], shown: Mapping[int, bytes]) -> None:
        self._texts = texts
        self._shown = shown

    @overload
    def __getitem__(self, index: int) -> str | None: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str | None]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str | None] | None:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return None if index in self._shown else self._texts[index]

    def __len__(self) -> int:
        return len(self._texts)


class _StopMatcher:
    """Finds one string in a text that arrives in pieces. Knuth-Morris-Pratt, which is linear for any string."""

    __slots__ = ("_borders", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._borders = _borders(text)
        self.num_matched = 0
        """The length of the longest prefix of the string with which the text so far ends."""

    def push(self, piece: str) -> int:
        """Append a piece. Returns the index in it after the end of the first occurrence, 0 if there is none."""
        text, matched = self.text, self.num_matched
        if not matched and text[0] not in piece:
            return 0
        for position, character in enumerate(piece):
            while matched and text[matched] != character:
                matched = self._borders[matched - 1]
            if text[matched] == character:
                matched += 1
                if matched == len(text):
                    self.num_matched = 0
                    return position + 1
        self.num_matched = matched
        return 0


def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix too."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return borders
