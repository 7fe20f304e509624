"""The token counts of a response, which every API reports under names of its own."""

from __future__ import annotations

import msgspec


class Usage(msgspec.Struct, frozen=True):
    """A prompt counts once, however many choices it has."""

    num_prompt_tokens: int
    num_output_tokens: int
    """The output tokens of all choices together, reasoning included."""
    num_cached_tokens: int
    """Prompt tokens whose KV was reused."""
    num_reasoning_tokens: int | None = None
    """None: the model's output was not searched for reasoning."""
    num_predicted_tokens: int = 0
    """Tokens of the request's prediction that were tried as drafts."""
    num_accepted_tokens: int = 0
    """Those of them that the answer has."""
