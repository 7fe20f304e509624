"""How many tokens of an answer are reasoning, when it has ended: a function of its tokens alone, so that it is the same
after failovers, however the tokens came, and whoever asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from kvloom_common.conversation.model_output import prompted
from kvloom_common.parsers import registry
from kvloom_common.parsers.events import Event, ReasoningTally
from kvloom_common.parsers.output_parser import make_parser
from kvloom_common.parsers.spec import ParserSpec
from kvloom_common.text.detokenizer import IncrementalDetokenizer
from kvloom_common.text.tokenizer import ModelTokenizer

CHUNK_TOKENS: Final = 64
MAX_MIXED_CHUNKS: Final = 128
"""Token by token, a chunk takes half a millisecond. An answer that changes between reasoning and text more often than
this is counted by whole chunks from there on."""
MAX_OPENING_TOKENS: Final = 16
"""A prompt that ends inside the reasoning ends with the opening marker, in at most so many tokens."""


class ReasoningCounter:
    """For the answers to one prompt."""

    def __init__(self, spec: ParserSpec, tokenizer: ModelTokenizer, prompt_token_ids: Sequence[int]) -> None:
        """`spec` has a family of reasoning."""
        end = b"".join(map(tokenizer.token_bytes, prompt_token_ids[-MAX_OPENING_TOKENS:])).decode(errors="replace")
        found = prompted(ParserSpec(None, spec.reasoning, spec.starts_in_reasoning), end)
        assert found is not None
        self._spec = found
        self._tokenizer = tokenizer
        self._shown = tokenizer.special_token_ids(registry.markers(found))

    def __call__(self, token_ids: Sequence[int]) -> int:
        """Chunks of only reasoning, or of none, are parsed as a whole. Others are parsed once more, token by token."""
        reader, exact = self._reader(), self._reader()
        num_read = num_mixed = 0
        """How many tokens `exact` has read, and chunks it was needed for."""
        tally = ReasoningTally(starts_in_reasoning=self._spec.starts_in_reasoning)
        for start in range(0, len(token_ids), CHUNK_TOKENS):
            chunk = token_ids[start : start + CHUNK_TOKENS]
            events = reader(chunk)
            if tally.is_mixed(events) and num_mixed < MAX_MIXED_CHUNKS:
                num_mixed += 1
                exact(token_ids[num_read:start])
                num_read = start + len(chunk)
                for token_id in chunk:
                    tally.add(exact((token_id,)), 1)
            else:
                tally.add(events, len(chunk))
        return tally.num_tokens

    def _reader(self) -> Callable[[Sequence[int]], list[Event]]:
        """Takes the tokens of one answer, some at a time."""
        parser = make_parser(self._spec)
        detokenizer = IncrementalDetokenizer(self._tokenizer, shown_special_token_ids=self._shown)

        def read(token_ids: Sequence[int]) -> list[Event]:
            text = detokenizer.push(token_ids)
            return parser.feed(text) if text else []

        return read
