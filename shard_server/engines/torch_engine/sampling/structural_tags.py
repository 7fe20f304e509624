"""The grammar of free text in which structures stand, in llguidance's Lark syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shard_server.engines.torch_engine.sampling.guide_schema import guide_schema


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
