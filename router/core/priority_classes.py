"""The classes of requests: which goes first, and what each is guaranteed (docs/concepts/scheduling.md).

The tier of a request (`Tier`) is what it costs, its class when it is served. Without declared classes there is one for
each tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from kvloom_common.class_rank import INTERACTIVE_RANK

MAX_CLASSES: Final = 16
"""How many may be declared."""
MAX_PLACED_RANK: Final = 1
"""Requests of this rank, or a more urgent one, wait in the queues of shards. Others are parked: they are not placed at
all while a more urgent one waits."""


class PriorityClass(msgspec.Struct, frozen=True):
    """The settings of kvloom_common.config.PriorityClassConfig."""

    name: str
    rank: int
    """The lower, the more urgent. Classes of one rank share the shards by their weights."""
    weight: float = 1.0
    reserved_share: float = 0.0
    """The part of each shard's batch, and of its KV blocks, that other classes leave to this one while it has work."""
    aging_seconds: float = 0.0
    """After how long a waiting request counts as one rank more urgent, and after twice that as two; 0: never."""
    max_queue_seconds: float | None = None
    """How long a request may wait; None: as long as those of classes that do not say."""

    @property
    def is_parked(self) -> bool:
        """True when its requests are parked while more urgent ones wait."""
        return self.rank > MAX_PLACED_RANK

    def rank_after(self, waited_seconds: float) -> int:
        """The rank of a request that has waited so long. It may be below every class's."""
        return self.rank - int(waited_seconds / self.aging_seconds) if self.aging_seconds else self.rank


JUDGE: Final = PriorityClass("judge", 0)
INTERACTIVE: Final = PriorityClass("interactive", INTERACTIVE_RANK)
BATCH: Final = PriorityClass("batch", 2)
SHADOW: Final = PriorityClass("shadow", 3)
CLASS_OF_TIER: Final[Mapping[int, PriorityClass]] = {one.rank: one for one in (JUDGE, INTERACTIVE, BATCH, SHADOW)}
"""By Tier, if none are declared."""
ROUTERS_OWN: Final = frozenset({JUDGE.name, SHADOW.name})
"""Classes that no client may name."""
