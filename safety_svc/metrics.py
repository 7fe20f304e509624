"""What the safety service measures: per frame and per verdict, never per token."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge

BLOCKS: Final = Counter("kvloom_safety_blocks", "Prompts refused and answers halted.", ("target", "rule"))
PROMPTS: Final = Counter("kvloom_safety_prompts", "Prompts checked; not those that a router's prefilter cleared.")
ANSWERS: Final = Counter("kvloom_safety_answers", "Answers whose screening began.")
STREAMS: Final = Gauge("kvloom_safety_streams", "Routers connected.")
POLICY_LOADS: Final = Counter("kvloom_safety_policy_loads", "Changed policy files that were read.", ("result",))
