"""The ids of tool calls."""

from __future__ import annotations

import hashlib
from typing import Final

CALL_ID_PREFIX: Final = "call_"
_NUM_DIGITS: Final = 24


def tool_call_id(answer_id: str, choice: int, number: int, prefix: str = CALL_ID_PREFIX) -> str:
    """The id of a choice's n-th call. It follows from the id of the response or request, so that a process which
    continues an answer uses the same one."""
    digest = hashlib.blake2b(f"{answer_id}/{choice}/{number}".encode(), digest_size=_NUM_DIGITS // 2)
    return prefix + digest.hexdigest()
