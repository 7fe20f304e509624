"""TensorRT-LLM's KV events become what routers compute: every trap of theirs, once. A test's blocks are of 4 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvloom_common.text.block_hash import block_hashes
from shard_server.engines.base import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from shard_server.engines.tensorrt_llm.kv_cache.kv_events import KvEventTranslator
from shard_server.engines.tensorrt_llm.kv_cache.kv_records import as_records, parse_events
from shard_server.engines.tensorrt_llm.kv_cache.kv_roots import RootLedger

SIZE = 4
ROOT = 77
A, B, C = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]


class Source:
    """Writes events as the library does."""

    def __init__(self, rank: int | None = None) -> None:
        self.next_id = 0
        self.rank = rank

    def event(self, data: dict[str, Any], window: int | None = 4096) -> dict[str, Any]:
        event: dict[str, Any] = {"event_id": self.next_id, "data": data}
        if window is not None:
            event["window_size"] = window
        if self.rank is not None:
            event["attention_dp_rank"] = self.rank
        self.next_id += 1
        return event

    def created(self, window: int = 4096) -> dict[str, Any]:
        return self.event({"type": "created", "num_blocks_per_cache_level": [8, 0]}, window)

    def stored(
        self, parent: int | str | None, *blocks: tuple[int | str, Sequence[Any]], window: int = 4096, **more: Any
    ) -> dict[str, Any]:
        listed = [
            {
                "type": "stored_block",
                "block_hash": identity,
                "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens],
                "cache_level": 0,
                "priority": 35,
                **more,
            }
            for identity, tokens in blocks
        ]
        return self.event({"type": "stored", "parent_hash": parent, "blocks": listed}, window)

    def removed(self, *identities: int | str, window: int = 4096) -> dict[str, Any]:
        return self.event({"type": "removed", "block_hashes": list(identities)}, window)

    def updated(self, identity: int) -> dict[str, Any]:
        diff = {"type": "event_diff", "old_value": 0, "new_value": 1}
        return self.event({"type": "updated", "block_hash": identity, "cache_level": diff, "priority": None})


class World:
    """A translator, and what a router that hears it would think is cached."""

    def __init__(self) -> None:
        self.roots = RootLedger(SIZE, 1000)
        self.translator = KvEventTranslator(SIZE, 8, self.roots)
        self.cached: set[int] = set()
        self.events: list[KvEvent] = []

    def hear(self, *events: Any) -> list[KvEvent]:
        found = self.translator.translate(parse_events(list(events)))
        for event in found:
            match event:
                case BlockStored(hashes):
                    assert hashes
                    assert self.cached.isdisjoint(hashes), "stored twice"
                    self.cached.update(hashes)
                case BlockRemoved(hashes):
                    assert self.cached.issuperset(hashes), "removed without having been stored"
                    self.cached.difference_update(hashes)
                case AllBlocksCleared():
                    self.cached.clear()
        self.events += found
        return found

    def submit(self, *blocks: Sequence[int], root: int = ROOT) -> list[int]:
        tokens = [token for block in blocks for token in block]
        self.roots.remember(tokens, root)
        return block_hashes(tokens, SIZE, root)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def source() -> Source:
    return Source()


def test_blocks_are_told_under_the_hashes_that_routers_compute(world: World, source: Source):
    """Also those of a later event, which names its parent by TensorRT-LLM's own hash."""
    hashes = world.submit(A, B, C)
    world.hear(source.created(), source.stored(None, (901, A), (902, B)))
    world.hear(source.stored(902, (903, C)))
    assert world.events == [BlockStored(hashes[:2]), BlockStored(hashes[2:])]
    world.hear(source.removed(903, 902))
    assert world.cached == {hashes[0]}


def test_partial_blocks_are_ignored_and_so_is_their_removal(world: World, source: Source):
    """No router asks for them, and a removal of what was never stored is a lie."""
    hashes = world.submit(A)
    world.hear(source.created(), source.stored(None, (901, A), (902, [5, 6])), source.removed(902))
    assert world.events == [BlockStored(hashes)]
    world.hear(source.stored(None, (904, [1, 2])), source.removed(904))
    assert len(world.events) == 1


def test_only_the_largest_window_counts(world: World, source: Source):
    """A sliding window's blocks hold the same tokens under identities of their own, and go earlier."""
    hashes = world.submit(A)
    world.hear(source.created(512), source.created(4096))
    world.hear(source.stored(None, (801, A), window=512), source.stored(None, (901, A), window=4096))
    world.hear(source.removed(801, window=512))
    assert world.cached == set(hashes)


@pytest.mark.parametrize(
    "blocks",
    [
        {"tokens": (901, ["image", "image", 3, 4])},
        {"tokens": (901, A), "mm_keys": [{"type": "mm_key", "hash": "ab"}]},
    ],
)
def test_blocks_that_tokens_do_not_name_are_skipped_with_their_children(
    world: World, source: Source, blocks: dict[str, Any]
):
    """Two images have the same placeholder tokens."""
    world.submit(A, B)
    tokens = blocks.pop("tokens")
    world.hear(source.created(), source.stored(None, tokens, **blocks), source.stored(901, (902, B)))
    world.hear(source.removed(901, 902))
    assert world.events == []


def test_children_of_an_unknown_parent_are_skipped(world: World, source: Source):
    """Their hash cannot be known; guessing would send requests to the wrong shard."""
    world.hear(source.created(), source.stored(12345, (902, B)), source.stored(902, (903, C)))
    assert world.events == []


def test_a_gap_clears_and_what_shows_itself_is_told_again(world: World, source: Source):
    """A child stored, or an update, proves that its ancestors are still there."""
    hashes = world.submit(A, B, C)
    world.hear(source.created(), source.stored(None, (901, A), (902, B)))
    source.next_id += 3
    world.hear(source.removed(777))
    assert world.cached == set()
    assert world.translator.num_resyncs == 1
    world.hear(source.stored(902, (903, C)))
    assert world.cached == set(hashes)
    source.next_id += 1
    world.hear(source.updated(901))
    assert world.cached == {hashes[0]}


def test_what_was_removed_is_not_told_again(world: World, source: Source):
    """After a gap a block may be updated whose parent has gone meanwhile."""
    hashes = world.submit(A, B)
    world.hear(source.created(), source.stored(None, (901, A), (902, B)))
    source.next_id += 1
    world.hear(source.removed(901), source.updated(902))
    assert world.cached == {hashes[1]}


def test_a_restart_forgets_everything(world: World, source: Source):
    """Identities of the engine before it mean nothing."""
    world.submit(A, B)
    world.hear(source.created(), source.stored(None, (901, A)))
    world.hear()
    source.next_id = 0
    world.hear(source.created(), source.stored(901, (902, B)))
    assert world.cached == set()


def test_ranks_have_numbers_and_blocks_of_their_own(world: World):
    """A block is cached as long as one rank has it; a gap of one rank is not the other's."""
    first, second = Source(0), Source(1)
    hashes = world.submit(A, B)
    world.hear(first.created(), second.created(), first.stored(None, (901, A), (902, B)), second.stored(None, (901, A)))
    world.hear(first.removed(902, 901))
    assert world.cached == {hashes[0]}
    first.next_id += 5
    world.hear(first.stored(None, (905, [13, 14, 15, 16])))
    assert world.cached == {hashes[0]}, "the second rank's is reported again"
    assert world.translator.num_resyncs == 1


def test_newer_versions_clear_by_an_event(world: World, source: Source):
    """A weight update drops the cache."""
    world.submit(A)
    world.hear(source.created(), source.stored(None, (901, A)), source.event({"type": "all_cleared"}, None))
    assert world.cached == set()


def test_a_block_of_two_identities_is_told_once(world: World, source: Source):
    """Two requests computed the same prompt at the same time."""
    hashes = world.submit(A)
    world.hear(source.created(), source.stored(None, (901, A)), source.stored(None, (902, A)), source.removed(901))
    assert world.cached == set(hashes)
    world.hear(source.removed(902))
    assert world.cached == set()


def test_a_block_is_gone_as_soon_as_one_group_of_layers_has_lost_it(world: World, source: Source):
    """The groups' events have the same identities, texts in the newest versions; only what all have can be reused."""
    a, b = world.submit(A, B)

    def of_group(group: int, event: dict[str, Any]) -> dict[str, Any]:
        return event | {"layer_group_id": group, "hash_algo": "v2_sha256"}

    first, second = "0a" * 32, "0b" * 32
    stored = [of_group(group, source.stored(None, (first, A), (second, B))) for group in (0, 1)]
    assert world.hear(*stored) == [BlockStored([a, b])]
    assert world.hear(of_group(1, source.removed(second))) == [BlockRemoved([b])]
    assert world.hear(of_group(0, source.removed(second))) == []
    again = [of_group(group, source.stored(first, (second, B))) for group in (0, 1)]
    assert world.hear(*again) == [BlockStored([b])]


def test_a_cache_that_loses_removals_starts_anew(world: World, source: Source, monkeypatch: pytest.MonkeyPatch):
    """The map of identities is bounded."""
    monkeypatch.setattr(world.translator, "_max_identities", 3)
    world.hear(source.created())
    for number in range(5):
        block = [100 + number] * 4
        world.submit(block)
        world.hear(source.stored(None, (900 + number, block)))
    assert len(world.cached) <= 3
    assert AllBlocksCleared() in world.events


# -- whose block is it ------------------------------------------------------------------------------------------------


def test_tenants_are_told_apart_by_what_follows_their_common_prefix(world: World, source: Source):
    """1.2.1 tells no salt; the same system prompt is stored once per tenant."""
    one = world.submit(A, B, root=1)
    two = world.submit(A, C, root=2)
    world.hear(source.created(), source.stored(None, (902, A), (904, C)))
    assert world.cached == set(two)
    world.hear(source.stored(None, (901, A), (903, B)))
    assert world.cached == {*one, *two}
    world.hear(source.removed(904, 902))
    assert world.cached == set(one)


def test_equal_prompts_of_tenants_are_ascribed_in_the_order_of_submission(world: World, source: Source):
    """They cannot be told apart; once both are stored both are known, and that is exact."""
    one, two = world.submit(A, root=1), world.submit(A, root=2)
    world.hear(source.created(), source.stored(None, (901, A)))
    assert world.cached == set(one)
    world.hear(source.stored(None, (902, A)))
    assert world.cached == {*one, *two}


def test_a_root_that_lost_its_block_is_ascribed_the_next(world: World, source: Source):
    """Evicted and computed again."""
    one, two = world.submit(A, root=1), world.submit(A, root=2)
    world.hear(source.created(), source.stored(None, (901, A)), source.stored(None, (902, A)), source.removed(901))
    assert world.cached == set(two)
    world.hear(source.stored(None, (903, A)))
    assert world.cached == {*one, *two}


def test_a_salt_that_is_told_is_believed(world: World, source: Source):
    """Newer versions; also for a prompt of which no trace is left."""
    world.submit(A, root=1)
    world.hear(source.created(), source.stored(None, (901, A), cache_salt=f"{2:016x}"))
    assert world.cached == set(block_hashes(A, SIZE, 2))


def test_blocks_of_unknown_owners_are_not_reported(world: World, source: Source):
    """The health probe's, or those of a prompt that was forgotten."""
    world.hear(source.created(), source.stored(None, (901, A), cache_salt="kvloom probe"), source.removed(901))
    assert world.events == []


def test_the_traces_are_bounded():
    """A shard lives for weeks."""
    roots = RootLedger(SIZE, 10)
    for number in range(50):
        roots.remember([number] * SIZE, 1)
    assert roots.claim([b"".join(n.to_bytes(4, "little") for n in [49] * SIZE)]) == 1
    assert roots.claim([b"".join(n.to_bytes(4, "little") for n in [1] * SIZE)]) is None


@pytest.mark.parametrize("batch", [None, [], {"event_id": 1}, '[{"event_id": 1}]', [['{"event_id": 1}']]])
def test_batches_come_in_several_shapes(batch: Any):
    """Versions return dictionaries, JSON, or lists of either."""
    assert as_records(batch) in ([], [{"event_id": 1}])
