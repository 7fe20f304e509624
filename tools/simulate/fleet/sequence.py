"""One sequence on a modelled shard."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom_common.class_rank import INTERACTIVE_RANK
from tools.simulate.fleet.kv_cache import Lease


class ShardSequence:
    """A sequence from its submission to its end."""

    __slots__ = (
        "admitted_at",
        "class_rank",
        "end_step",
        "hashes",
        "is_cancelled",
        "lease",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_expected_prefill_tokens",
        "num_fetched_blocks",
        "num_output_tokens",
        "num_prompt_tokens",
        "order_key",
        "router_index",
        "slot",
        "submit_time",
        "tenant",
        "turn",
    )

    def __init__(
        self,
        *,
        slot: int,
        num_prompt_tokens: int,
        num_output_tokens: int,
        hashes: Sequence[int],
        num_expected_cached_tokens: int = 0,
        router_index: int = 0,
        submit_time: float = 0.0,
        class_rank: int = INTERACTIVE_RANK,
        tenant: str = "",
    ) -> None:
        self.slot = slot
        """The slot on the stream between the router and this shard."""
        self.router_index = router_index
        self.class_rank = class_rank
        self.tenant = tenant
        self.turn = 0
        """See shard_server/engines/prefill_order.py."""
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = num_output_tokens
        self.num_expected_prefill_tokens = max(1, num_prompt_tokens - num_expected_cached_tokens)
        """The prefill tokens that the router expected."""
        self.hashes = hashes
        """The hashes of the full blocks of the prompt."""
        self.submit_time = submit_time
        self.admitted_at = 0.0
        self.lease: Lease | None = None
        """Its blocks while it runs."""
        self.num_computed_tokens = 0
        """Prompt tokens that are computed, including reused ones."""
        self.num_cached_tokens = 0
        """Prompt tokens that were found in the cache or fetched."""
        self.num_fetched_blocks = 0
        """How many leading blocks will be present after the current fetch from another shard. 0 if there is none."""
        self.end_step: int | None = None
        """The step of the shard that yields its last token. None while it is not decoding."""
        self.is_cancelled = False
        self.order_key = 0.0
        """See engine_order."""

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_computed_tokens
