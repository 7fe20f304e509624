"""Decides which tokenizer the connected shards of each model have, without I/O.

Prompts are tokenized once for all shards of a model, and a shard with another tokenizer would read other words.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_SHOWN_CHARS: Final = 12


class _Claim(NamedTuple):
    shard_id: str
    model: str
    checksum: str


class TokenizerClaims:
    """The first connected shard of a model decides, and the last one that disconnects sets it free."""

    def __init__(self) -> None:
        self._claims: dict[object, _Claim] = {}
        """By the link of the shard: a shard may have an earlier link that is about to end."""

    def claim(self, link: object, shard_id: str, model: str, checksum: str) -> str:
        """Returns why the shard must not be used; "" if it may, and then its tokenizer is claimed until `release`. An
        empty checksum claims nothing: it is not known which tokenizer the shard has."""
        if not checksum:
            return ""
        for other in self._claims.values():
            if other.model == model and other.checksum != checksum and other.shard_id != shard_id:
                return (
                    f"shard {shard_id} has another tokenizer ({checksum[:_SHOWN_CHARS]}) for the model {model} than "
                    f"shard {other.shard_id} ({other.checksum[:_SHOWN_CHARS]}): give it another model name"
                )
        self._claims[link] = _Claim(shard_id, model, checksum)
        return ""

    def release(self, link: object) -> None:
        """Does nothing if the link has claimed nothing."""
        self._claims.pop(link, None)
