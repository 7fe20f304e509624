"""Checks prompts: their size, also while memory is short, their tokens, and their text for the safety service."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from kvloom.adapters import unknown_name
from kvloom.errors import KvloomError, invalid_argument
from kvloom.text.token_ids import are_below
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import PromptImage
from kvloom_common.limits.byte_budget import memory_error
from kvloom_common.limits.memory_watch import LARGE_BYTES, MemoryLevel
from kvloom_common.models.served_model import ServedModel, adapters_by_model
from kvloom_common.text.prompt_images import MAX_IMAGE_BYTES

MAX_NAME_CHARS: Final = 256
"""The longest request id (the router's or the caller's), tenant, trace context or session key."""
CHARS_PER_TOKEN: Final = 4
"""The usual number, by which large prompts of tokens are told apart from small ones."""
MAX_CHARS_PER_TOKEN: Final = 16
"""A text with more characters than this per allowed prompt token is rejected before any work is done on it."""
MAX_NAMED_MODELS: Final = 8
"""How many models an error names."""


class PromptChecks:
    """Checks prompts for the models of a router."""

    def __init__(
        self, models: Mapping[str, ServedModel], max_prompt_tokens: int, needs_prompt_text: Callable[[], bool]
    ) -> None:
        self._models = models
        self.max_prompt_tokens = max_prompt_tokens
        self._max_tokens_now = max_prompt_tokens
        """The limit for the moment, which is lower while memory is short."""
        self._max_chars_now = max_prompt_tokens * MAX_CHARS_PER_TOKEN
        self._max_image_bytes_now = MAX_IMAGE_BYTES
        self.needs_text = needs_prompt_text

    def on_memory_level(self, level: MemoryLevel) -> None:
        """From now on large prompts are refused, or all of them, or those above the usual limit."""
        most = (self.max_prompt_tokens * MAX_CHARS_PER_TOKEN, LARGE_BYTES, 0)[level]
        self._max_chars_now = min(most, self.max_prompt_tokens * MAX_CHARS_PER_TOKEN)
        self._max_tokens_now = min(most // CHARS_PER_TOKEN, self.max_prompt_tokens)
        self._max_image_bytes_now = (MAX_IMAGE_BYTES, LARGE_BYTES, 0)[level]

    def check_tokens(
        self, token_ids: Sequence[int], model: ServedModel | None, field: str, words: Sequence[int] | None = None
    ) -> None:
        """Refuse a prompt that is empty or too long, or whose tokens the model does not have. `words`: those that stand
        for no image; None: all of them. Raises KvloomError."""
        words = token_ids if words is None else words
        if not token_ids:
            raise invalid_argument(f"{field} must not be empty.", field)
        if len(token_ids) > self._max_tokens_now:
            if len(token_ids) <= self.max_prompt_tokens:
                raise memory_error()
            raise KvloomError(
                ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE,
                f"The prompt has {len(token_ids)} tokens; at most {self.max_prompt_tokens} are allowed.",
                field=field,
            )
        # The vocabularies of models without a card are not known here; their shards check the ids.
        if model is not None and not _are_below(words, model.tokenizer.vocab_size):
            raise invalid_argument(
                f"{field} holds {max(words)}, but ids of this model are below {model.tokenizer.vocab_size}.", field
            )

    def check_images(self, images: Iterable[PromptImage]) -> None:
        """Refuse large images while memory is short. Raises KvloomError."""
        most = self._max_image_bytes_now  # in ordinary times, their contents alone count (words_of)
        if most < MAX_IMAGE_BYTES and sum(image.ByteSize() for image in images) > most:
            raise memory_error()

    def check_num_chars(self, num_chars: int, field: str) -> None:
        if num_chars > self._max_chars_now:
            limit = self.max_prompt_tokens * MAX_CHARS_PER_TOKEN
            if num_chars <= limit:
                raise memory_error()
            raise KvloomError(
                ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE,
                f"{field} has {num_chars} characters; at most {limit} are allowed.",
                field=field,
            )

    def screened(self, token_ids: Sequence[int], model: ServedModel | None, name: str) -> str:
        """Decodes the tokens of a client that sent no text, so that leaving it out does not bypass the safety check.
        Returns "" when prompts are not screened."""
        if not self.needs_text():
            return ""
        if model is None:
            raise self.model_not_found(name)
        return model.tokenizer.decode(token_ids)

    def model_not_found(self, model: str) -> KvloomError:
        if not model:
            return invalid_argument("model is required.", "model")
        message = (
            f"The model {model[:MAX_NAME_CHARS]!r} does not exist here; this router serves {self._named_models()}."
        )
        if any(model.startswith(f"{name}:") for name in self._models):
            message = unknown_name(model, adapters_by_model(self._models.values()))
        return KvloomError(ErrorReason.ERROR_REASON_MODEL_NOT_FOUND, message, field="model")

    def _named_models(self) -> str:
        own = (name for name, model in self._models.items() if model.adapter is None)
        names = [repr(name) for name in itertools.islice(own, MAX_NAMED_MODELS + 1)]
        return ", ".join(names[:MAX_NAMED_MODELS]) + (", and others" if len(names) > MAX_NAMED_MODELS else "") or "none"


def _are_below(token_ids: Sequence[int], limit: int) -> bool:
    return are_below(token_ids, limit) if isinstance(token_ids, array) else max(token_ids) < limit
