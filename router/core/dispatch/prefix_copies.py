"""Copies of a prefix that many requests share, made on shards that have nothing to do.

A prefix that is cached on one shard draws all its requests there, until their decoding or their KV blocks make the
next one wait. That one then goes to another shard and computes the whole prefix, while its client waits. So when a
request is placed for which its shard is dear for other reasons than its own prefill, and others there share its
prefix, an idle shard is asked for the prefix and one token, which no client gets. A copy that is not used is evicted
like any other block.

A copy is made if it is worth more than it costs:

    saved seconds of a request x requests per second (Little: those that run / how long they do) x HORIZON_SECONDS
      > prefill of the copy x share of the shards that are busy + the use of the blocks that it evicts
"""

from __future__ import annotations

from typing import Final, NamedTuple

from router.core.fleet.fleet import Shard
from router.core.live import LiveRequest
from router.core.load.load_ledger import LoadLedger
from router.core.placement.placer import Placer
from router.core.placement.policy import Candidate

HORIZON_SECONDS: Final = 60.0
"""For how long a copy is expected to be of use."""
MIN_COPIED_TOKENS: Final = 4096
"""Shorter prefixes are computed by the request that needs them."""
MIN_SHARING: Final = 1
"""How many others must run that share the prefix."""
MIN_GAIN_SHARE: Final = 0.1
"""The least gain, as a share of the time that the prefix takes to compute: for less, nothing else is looked at."""
MIN_BUSY_SHARE: Final = 0.05
"""A copy is never free."""
COPY_NAME: Final = "copy"
"""See `preparing`: the name of its request ends in it."""


def is_worthwhile(
    saved_seconds: float,
    num_sharing: int,
    residual_seconds: float,
    copy_seconds: float,
    busy_share: float,
    eviction_seconds: float,
) -> bool:
    """`saved_seconds`: what the request would have been spared; `num_sharing`: others that run and share the prefix;
    `residual_seconds`: how long they do; `copy_seconds`: the prefill of the prefix; `busy_share`: of all shards;
    `eviction_seconds`: the prefill that evicted blocks would have saved."""
    if num_sharing < MIN_SHARING:
        return False
    rate = (num_sharing + 1) / max(residual_seconds, 1.0)
    cost = copy_seconds * max(busy_share, MIN_BUSY_SHARE) + eviction_seconds
    return saved_seconds * rate * HORIZON_SECONDS > cost


class Copy(NamedTuple):
    """A copy to be made."""

    shard: Shard
    num_tokens: int
    """Whole blocks."""


class PrefixCopies:
    """Decides about copies; AttemptSender sends them."""

    def __init__(self, ledger: LoadLedger, placer: Placer) -> None:
        self._ledger = ledger
        self._placer = placer

    def wanted(self, live: LiveRequest, shard: Shard, candidate: Candidate, now: float) -> Copy | None:
        """The copy that is worth making now that the request is being sent to this shard."""
        num_tokens, request = candidate.num_overlap_tokens, live.request
        if num_tokens < MIN_COPIED_TOKENS or live.num_attempts > 1 or live.split is not None or request.discards_blocks:
            return None
        view = self._ledger.view(shard.shard_id)
        if not view.running or self._placer.hold is None or request.pooling is not None:
            return None
        saved_seconds = self._placer.costs_besides_prefill(live, candidate)
        if saved_seconds < MIN_GAIN_SHARE * num_tokens * view.speed.seconds_per_token:
            return None
        num_blocks = num_tokens // candidate.block_size
        hashes = live.prompt_hashes(candidate.block_size)
        num_sharing = view.num_sharing(hashes, num_blocks)
        if num_sharing < MIN_SHARING:
            return None
        found = self._idle_shard(live, candidate, now)
        if found is None:
            return None
        target, there, busy_share = found
        eviction = there.own_seconds * there.reuse_probability * there.num_evicted_blocks / max(there.num_new_blocks, 1)
        copy_seconds = self._ledger.view(target.shard_id).speed.request_seconds(num_tokens, 0, 0)
        residual_seconds = view.residual_seconds(now)
        if not is_worthwhile(saved_seconds, num_sharing, residual_seconds, copy_seconds, busy_share, eviction):
            return None
        return Copy(target, num_blocks * candidate.block_size)

    def _idle_shard(self, live: LiveRequest, candidate: Candidate, now: float) -> tuple[Shard, Candidate, float] | None:
        """(the shard with nothing to do that was used longest ago, as the request sees it, share of shards that are
        busy). None: there is none, or enough copies are being made."""
        idle_ids = self._ledger.idle()
        if not idle_ids:
            return None
        shards = self._placer.eligibility.open_shards(live)
        idle = [shard for shard in shards if shard.shard_id in idle_ids]
        if len(idle) <= self._ledger.num_copies[live.request.model]:
            return None
        for shard in sorted(idle, key=lambda one: (one.turn, one.shard_id)):
            if shard.description.block_size != candidate.block_size:
                continue
            there = self._placer.candidate(live, shard, now)
            if 2 * there.num_overlap_tokens < candidate.num_overlap_tokens:
                return shard, there, 1 - len(idle) / len(shards)
        return None
