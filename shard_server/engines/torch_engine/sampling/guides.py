"""The interface of guided decoding; llguidance_guides.py implements it. Kept apart from it because llguidance is an
optional dependency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class GuideError(Exception):
    """The guide cannot be applied; the message is for the client."""

    def __init__(self, message: str, *, names_place: bool = False) -> None:
        super().__init__(message)
        self.names_place = names_place
        """The message says which part of the guide is at fault."""


class GuideState(Protocol):
    """The progress of one sequence in its guide. Used by one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """True when the answer ends here: nothing may follow, and the request has no end-of-sequence token to draw."""
        ...

    def mask(self) -> np.ndarray:
        """uint8 [at least vocab_size / 8], a bit per token, lowest first: 1 where it may be drawn next. Valid until the
        next call. Raises GuideError when the guide has led into a dead end or became too complex."""
        ...

    def take(self, token_ids: Sequence[int]) -> bool:
        """Advance over tokens of the answer (not over one that ended it). Returns False if the guide does not allow
        them."""
        ...
