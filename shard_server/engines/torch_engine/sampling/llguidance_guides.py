"""Guided decoding: which tokens keep an answer within its guide, as bitmasks over the vocabulary (through llguidance).

llguidance computes a mask in microseconds from a lazily built automaton, on the CPU, straight into numpy memory; and it
bounds what a guide may cost by fuel that does not depend on the clock, so that every shard reaches the same verdict
about a guide.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from shard_server.engines.base import EngineError, Guide, GuideKind
from shard_server.engines.torch_engine.sampling.guide_schema import culprit, guide_schema, relaxed
from shard_server.engines.torch_engine.sampling.guides import GuideError, GuideState

CACHED_GUIDES: Final = 128
_LIMITS: Final = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""A step of the automaton takes 7 ms at most, and its states 40 MB."""
_JSON_WHITESPACE: Final = r"\n(?: {0,32}|\t{0,8})| "
"""The whitespace between the parts of a JSON text: enough to indent it. JSON allows any amount, of which small models
may emit so much that they use up their tokens; runs of spaces are few tokens, mixtures are not."""
_MAX_MESSAGE_CHARS: Final = 200
_REGEX_SPECIAL: Final = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")


class MatcherState:
    """A `GuideState`."""

    __slots__ = ("_end_ids", "_ends_with_eos", "_mask", "_matcher")

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_ids: Sequence[int], *, ends_with_eos: bool) -> None:
        self._matcher = matcher
        self._mask = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
        self._end_ids = end_ids
        """Tokens that end the sequence: drawn only where the guide is satisfied."""
        self._ends_with_eos = ends_with_eos

    @property
    def is_complete(self) -> bool:
        return not self._ends_with_eos and self._matcher.is_stopped()

    def mask(self) -> np.ndarray:
        fill_next_token_bitmask(self._matcher, self._mask)
        if self._matcher.is_error():
            raise GuideError(_message(self._matcher))
        bits = self._mask[0].view(np.uint8)
        satisfied = self._matcher.is_accepting()
        forbidden: list[int] = []
        for token_id in self._end_ids:
            if satisfied:
                bits[token_id >> 3] |= 1 << (token_id & 7)
            elif bits[token_id >> 3] >> (token_id & 7) & 1:
                bits[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
                forbidden.append(token_id)
        if forbidden and not bits.any():
            # The guide continues only with a token that the client made a stop token: an early end is better than none.
            for token_id in forbidden:
                bits[token_id >> 3] |= 1 << (token_id & 7)
        return bits

    def take(self, token_ids: Sequence[int]) -> bool:
        return self._matcher.consume_tokens(list(token_ids))


class GuideCache:
    """The compiled guides of all scopes, up to a bound. The scope that has most makes room for the others."""

    def __init__(self, max_guides: int = CACHED_GUIDES) -> None:
        self._max_guides = max_guides
        self._num_guides = 0
        self._by_scope: dict[int, OrderedDict[Guide, LLMatcher]] = {}

    def __len__(self) -> int:
        return self._num_guides

    def get(self, scope: int, guide: Guide) -> LLMatcher | None:
        """The guide, if one of this scope was kept."""
        of_scope = self._by_scope.get(scope)
        if of_scope is None or guide not in of_scope:
            return None
        of_scope.move_to_end(guide)
        return of_scope[guide]

    def put(self, scope: int, guide: Guide, compiled: LLMatcher) -> None:
        """Keep a guide for its scope."""
        of_scope = self._by_scope.setdefault(scope, OrderedDict())
        self._num_guides += guide not in of_scope
        of_scope[guide] = compiled
        while self._num_guides > self._max_guides:
            largest = max(self._by_scope, key=lambda one: len(self._by_scope[one]))
            self._by_scope[largest].popitem(last=False)
            self._num_guides -= 1
            if not self._by_scope[largest]:
                del self._by_scope[largest]


class GuideCompiler:
    """Compiles guides for one model's vocabulary and caches them, for each scope by itself: how long a guide takes
    would tell whether another tenant has sent it. Thread-safe."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Takes half a second, with the interpreter's lock held. Raises EngineError."""
        self._vocab_size = vocab_size
        eos = sorted(eos_token_ids)
        try:
            text = tokenizer_json.read_text()
            self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos or None)
        except (OSError, ValueError, RuntimeError) as error:
            raise EngineError(f"{tokenizer_json}: no vocabulary for guided decoding: {error}") from error
        self._eos = eos
        self._structural_tags = StructuralTagGrammar(special_token_ids(text), eos, _JSON_WHITESPACE)
        self._cache = GuideCache()
        self._lock = threading.Lock()

    def start(
        self, guide: Guide, stop_token_ids: Iterable[int], output_token_ids: Sequence[int] = (), scope: int = 0
    ) -> GuideState:
        """A sequence's state after `output_token_ids`. Compiles the guide if it is not cached. `scope`: only sequences
        with the same one share compiled guides (EngineRequest.root_hash). Raises GuideError."""
        stop = set(stop_token_ids)
        end_ids = sorted(token_id for token_id in stop.union(self._eos) if token_id < self._vocab_size)
        if output_token_ids and output_token_ids[-1] in end_ids:  # it has ended, and the guide excludes stop tokens
            output_token_ids = output_token_ids[:-1]
        matcher = self._matcher(guide, scope)
        state = MatcherState(matcher, self._vocab_size, end_ids, ends_with_eos=not stop.isdisjoint(self._eos))
        if not state.take(output_token_ids):
            raise GuideError("the output so far does not follow the guide")
        return state

    def _matcher(self, guide: Guide, scope: int) -> LLMatcher:
        with self._lock:
            known = self._cache.get(scope, guide)
            if known is not None:
                return known.deep_copy()
        compiled = self._compile(guide)
        with self._lock:
            self._cache.put(scope, guide, compiled)
            return compiled.deep_copy()

    def _compile(self, guide: Guide) -> LLMatcher:
        try:
            return self._compiled(guide)
        except GuideError as error:
            if guide.kind is not GuideKind.JSON_SCHEMA:
                raise
            schema = relaxed(guide.text, guide.relaxable, self._compiles)
            if schema is not None:
                return self._compiled(Guide(GuideKind.JSON_SCHEMA, schema))
            if error.names_place:
                raise
            where = culprit(guide.text, self._compiles)
            raise (error if where is None else GuideError(f"{where} cannot be enforced: {error}")) from error

    def _compiles(self, schema: str) -> bool:
        try:
            self._compiled(Guide(GuideKind.JSON_SCHEMA, schema))
        except GuideError:
            return False
        return True

    def _compiled(self, guide: Guide) -> LLMatcher:
        """Raises GuideError."""
        try:
            grammar = self._grammar(guide)
        except (ValueError, TypeError, RecursionError) as error:
            raise GuideError(str(error)[:_MAX_MESSAGE_CHARS]) from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a guide that no text satisfies is detected only here
        if matcher.is_error():
            raise GuideError(_message(matcher))
        return matcher

    def _grammar(self, guide: Guide) -> str:
        match guide.kind:
            case GuideKind.JSON_SCHEMA:
                schema = json.dumps(guide_schema(guide.text), ensure_ascii=False)
                return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _JSON_WHITESPACE})
            case GuideKind.REGEX:
                return LLMatcher.grammar_from_regex(guide.text)
            case GuideKind.GRAMMAR:
                return LLMatcher.grammar_from_lark(guide.text)
            case GuideKind.STRUCTURAL_TAGS:
                return LLMatcher.grammar_from_lark(self._structural_tags.grammar(guide.text))
            case GuideKind.CHOICE:
                choices: list[str] = json.loads(guide.text)
                # A regular expression can hold every character literally; a string in a grammar cannot.
                escaped = (_REGEX_SPECIAL.sub(r"\\\g<0>", choice) for choice in choices)
                return LLMatcher.grammar_from_regex("|".join(escaped))


def _message(matcher: LLMatcher) -> str:
    """The first line of the error: the rest are excerpts of the guide and the state of the automaton."""
    text = matcher.get_error().split("\n", 1)[0].strip()
    reason = text[:_MAX_MESSAGE_CHARS] or "it cannot be compiled"
    return _REASONS.get(reason, reason)


_REASONS: Final = {
    "NoExtensionBias": "no text follows it",
    "NoExtension": "no text follows it",
    "ParserTooComplex": "it is too complex",
    "LexerTooComplex": "it is too complex",
}


class StructuralTagGrammar:
    """Writes the grammars for one vocabulary. A string that is a special token may be written as that token or spelled
    out: a parser of the text sees no difference, so the structure has to begin in either case."""

    def __init__(
        self, special_token_ids: Mapping[str, int], end_token_ids: Iterable[int], whitespace_pattern: str
    ) -> None:
        """`whitespace_pattern` is the whitespace between the parts of JSON."""
        self._special = special_token_ids
        self._end_ids = frozenset(end_token_ids)
        self._whitespace_pattern = whitespace_pattern
        names = sorted(special_token_ids, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})") if names else None

    def grammar(self, guide: str) -> str:
        """`guide`: the text of a GuideKind.STRUCTURAL_TAGS."""
        value: Any = json.loads(guide)
        tags, triggers = value["tags"], value["triggers"]
        if "json_schema" in value:
            return self._form_or_tags(value["json_schema"], tags)
        lines = ["%llguidance {}", "start: part* TEXT", r"TEXT: /(.|\n)*/"]
        parts: list[str] = []
        for number, trigger in enumerate(triggers):
            # A lazy lexeme ends at the first occurrence of the trigger: free text never contains one.
            lines.append(f"trigger_{number}[lazy]: TEXT {json.dumps(trigger)}")
            heads = f"trigger_{number}"
            if trigger in self._special:
                lines.append(f"token_{number}: TEXT <[{self._special[trigger]}]>")
                heads = f"({heads} | token_{number})"
            own = [place for place, tag in enumerate(tags) if tag["begin"].startswith(trigger)]
            parts.append(f"{heads} ({' | '.join(f'tag_{place}' for place in own)})")
            lines += [f"tag_{place}: {self._tag(tags[place], len(trigger))}" for place in own]
        free = sorted(set(self._special.values()) - {self._special.get(text) for text in triggers} - self._end_ids)
        if free:
            parts.append(f"TEXT <[{','.join(map(str, free))}]>")
        lines.append(f"part: {' | '.join(parts)}")
        return "\n".join(lines)

    def _form_or_tags(self, form: str, tags: Sequence[Mapping[str, Any]]) -> str:
        """Without free text: either the JSON, or the tags."""
        free = sorted(set(self._special.values()) - self._end_ids)
        lines = ["%llguidance {}", "start: form | space tag (space tag)* space", f"form: {self._json(form)}"]
        lines += [r"space: /[ \t\n]{0,8}/", "tag: " + " | ".join(f"tag_{place}" for place in range(len(tags)))]
        lines.append(r"rest: (TEXT special)* TEXT" if free else "rest: TEXT")
        lines += [r"TEXT: /(.|\n)*/", *([f"special: <[{','.join(map(str, free))}]>"] if free else [])]
        for place, tag in enumerate(tags):
            begin = self._literal(tag["begin"])
            end = [self._json(tag["json_schema"]), *self._literal(tag["end"])] if tag["json_schema"] else ["rest"]
            lines.append(f"tag_{place}: {' '.join([*begin, *end])}")
        return "\n".join(lines)

    def _json(self, text: str) -> str:
        schema = {"x-guidance": {"whitespace_pattern": self._whitespace_pattern}, **guide_schema(text)}
        return f"%json {json.dumps(schema)}"

    def _tag(self, tag: Mapping[str, Any], num_triggered: int) -> str:
        begin, end = self._literal(tag["begin"][num_triggered:]), self._literal(tag["end"])
        return " ".join([*begin, self._json(tag["json_schema"]), *end])

    def _literal(self, text: str) -> Sequence[str]:
        pieces = self._split.split(text) if self._split is not None else [text]
        return [
            f"({json.dumps(piece)} | <[{self._special[piece]}]>)" if piece in self._special else json.dumps(piece)
            for piece in pieces
            if piece
        ]


def special_token_ids(tokenizer: str) -> dict[str, int]:
    """The special tokens of a tokenizer.json."""
    added = json.loads(tokenizer).get("added_tokens", ())
    return {token["content"]: token["id"] for token in added if token.get("special") and token["content"]}
