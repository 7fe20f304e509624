"""Long prompts are prefilled in chunks: shorter requests are served between them, and clients do not notice."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from kvloom.v1.generation_pb2 import FinishReason
from router.core.actions import Action, CancelOnShard, PlacementDecided, RequestEnded, SendStep, SubmitAttempt
from router.core.core_config import NO_OVERLOAD_CONTROL
from router.core.dispatch.prefill_chunks import MAX_PREFILL_CHUNKS, PREFILL_CHUNK_CLIENT_ID, PrefillChunkSettings
from router.core.events import KvChange, KvEventsArrived, LoadReported, RequestCancelled, ShardDown, ShardLoad
from router.core.frames import Finish, Start
from router.core.load.speed_model import PrefillWork, SpeedModel
from tests.fakes.core_rig import CoreRig, only

BIG, SMALL = 40_000, 3_000
SECOND = 10_000
"""Tokens that a new shard is thought to prefill in one."""


class PrefillChunkRig(CoreRig):
    """Shards that do what they are sent, one thing at a time."""

    def __init__(self, num_shards: int = 1, **config: object) -> None:
        super().__init__(**config)
        for i in range(num_shards):
            self.add_shard(f"s{i}", block_size=512, max_model_len=10**6, num_blocks=10**4, max_batch=64)

    def ask(self, name: str, slot: int, num_tokens: int, **changes: object) -> list[Action]:
        return self.submit(name, slots=(slot,), prompt_token_ids=[slot, *range(num_tokens - 1)], **changes)

    def compute(self, attempt: SubmitAttempt, num_cached_tokens: int, *, ends: bool) -> list[Action]:
        """The prefill is done in the expected time; a prefill chunk ends with its token."""
        self.now += (len(attempt.request.prompt_token_ids) - num_cached_tokens) / SECOND
        slot = attempt.choices[0].slot
        finishes = [Finish(slot, FinishReason.FINISH_REASON_LENGTH)] if ends else []
        starts = [Start(slot, num_cached_tokens, 0.0)]
        return self.step(attempt.shard_id, (slot, [7], "x"), starts=starts, finishes=finishes)


def attempts(actions: Sequence[Action]) -> list[SubmitAttempt]:
    return [action for action in actions if isinstance(action, SubmitAttempt)]


def run_prefill_chunks(
    rig: PrefillChunkRig, prefill_chunk: SubmitAttempt
) -> tuple[list[SubmitAttempt], SubmitAttempt, list[Action]]:
    """Compute one prefill chunk after the other; returns them, and the request itself with the actions that came with
    it."""
    prefill_chunks, num_cached_tokens = [], 0
    while True:
        assert prefill_chunk.prepares
        prefill_chunks.append(prefill_chunk)
        actions = rig.compute(prefill_chunk, num_cached_tokens, ends=True)
        num_cached_tokens = len(prefill_chunk.request.prompt_token_ids)
        prefill_chunk = only(actions, SubmitAttempt)
        if not prefill_chunk.prepares:
            return prefill_chunks, prefill_chunk, actions


def test_a_long_prompt_comes_in_chunks_that_grow_to_the_whole() -> None:
    """Each is the beginning of the prompt up to a block boundary, for one token, under the router's own client id; the
    client is sent nothing."""
    rig = PrefillChunkRig()
    prefill_chunks, last, _ = run_prefill_chunks(rig, only(rig.ask("r", 1, BIG, tenant="t"), SubmitAttempt))
    whole = [1, *range(BIG - 1)]
    ends = [len(prefill_chunk.request.prompt_token_ids) for prefill_chunk in prefill_chunks]
    assert len(prefill_chunks) >= 2
    assert ends == sorted(set(ends))
    for prefill_chunk in prefill_chunks:
        request = prefill_chunk.request
        assert list(request.prompt_token_ids) == whole[: len(request.prompt_token_ids)]
        assert len(request.prompt_token_ids) % 512 == 0
        assert (request.client_id, request.tenant, prefill_chunk.max_tokens) == (PREFILL_CHUNK_CLIENT_ID, "t", 1)
        assert prefill_chunk.prepares == "r"
    assert (
        len({prefill_chunk.request.request_id for prefill_chunk in prefill_chunks} | {"r"}) == len(prefill_chunks) + 1
    )
    assert (last.request.request_id, last.attempt_id, list(last.request.prompt_token_ids)) == ("r", 1, whole)
    assert last.num_expected_cached_tokens == ends[-1]
    assert not [action for action in rig.log if isinstance(action, SendStep | RequestEnded)]


def test_tokens_of_prefill_chunks_are_not_reported_as_cached() -> None:
    """The client is sent the number of tokens that were cached when its request arrived."""
    rig = PrefillChunkRig()
    prefill_chunks, last, _ = run_prefill_chunks(rig, only(rig.ask("r", 1, BIG), SubmitAttempt))
    ready = len(prefill_chunks[-1].request.prompt_token_ids)
    step = only(rig.compute(last, ready, ends=False), SendStep).step
    assert step.starts[0].num_cached_tokens == 0
    end = only(rig.finish("s0", last.choices[0].slot), RequestEnded)
    assert (end.num_cached_tokens, end.num_attempts, end.num_output_tokens) == (0, 1, 1)


def test_chunks_end_where_nothing_more_may_come_from_the_cache() -> None:
    """What is computed for its log-probabilities would be computed twice if a chunk had it before."""
    assert not only(PrefillChunkRig().ask("r", 1, BIG, max_cached_tokens=0), SubmitAttempt).prepares
    rig = PrefillChunkRig()
    first = only(rig.ask("r", 1, BIG, max_cached_tokens=20_000), SubmitAttempt)
    prefill_chunks, last, _ = run_prefill_chunks(rig, first)
    assert [len(prefill_chunk.request.prompt_token_ids) for prefill_chunk in prefill_chunks] == [11_776, 39 * 512]
    assert last.num_expected_cached_tokens == 39 * 512


def test_a_short_prompt_goes_in_between() -> None:
    """The purpose of prefill chunks: a short prompt waits for one chunk, not for the whole prompt before it."""
    rig = PrefillChunkRig()
    prefill_chunk = only(rig.ask("long", 1, BIG), SubmitAttempt)
    assert rig.ask("short", 2, SMALL) == []
    sent = attempts(rig.compute(prefill_chunk, 0, ends=True))
    assert sent[0].request.request_id == "short"
    assert all(attempt.prepares == "long" for attempt in sent[1:])


def test_short_prompts_and_other_policies_are_not_split() -> None:
    """A split costs the request itself, and a policy without a queue hold sends requests at once."""
    assert not only(PrefillChunkRig().ask("r", 1, SMALL), SubmitAttempt).prepares
    assert not only(PrefillChunkRig(prefill_chunks=None).ask("r", 1, BIG), SubmitAttempt).prepares
    assert not only(PrefillChunkRig(policy="conductor").ask("r", 1, BIG), SubmitAttempt).prepares


def test_an_engine_that_keeps_nothing_gets_the_whole() -> None:
    """Without a prefix cache every prefill chunk would be computed again with the next."""
    rig = PrefillChunkRig()
    first = only(rig.ask("r", 1, BIG), SubmitAttempt)
    second = only(rig.compute(first, 0, ends=True), SubmitAttempt)
    assert second.prepares
    last = only(rig.compute(second, 0, ends=True), SubmitAttempt)
    assert not last.prepares


def test_evicted_prefill_chunks_are_not_repeated() -> None:
    """The shard evicted what it had computed: the request is sent whole rather than split for ever."""
    rig = PrefillChunkRig()
    first = only(rig.ask("r", 1, BIG), SubmitAttempt)
    rig.now += 31.0  # placed blocks are not believed in for ever
    rig.handle(KvEventsArrived("s0", 1, [KvChange(cleared=True)]))
    assert not only(rig.compute(first, 0, ends=True), SubmitAttempt).prepares


@pytest.mark.parametrize("how", ["cancelled", "shard drains", "shard is gone"])
def test_a_prefill_chunk_is_cancelled_with_its_request(how: str) -> None:
    """A request that ends or moves leaves no useless computation behind."""
    rig = PrefillChunkRig(num_shards=2)
    prefill_chunk = only(rig.ask("r", 1, BIG), SubmitAttempt)
    slot, shard_id = prefill_chunk.choices[0].slot, prefill_chunk.shard_id
    if how == "cancelled":
        actions = rig.handle(RequestCancelled("r"))
        assert only(actions, CancelOnShard).slots == [slot]
        assert only(actions, RequestEnded).num_attempts == 0
        return
    if how == "shard drains":
        actions = rig.handle(LoadReported(shard_id, ShardLoad(draining=True)))
        assert only(actions, CancelOnShard).slots == [slot]
    else:
        actions = rig.handle(ShardDown(shard_id))
    again = only(actions, SubmitAttempt)
    assert again.shard_id != shard_id
    assert again.prepares == "r"
    _, last, _ = run_prefill_chunks(rig, again)
    assert last.attempt_id == 1


def test_a_failed_prefill_chunk_does_no_harm() -> None:
    """The missing part is computed with the request itself."""
    rig = PrefillChunkRig()
    prefill_chunk = only(rig.ask("r", 1, BIG), SubmitAttempt)
    actions = rig.fail("s0", prefill_chunk.choices[0].slot)
    attempt = only(actions, SubmitAttempt)
    assert attempt.prepares in ("", "r")
    assert not [action for action in rig.log if isinstance(action, RequestEnded)]


def test_a_request_with_a_prefill_chunk_does_not_count_against_the_queue_bound() -> None:
    """The bound of the queue is for requests that no shard serves; a shard already works for this one."""
    rig = PrefillChunkRig(max_queued_requests=1)
    assert only(rig.ask("long", 1, BIG), SubmitAttempt).prepares
    assert rig.ask("waits", 2, BIG + 512) == []
    assert only(rig.ask("refused", 3, BIG), RequestEnded).num_attempts == 0


def test_the_decision_is_reported_once_when_it_is_made() -> None:
    """Explanations show the fleet as it was when the shard was chosen, before the first prefill chunk."""
    rig = PrefillChunkRig(decision_sample_share=1.0)
    actions = rig.ask("r", 1, BIG)
    assert only(actions, PlacementDecided).attempt_id == 1
    run_prefill_chunks(rig, only(actions, SubmitAttempt))
    assert len([action for action in rig.log if isinstance(action, PlacementDecided)]) == 1


def test_prefill_chunks_are_bounded_in_number() -> None:
    """The bound holds however wrong the learned speeds are."""
    rig = PrefillChunkRig(prefill_chunks=PrefillChunkSettings(overhead_seconds=1e-9, min_seconds=1e-6, min_tokens=512))
    prefill_chunks, _, _ = run_prefill_chunks(rig, only(rig.ask("r", 1, 512 * 200), SubmitAttempt))
    assert len(prefill_chunks) == MAX_PREFILL_CHUNKS


def test_an_overlong_queue_does_not_block_a_free_shard() -> None:
    """Requests that lost their shard may be more than may wait; a new request whose first prefill chunk was just sent
    to a shard that none of them can use is not refused because of them."""
    prefill_chunks = PrefillChunkSettings(overhead_seconds=1e-12, min_seconds=1e-6, min_tokens=4)
    overload = msgspec.structs.replace(NO_OVERLOAD_CONTROL, outage_patience_seconds=3.0)
    rig = CoreRig(prefill_chunks=prefill_chunks, max_queued_requests=1, overload=overload)
    rig.add_shard("s0", max_batch=16, max_model_len=1000)
    rig.add_shard("s1", max_batch=16, max_model_len=64)
    for slot in range(3):
        rig.submit(f"r{slot}", slots=(slot,), prompt_token_ids=[slot] * 4, max_tokens=500)
    rig.handle(ShardDown("s0"))
    assert rig.core.num_queued_requests == 3
    actions = rig.submit("new", slots=(9,), prompt_token_ids=[9] * 40)
    assert only(actions, SubmitAttempt).prepares == "new"
    assert rig.core.num_queued_requests == 4


def test_prefill_chunks_shrink_with_the_arrival_rate() -> None:
    """The order quantity: with four times as many arrivals a prefill chunk is half as long, within bounds."""
    settings = PrefillChunkSettings(overhead_seconds=0.02, min_seconds=0.01)
    assert settings.prefill_chunk_seconds(4.0) == pytest.approx(settings.prefill_chunk_seconds(1.0) / 2)
    assert settings.prefill_chunk_seconds(1.0) == pytest.approx(0.2)
    assert settings.prefill_chunk_seconds(0.0) == settings.prefill_chunk_seconds(0.02)
    assert settings.prefill_chunk_seconds(1e9) == 0.01


@pytest.mark.parametrize("num_cached", [0, 50_000])
@pytest.mark.parametrize("seconds", [0.05, 0.5, 5.0])
def test_tokens_within_a_time_take_that_time(seconds: float, num_cached: int) -> None:
    """The inverse of the speed model."""
    speed = SpeedModel()
    for size in (500, 4000, 16_000, 64_000) * 20:
        speed.observe(PrefillWork.of(size, 0), 0, 0.01 + size * 5e-5 + size * size / 2 * 4e-10)
    num_tokens = speed.num_tokens_within(seconds, num_cached, 0)
    assert speed.seconds(PrefillWork.of(num_tokens, num_cached), 0) == pytest.approx(seconds, rel=0.02)
