"""How the KV blocks of a shard are divided among tenants, as far as this router knows.

A batch can have free places while all blocks are held by few long answers: then the next sequence waits in the engine,
or the engine preempts one. What is free comes from the shard's last report, less what was sent since. What a tenant
holds is the length of its sequences; a prompt counts once for all choices of its request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from router.core.events import ShardLoad
from router.core.fleet.fleet import Shard
from router.core.live import Choice, LiveRequest
from router.core.load.load_ledger import LoadLedger

_State = tuple[ShardLoad, int, int, int, int, int]


class BlockShares:
    """Without a report since, and without a change of the sequences, what tenants hold is not counted again."""

    def __init__(self, ledger: LoadLedger) -> None:
        self._ledger = ledger
        self._held: dict[str, tuple[_State, Mapping[str, int]]] = {}
        """By shard: what each tenant held, and the state for which it was counted."""
        self._free: dict[str, tuple[_State, int]] = {}
        """By shard: what was free, and the state for which it was counted. Every waiting request asks for it."""

    def num_free(self, shard: Shard) -> int:
        """Blocks that nothing holds and that no sequence on its way there needs. Negative: some have to wait."""
        state = self._state(shard)
        known = self._free.get(shard.shard_id)
        if known is not None and _is_same(known[0], state):
            return known[1]
        view = self._ledger.view(shard.shard_id)
        num_free = view.report.num_available_blocks - view.num_unadmitted_blocks
        self._free[shard.shard_id] = (state, num_free)
        return num_free

    def num_own(self, shard: Shard) -> int:
        """The blocks that this router divides: those that other routers' sequences leave. What they hold is what the
        shard's report says beyond this router's own."""
        num_blocks = shard.description.num_blocks
        view = self._ledger.view(shard.shard_id)
        if not view.foreign_running:
            return num_blocks
        num_used = num_blocks - view.report.num_available_blocks
        return max(1, num_blocks - max(0, num_used - sum(self.held(shard).values())))

    def has_queued(self, shard: Shard) -> bool:
        """True when a sequence that was sent there has no token yet."""
        return bool(self._ledger.view(shard.shard_id).queued)

    def report(self, shard: Shard) -> ShardLoad:
        """The shard's last report."""
        return self._ledger.view(shard.shard_id).report

    def held(self, shard: Shard) -> Mapping[str, int]:
        """How many blocks each tenant's sequences hold there, or will hold once they start."""
        state = self._state(shard)
        known = self._held.get(shard.shard_id)
        if known is not None and _is_same(known[0], state):
            return known[1]
        shard.fast_path.write_back()
        held: Counter[str] = Counter()
        for choice in shard.choices.values():
            held[choice.request.request.tenant] += num_blocks_of(choice, shard)
        self._held[shard.shard_id] = (state, held)
        return held

    def forget(self) -> None:
        """Nothing needs the counts any more."""
        self._held.clear()
        self._free.clear()

    def _state(self, shard: Shard) -> _State:
        """Sequences are only added at the end, each with a higher number, so that these numbers tell whether they are
        the same as before."""
        attempts = shard.attempts
        newest = attempts[next(reversed(attempts))].dispatch_number if attempts else 0
        view = self._ledger.view(shard.shard_id)
        return view.report, len(attempts), len(shard.choices), newest, view.own_waiting, view.own_running


def _is_same(known: _State, state: _State) -> bool:
    """Every report is a new object, so that its identity tells whether there was one since."""
    return known[0] is state[0] and known[1:] == state[1:]


def num_blocks_of(choice: Choice, shard: Shard) -> int:
    """The blocks of one sequence, with its part of the prompt that it shares with the request's other choices."""
    live = choice.request
    num_prompt_tokens = len(live.request.prompt_token_ids) // max(1, live.num_open_choices)
    return -(-(num_prompt_tokens + len(choice.output_token_ids)) // shard.description.block_size)


def num_blocks_needed(live: LiveRequest, shard: Shard) -> int:
    """The blocks with which the request starts there: those of its prompt and tokens, and one for each other choice."""
    return -(-live.num_context_tokens // shard.description.block_size) + max(0, len(live.pending) - 1)
