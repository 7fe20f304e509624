"""The headers by which the orchestrator tells an edge on whose behalf it sends a request. Only the port of an edge for
its fabric reads them, and only from an orchestrator, or from an edge that relays what an orchestrator has asked."""

from __future__ import annotations

from typing import Final

TENANT: Final = "x-kvloom-on-behalf-of"
KEY_ID: Final = "x-kvloom-on-behalf-of-key"
RUN: Final = "x-kvloom-run"
"""The header of a background response: JSON with its `id`, its `created_at` and its `seed`, which are always the same,
however often it is generated."""
MAY_SPEAK: Final = "edge/on-behalf"
"""The name of this right in kvloom_common/trust/roles.py."""
