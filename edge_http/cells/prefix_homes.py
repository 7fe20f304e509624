"""The cells that have computed the beginnings of prompts, by hashes of some of these.

A prompt is known by its first 32, 64, 128 ... tokens. So a conversation is found again although it grows, and what is
said of its cached part is at least half of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final

import xxhash

from edge_http.cells.policy import CachedPrefix
from kvloom_common.limits.scoped_cache import ScopedCache

FIRST_TOKENS: Final = 32
MAX_KEPT: Final = 65_536
"""Beginnings of prompts that are kept, those that were used last."""
KEPT_SECONDS: Final = 600.0
"""How long a cell is taken to have a prompt cached."""


class PrefixHomes:
    """Each tenant's prompts are kept by themselves, as what cells have cached of them is."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._homes: ScopedCache[int, str] = ScopedCache(max_kept, max_kept, lambda _: 1)
        self._last: tuple[str, str, Sequence[int], list[tuple[int, int]]] = ("", "", (), [])
        """The prompt whose beginnings were hashed last, with them: a request is looked up, and then noted."""

    def find(self, tenant: str, model: str, prompt_token_ids: Sequence[int], now: float) -> CachedPrefix | None:
        """The cell that has computed most of this prompt's beginning, for the same tenant and model."""
        found = None
        for num_tokens, digest in self._beginnings(tenant, model, prompt_token_ids):
            cell = self._homes.get(digest, now)
            if cell is None:
                break
            found = CachedPrefix(cell, num_tokens)
        return found

    def note(self, tenant: str, model: str, prompt_token_ids: Sequence[int], cell: str, now: float) -> None:
        """A request with this prompt goes to that cell."""
        for _, digest in self._beginnings(tenant, model, prompt_token_ids):
            self._homes.put(digest, cell, tenant, now + KEPT_SECONDS)

    def _beginnings(self, tenant: str, model: str, prompt_token_ids: Sequence[int]) -> list[tuple[int, int]]:
        last_tenant, last_model, last_prompt, beginnings = self._last
        if last_prompt is not prompt_token_ids or (last_tenant, last_model) != (tenant, model):
            beginnings = list(_beginnings(tenant, model, prompt_token_ids))
            self._last = (tenant, model, prompt_token_ids, beginnings)
        return beginnings


def _beginnings(tenant: str, model: str, prompt_token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(number of tokens, hash) of the beginnings by which a prompt is known, the shortest first."""
    digest = xxhash.xxh3_64(f"{tenant}\0{model}\0".encode("utf-8", "surrogatepass"))
    begin, end = 0, FIRST_TOKENS
    while end <= len(prompt_token_ids):
        digest.update(array("I", prompt_token_ids[begin:end]).tobytes())
        yield end, digest.intdigest()
        begin, end = end, 2 * end
