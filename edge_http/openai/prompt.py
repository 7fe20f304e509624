"""Converts a body to prompts in token ids, with the text that the safety service screens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from edge_http.openai.requests import CompletionBody, Prediction, parts_text
from edge_http.openai.sampling import check_text_size
from kvloom.conversation.tools import Tool
from kvloom.errors import KvloomError, invalid_argument, unsupported
from kvloom.sampling import MAX_PREDICTED_TOKENS
from kvloom.v1.generation_pb2 import PromptImage
from kvloom_common.conversation.prompt import conversation_prompt, num_written_chars
from kvloom_common.text.prompt_images import PromptImages
from kvloom_common.text.tokenizer import ChatMessage, ModelTokenizer

MAX_PROMPTS: Final = 64
MAX_CHOICES_PER_REQUEST: Final = 128
"""The limit for all prompts of one completion request together."""


class PromptInput(NamedTuple):
    token_ids: Sequence[int]
    text: str
    """The text for the safety service. It is "" when the client sent token ids, which the router then decodes."""
    field: str
    """The position of the prompt in the body, e.g. "messages" or "prompt[3]"."""
    images: Sequence[PromptImage] = ()


async def chat_prompt(
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    template_options: Mapping[str, Any],
    tokenizer: ModelTokenizer,
    max_model_len: int = 0,
    field: str = "messages",
    *,
    scope: str,
    is_continued: bool = False,
    images: PromptImages | None = None,
) -> tuple[PromptInput, str]:
    """Render and tokenize a conversation. `max_model_len` is the model's window in tokens, or 0 if it is not known;
    `scope` is the caller's (see RequestCallers.cache_scope_of); `is_continued`: the last message is the beginning of
    the answer. `images`: those of which the messages have marks. Returns the prompt and its rendered text.
    Raises KvloomError."""
    check_text_size(num_written_chars(messages, tools), max_model_len, field)
    token_ids, rendered = await conversation_prompt(
        tokenizer, messages, tools, template_options, is_continued, scope=scope, images=images
    )
    return PromptInput(token_ids, rendered, field, () if images is None else images.placed), rendered


def truncated(prompt: PromptInput, most: int, window: int, max_tokens: int | None) -> PromptInput:
    """The prompt with its last tokens only, at most so many; -1: as many as the window has besides the answer. Raises
    KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER)."""
    if prompt.images:
        raise unsupported("truncate_prompt_tokens: a prompt with images is not cut.", "truncate_prompt_tokens")
    if most < -1 or most == 0:
        raise invalid_argument("truncate_prompt_tokens must be at least 1, or -1.", "truncate_prompt_tokens")
    if most == -1:
        most = max(1, window - (max_tokens or 1))
    return prompt if len(prompt.token_ids) <= most else prompt._replace(token_ids=prompt.token_ids[-most:], text="")


async def predicted_tokens(
    prediction: Prediction, tokenizer: ModelTokenizer, max_model_len: int = 0, *, scope: str
) -> Sequence[int]:
    """The tokens of the answer that the client expects. Raises KvloomError."""
    content = prediction.content
    text = content if isinstance(content, str) else parts_text(content, "prediction.content")
    check_text_size(len(text), max_model_len, "prediction.content")
    return (await tokenizer.encode(text, scope=scope))[:MAX_PREDICTED_TOKENS]


async def completion_prompts(
    body: CompletionBody, n: int, tokenizer: ModelTokenizer, max_model_len: int = 0, *, scope: str
) -> list[PromptInput]:
    """Return one prompt for a string or a list of ids, and several for a list of strings or of lists. `max_model_len`
    is the model's window in tokens, or 0 if it is not known. Raises KvloomError."""
    given, adds = body.prompt, body.add_special_tokens is not False
    if isinstance(given, str):
        return [await text_prompt(given, "prompt", tokenizer, max_model_len, scope=scope, add_special_tokens=adds)]
    if not given:
        raise invalid_argument("prompt must not be empty.", "prompt")
    texts = [text for text in given if isinstance(text, str)]
    ids = [token_id for token_id in given if isinstance(token_id, int)]
    lists = [token_ids for token_ids in given if isinstance(token_ids, list)]
    if len(ids) == len(given):
        return [token_prompt(ids, "prompt", tokenizer)]
    if len(given) not in (len(texts), len(lists)):
        raise invalid_argument("prompt must not mix strings, token ids and lists of token ids.", "prompt")
    if len(given) > MAX_PROMPTS or len(given) * n > MAX_CHOICES_PER_REQUEST:
        raise invalid_argument(
            f"prompt has {len(given)} entries with n = {n}; at most {MAX_PROMPTS} prompts and "
            f"{MAX_CHOICES_PER_REQUEST} answers in one request.",
            "prompt",
        )
    if lists:
        return [token_prompt(token_ids, f"prompt[{i}]", tokenizer) for i, token_ids in enumerate(lists)]
    return [
        await text_prompt(text, f"prompt[{i}]", tokenizer, max_model_len, scope=scope, add_special_tokens=adds)
        for i, text in enumerate(texts)
    ]


async def text_prompt(
    text: str, field: str, tokenizer: ModelTokenizer, max_model_len: int, *, scope: str, add_special_tokens: bool = True
) -> PromptInput:
    """Tokenize a text of a caller with this scope (`RequestCallers.cache_scope_of`). Raises KvloomError."""
    check_text_size(len(text), max_model_len, field)
    try:
        token_ids = await tokenizer.encode(text, scope=scope, add_special_tokens=add_special_tokens)
    except KvloomError as error:
        error.field = error.field or field
        raise
    if not token_ids:
        raise invalid_argument(f"{field} must not be empty.", field)
    return PromptInput(token_ids, text, field)


def check_token_ids(token_ids: list[int], field: str, tokenizer: ModelTokenizer) -> None:
    """Raises KvloomError (INVALID_ARGUMENT) that names the one that is not a token."""
    if not token_ids:
        raise invalid_argument(f"{field} must not be empty.", field)
    if min(token_ids) < 0 or max(token_ids) >= tokenizer.vocab_size:
        bad = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < tokenizer.vocab_size)
        at = f"{field}[{bad}]"
        raise invalid_argument(f"{at} is not a token of this model: ids go from 0 to {tokenizer.vocab_size - 1}.", at)


def token_prompt(token_ids: list[int], field: str, tokenizer: ModelTokenizer) -> PromptInput:
    """The prompt of a client that tokenizes by itself. Raises KvloomError (INVALID_ARGUMENT)."""
    check_token_ids(token_ids, field, tokenizer)
    return PromptInput(token_ids, "", field)
