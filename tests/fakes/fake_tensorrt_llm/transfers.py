"""KV that one fake engine keeps for another, in the same process or another one: a file for each context-only request.
A generation-only request fetches the KV by removing its file, which its keeper notices at its next step.

As in the library, KV that is not fetched is kept for `kv_transfer_timeout_ms`, and for ever without it.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fakes.fake_tensorrt_llm.outputs import Logprob


@dataclasses.dataclass
class _Kept:
    path: Path
    referenced: Sequence[int]
    num_blocks: int
    kept_until: float


class Transfers:
    """What an engine keeps for others. `timeout_ms` None: until it is fetched."""

    def __init__(self, timeout_ms: int | None) -> None:
        self._timeout_ms = timeout_ms
        self._kept: list[_Kept] = []
        self._directory: Path | None = None

    @property
    def num_held_blocks(self) -> int:
        return sum(kept.num_blocks for kept in self._kept)

    def keep(self, prompt: Sequence[int], referenced: Sequence[int], num_blocks: int) -> bytes:
        """Returns the opaque state with which another engine fetches it."""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="fake-tensorrt-llm-"))
        path = self._directory / f"{time.monotonic_ns()}"
        path.write_text(repr(list(prompt)))
        timeout_seconds = float("inf") if self._timeout_ms is None else self._timeout_ms / 1000
        self._kept.append(_Kept(path, referenced, num_blocks, time.monotonic() + timeout_seconds))
        return os.fsencode(path)

    def take_released(self) -> list[tuple[Sequence[int], int]]:
        """The (referenced, number of blocks) of what was fetched, or waited for too long."""
        now = time.monotonic()
        released = [kept for kept in self._kept if now >= kept.kept_until or not kept.path.exists()]
        if released:
            self._kept = [kept for kept in self._kept if kept not in released]
        for kept in released:
            kept.path.unlink(missing_ok=True)
        return [(kept.referenced, kept.num_blocks) for kept in released]

    def close(self) -> None:
        for kept in self._kept:
            kept.path.unlink(missing_ok=True)
        self._kept.clear()
        if self._directory is not None:
            self._directory.rmdir()
            self._directory = None


def fetch(params: Any, prompt: Sequence[int]) -> bool:
    """Whether the KV of that very prompt was there; it is gone from there now."""
    path = Path(os.fsdecode(params.opaque_state or b""))
    try:
        is_the_prompts = path.read_text() == repr(list(prompt))
        path.unlink()
    except OSError:
        return False
    return is_the_prompts


def context_params(
    given: Any, request_id: int, first: list[int], log_probs: list[dict[int, Logprob]], state: bytes
) -> Any:
    """What a finished context-only request has. `log_probs` are empty unless the request asked for them."""
    found = dataclasses.replace(
        given, first_gen_tokens=first, opaque_state=state, ctx_request_id=request_id, draft_tokens=None
    )
    if hasattr(found, "disagg_request_id"):
        found.ctx_dp_rank, found.ctx_info_endpoint, found.schedule_style = 0, "tcp://127.0.0.1:1", 0
        found.first_gen_log_probs = log_probs or None
        found.ctx_request_id = found.disagg_request_id if found.disagg_request_id is not None else request_id
    return found
