"""The ids of tool calls."""

from __future__ import annotations

import hashlib

_NUM_DIGITS = 24


def tool_call_id(response_id: str, choice: int, number: int, prefix: str) -> str:
    """The id of a choice's n-th call. It follows from the response's id, so that an edge which continues the response
    uses the same one."""
    digest = hashlib.blake2b(f"{response_id}/{choice}/{number}".encode(), digest_size=_NUM_DIGITS // 2)
    return prefix + digest.hexdigest()
