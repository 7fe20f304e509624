"""The cells that have computed the beginnings of prompts."""

from __future__ import annotations

from edge_http.cells.policy import CachedPrefix
from edge_http.cells.prefix_homes import FIRST_TOKENS, KEPT_SECONDS, PrefixHomes

PROMPT = list(range(200))


class CountedPrompt(list[int]):
    """Counts the tokens that are read of it."""

    num_read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.num_read += len(found)
        return found


def test_a_conversation_is_found_again_as_it_grows_by_its_tenant_alone() -> None:
    """Another tenant's prompt of the same tokens is cached for that tenant only, so that it has a home of its own."""
    homes = PrefixHomes()
    homes.note("acme/web", "m", PROMPT, "east", 0.0)
    assert homes.find("acme/web", "m", [*PROMPT, *PROMPT], 1.0) == CachedPrefix("east", 128)
    assert homes.find("acme/web", "m", PROMPT[:100], 1.0) == CachedPrefix("east", 64)
    assert homes.find("acme/web", "m", PROMPT[: FIRST_TOKENS - 1], 1.0) is None
    assert homes.find("other/web", "m", PROMPT, 1.0) is None
    assert homes.find("acme/web", "n", PROMPT, 1.0) is None
    assert homes.find("acme/web", "m", PROMPT, KEPT_SECONDS) is None


def test_it_follows_its_last_request_and_the_oldest_are_forgotten() -> None:
    """Memory is bounded, and what a cell has computed last it has cached."""
    homes = PrefixHomes(max_kept=4)
    homes.note("t", "m", PROMPT, "own", 0.0)
    homes.note("t", "m", [*PROMPT[:64], 7], "east", 0.0)
    assert homes.find("t", "m", PROMPT[:64], 0.0) == CachedPrefix("east", 64)
    homes.note("t", "m", [9, *PROMPT], "own", 0.0)
    homes.note("t", "m", [8, *PROMPT], "own", 0.0)
    assert homes.find("t", "m", PROMPT, 0.0) is None


def test_a_request_that_is_looked_up_and_noted_is_hashed_once() -> None:
    """Long prompts pass here on the way of each request, on the edge's only event loop."""
    homes = PrefixHomes()
    prompt = CountedPrompt(PROMPT)
    assert homes.find("acme/web", "m", prompt, 0.0) is None
    homes.note("acme/web", "m", prompt, "east", 0.0)
    assert prompt.num_read == 128
    assert homes.find("acme/web", "m", prompt, 0.0) == CachedPrefix("east", 128)
    assert homes.find("other/web", "m", prompt, 0.0) is None
    assert prompt.num_read == 256
