"""What the prefix index promises beyond correct answers: bounded memory, bounded steps, no work for the garbage
collector."""

from __future__ import annotations

import gc
import random

from router.core.events import KvChange
from router.core.prefix_index.event_order import SNAPSHOT_RETRY_SECONDS, EventOrder
from router.core.prefix_index.prefix_index import IndexStepSizes, PrefixIndex


def make_index(*shard_ids: str, max_blocks: int = 100_000, prefill_chunks: IndexStepSizes | None = None) -> PrefixIndex:
    """An index with shards whose first snapshot was empty."""
    index = PrefixIndex(prefill_chunks)
    for shard_id in shard_ids:
        index.add_shard(shard_id, max_blocks, 0.0)
        index.apply_snapshot(shard_id, 0, ())
    return index


def test_only_leading_blocks_count():
    """Engines report blocks whose predecessor was evicted; they are of no use until it is stored again."""
    index = make_index("a")
    index.apply_events("a", 1, [KvChange(stored=range(40)), KvChange(removed=[5])], 0.0)
    assert index.count_overlaps(range(40), 0.0) == {"a": 5}
    index.apply_events("a", 2, [KvChange(stored=[5])], 0.0)
    assert index.count_overlaps(range(40), 0.0) == {"a": 40}


def test_hundreds_of_shards_are_told_apart():
    """Depths of 300 shards over one prompt, with more bits than any machine word."""
    rng = random.Random(1)
    depths = {f"shard-{number}": rng.randrange(0, 130) for number in range(300)}
    index = make_index(*depths)
    for shard_id, depth in depths.items():
        index.apply_events(shard_id, 1, [KvChange(stored=range(1, depth + 1))], 0.0)
    expected = {shard_id: depth for shard_id, depth in depths.items() if depth}
    assert index.count_overlaps(range(1, 131), 0.0) == expected
    index.check_integrity()


def test_a_shard_that_announces_more_than_it_has_is_cut_off():
    """A miscounting engine must not fill the router's memory; a correct snapshot repairs the index."""
    index = make_index("a", max_blocks=50)
    index.apply_events("a", 1, [KvChange(stored=range(200))], 0.0)
    assert index.num_stored("a") == 50
    index.apply_snapshot("a", 1, range(500))
    assert index.num_stored("a") == 50
    index.place("a", range(1000, 2000), 0.0)
    index.apply_snapshot("a", 1, range(10))
    while not index.is_settled:
        index.settle()
    assert index.num_stored("a") == 10
    assert index.num_blocks == 10 + 50
    index.check_integrity()


def test_a_large_snapshot_is_read_in_steps_with_events_in_between():
    """The event loop must not be blocked; a block removed meanwhile must not reappear from the rest of the snapshot."""
    index = make_index("a", prefill_chunks=IndexStepSizes(snapshot_blocks=10, settle_blocks=10))
    index.apply_snapshot("a", 7, range(1000))
    assert index.count_overlaps(range(1000), 0.0) == {"a": 10}
    assert index.num_stored("a") == 1000
    index.apply_events("a", 8, [KvChange(removed=[999]), KvChange(stored=[5000])], 0.0)
    num_steps = 0
    while not index.is_settled:
        index.settle()
        num_steps += 1
    assert num_steps >= 90
    assert index.count_overlaps(range(1000), 0.0) == {"a": 999}
    assert index.count_overlaps([5000], 0.0) == {"a": 1}
    assert index.num_stored("a") == 1000


def test_blocks_of_a_departed_shard_vanish_at_once_and_their_memory_in_steps():
    """Removing a large shard changes one bit; look-ups are correct before and after the sweep."""
    index = make_index("a", "b")
    index.apply_events("a", 1, [KvChange(stored=range(50_000))], 0.0)
    index.apply_events("b", 1, [KvChange(stored=range(100))], 0.0)
    index.remove_shard("a")
    assert not index.is_settled
    assert index.num_blocks > 40_000
    assert index.count_overlaps(range(1000), 0.0) == {"b": 100}
    while not index.is_settled:
        index.settle()
    assert index.num_blocks == 100
    assert index.count_overlaps(range(1000), 0.0) == {"b": 100}
    index.check_integrity()


def test_memory_stays_bounded_when_snapshots_follow_one_another():
    """Each snapshot replaces everything; if the sweep did not keep up, all blocks ever held would pile up."""
    index = make_index("a", "b")
    index.apply_events("b", 1, [KvChange(stored=range(1_000_000, 1_020_000))], 0.0)
    for number in range(60):
        index.apply_snapshot("a", number, range(5000 * number, 5000 * number + 5000))
        assert index.num_blocks < 2 * (20_000 + 5000)
    index.check_integrity()


def test_a_shard_that_comes_and_goes_is_swept_too():
    """There is no event in between, as when a process dies at every start."""
    index = make_index("b")
    index.apply_events("b", 1, [KvChange(stored=range(20_000))], 0.0)
    for number in range(600):
        index.add_shard("a", 1000, 0.0)
        index.place("a", [10**6 + number, 5], 0.0)
        index.remove_shard("a")
    assert index.num_blocks < 20_000 + 300
    assert index.count_overlaps([5], 0.0) == {"b": 1}
    index.check_integrity()


def test_an_added_shard_that_is_there_has_restarted():
    """The blocks of its predecessor are forgotten, and its batch numbers restart."""
    index = make_index("a")
    index.apply_events("a", 1, [KvChange(stored=[1, 2, 3])], 0.0)
    index.add_shard("a", 100, 0.0)
    assert index.count_overlaps([1, 2, 3], 0.0) == {}
    index.apply_snapshot("a", 0, [1])
    assert not index.apply_events("a", 1, [KvChange(stored=[2])], 0.0)
    assert index.count_overlaps([1, 2, 3], 0.0) == {"a": 2}


def test_a_late_batch_closes_the_gap_and_what_came_after_it_was_not_lost():
    """Reordered batches lead to an exact index, with or without the snapshot that was asked for meanwhile."""
    index = make_index("a")
    assert index.apply_events("a", 2, [KvChange(removed=[1])], 0.0)
    assert not index.apply_events("a", 3, [KvChange(stored=[2])], 0.0)
    assert not index.apply_events("a", 1, [KvChange(stored=[1, 9])], 0.0)
    assert index.count_overlaps([9], 0.0) == {"a": 1}
    assert index.count_overlaps([1], 0.0) == {}
    assert index.count_overlaps([2], 0.0) == {"a": 1}


def test_batches_above_a_snapshots_number_are_applied_behind_it():
    """A snapshot that is overtaken by later batches must not undo them."""
    index = make_index("a")
    assert index.apply_events("a", 2, [KvChange(stored=[2])], 0.0)
    index.apply_events("a", 4, [KvChange(stored=[4])], 0.0)
    assert index.apply_snapshot("a", 2, [1, 2]), "batch 3 is still missing: another snapshot is wanted"
    index.apply_events("a", 3, [KvChange(removed=[1])], 0.0)
    assert [index.count_overlaps([block], 0.0) for block in (1, 2, 4)] == [{}, {"a": 1}, {"a": 1}]


def test_a_lost_snapshot_is_asked_for_again_but_not_at_every_batch():
    """The question or its answer may be lost; a shard with a million blocks must not be asked a hundred times."""
    index = make_index("a")
    asked = [index.apply_events("a", 2 + step, [], step / 10) for step in range(101)]
    assert [step / 10 for step, is_asking in enumerate(asked) if is_asking] == [0, 5, 10]
    assert SNAPSHOT_RETRY_SECONDS == 5


def test_held_batches_are_bounded():
    """A gap that is never closed must not fill the memory; a later snapshot repairs what was given up."""
    order = EventOrder(100, 0.0)
    order.skip_to(0)
    for number in range(2, 5000):
        assert not order.push(number, [KvChange(stored=[number])])
        order.check_integrity()
    order.skip_to(4950)
    assert [change[0].stored for change in order.take()] == [[number] for number in range(4951, 5000)]
    assert order.is_current


def test_the_index_leaves_nothing_for_the_garbage_collector_to_walk():
    """A full collection touches every object it tracks: with millions of them it would block the event loop."""
    index = make_index("a", "b")
    first = random.Random(2).getrandbits(64)
    hashes = [first + number for number in range(60_000)]
    gc.collect()
    num_before = len(gc.get_objects())
    index.apply_events("a", 1, [KvChange(stored=hashes)], 0.0)
    index.place("b", hashes[:1000], 0.0)
    gc.collect()
    assert len(gc.get_objects()) - num_before < 200
    assert index.num_blocks == 60_000


def test_placing_again_renews_the_belief():
    """The second request keeps the blocks believed in, should the prefill of the first take long."""
    index = make_index("a")
    index.place("a", [1, 2], 0.0)
    index.place("a", [1, 2, 3], 20.0)
    assert index.count_overlaps([1, 2, 3], 40.0) == {"a": 3}
    assert index.count_overlaps([1, 2, 3], 50.0) == {}
    assert index.num_blocks == 0
