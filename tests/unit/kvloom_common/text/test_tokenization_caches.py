"""Tokenization caches: no caller's texts are in another's cache, and a flood of texts evicts only its sender's."""

from __future__ import annotations

from kvloom_common.text.public_pieces import PublicPieces, without_own_cache
from kvloom_common.text.tokenization_cache import TextEncoding
from kvloom_common.text.tokenization_caches import TokenizationCaches
from kvloom_common.text.tokenizer import ModelTokenizer
from tests.fakes.tiny_tokenizer import byte_level_tokenizer, model_tokenizer

SECRET = "Zanzibar merges with Quixote on 4711. " * 20


def misses(caches: TokenizationCaches, scope: str | None, text: str) -> list[str]:
    """Encodes the text; what of it was in no cache."""
    encoding = TextEncoding(caches.of(scope))
    for _ in caches.of(scope).fill(encoding, text):
        pass
    encode = byte_level_tokenizer().encode
    encoding.ids([encode(piece, add_special_tokens=False).ids for piece in encoding.misses])
    caches.fit()
    return list(encoding.misses)


def caches_of(max_bytes: int = 2**20, max_scopes: int = 8) -> TokenizationCaches:
    return TokenizationCaches(byte_level_tokenizer(), max_bytes, max_scopes)


def test_a_text_of_one_caller_is_new_for_another() -> None:
    """Blocks, words and digits alike: what another has sent costs as much as what was never sent."""
    caches = caches_of()
    never_sent = misses(caches, "other", SECRET)
    assert never_sent
    assert misses(caches_of(), "other", SECRET) == never_sent
    for text in (SECRET, SECRET[:300], "Quixote " * 40):
        fresh = misses(caches_of(), "attacker", text)
        assert misses(caches, None, text) == fresh
    assert misses(caches, "attacker", SECRET) == never_sent
    assert not misses(caches, "attacker", SECRET)
    assert not misses(caches, "other", SECRET)


def test_what_nobody_may_find_is_not_kept() -> None:
    """A text that is encoded for no caller in particular is new the next time."""
    caches = caches_of()
    assert misses(caches, None, SECRET) == misses(caches, None, SECRET)
    assert (caches.num_bytes, caches.num_scopes) == (0, 0)


def test_only_the_vocabularys_words_are_common() -> None:
    """They do not depend on what anybody has sent."""
    caches, public = caches_of(), PublicPieces()
    misses(caches, "other", SECRET + " the quick brown fox")
    caches.learn()
    public.learn(byte_level_tokenizer())
    assert "quick" in public.words
    assert "Zanzibar" not in public.words
    assert misses(caches, "attacker", "the quick brown " * 40) == ["the", " "]
    assert "Zanzibar" in "".join(misses(caches, "attacker", SECRET))


def test_a_flood_of_texts_evicts_its_senders_own() -> None:
    """The largest cache makes room, so a calm caller's stays, and the bound holds."""
    caches = caches_of(max_bytes=60_000)
    misses(caches, "calm", SECRET)
    for number in range(200):
        misses(caches, "flood", f"word{number}x " * 300)
        assert caches.num_bytes <= 60_000
    assert not misses(caches, "calm", SECRET)


def test_the_caches_of_many_callers_are_bounded() -> None:
    """The one that was used least recently goes, with its bytes."""
    caches = caches_of(max_scopes=3)
    for number in range(10):
        misses(caches, f"caller {number}", SECRET)
    assert caches.num_scopes == 3
    num_bytes = caches.num_bytes
    misses(caches, "caller 0", SECRET)
    assert caches.num_bytes == num_bytes
    caches.clear()
    assert (caches.num_bytes, caches.num_scopes) == (0, 0)


def test_a_cache_that_left_while_a_text_was_encoded_counts_no_longer() -> None:
    """The encoding is completed, and its bytes are not missed later."""
    caches = caches_of()
    cache = caches.of("caller")
    encoding = TextEncoding(cache)
    for _ in cache.fill(encoding, SECRET):
        pass
    caches.clear()
    expected = byte_level_tokenizer().encode(SECRET, add_special_tokens=False).ids
    encode = byte_level_tokenizer().encode
    assert list(encoding.ids([encode(piece).ids for piece in encoding.misses])) == expected
    assert caches.num_bytes == 0


def test_the_librarys_own_cache_is_off() -> None:
    """The library would keep the first 10,000 words that a process sees, whoever sends them. There is no way to look
    into that cache, so this test only says that the library can still be told to keep none."""
    model = without_own_cache(byte_level_tokenizer()).model
    assert callable(model._resize_cache)
    assert callable(model._clear_cache)


async def test_a_tokenizer_gives_the_same_ids_to_all_scopes() -> None:
    """With and without a cache, before and after the common words are known."""
    tokenizer = ModelTokenizer(byte_level_tokenizer())
    expected = tokenizer.encode_now(SECRET)
    for scope in ("a", "b", None, "a"):
        assert list(await tokenizer.encode(SECRET, scope=scope)) == expected
    tokenizer.close()
    assert list(await tokenizer.encode(SECRET, scope="a")) == expected
    assert list(await model_tokenizer().encode(SECRET, scope="")) == expected
