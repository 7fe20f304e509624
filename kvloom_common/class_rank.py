"""The rank of a request's class, as it is sent to a shard: the lower, the more urgent (docs/concepts/scheduling.md)."""

from __future__ import annotations

from typing import Final

INTERACTIVE_RANK: Final = 1
"""That of requests whose class is not named."""
