"""What the step loop asks of guided decoding; see llguidance_guides.py for who does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class GuideError(Exception):
    """The guide cannot be followed; the message is for the client."""


class GuideState(Protocol):
    """How far one sequence has come in its guide. Used by one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """Nothing follows, and no end-of-sequence token is wanted either: the answer ends here."""
        ...

    def mask(self) -> np.ndarray:
        """uint8 [at least vocab_size / 8], a bit per token, lowest first: 1 where it may be drawn next. Valid until the
        next call. Raises GuideError when the guide has led into a dead end or became too complex."""
        ...

    def take(self, token_ids: Sequence[int]) -> bool:
        """Go on behind tokens of the answer (none that ended it). False: they are not in the guide."""
        ...
