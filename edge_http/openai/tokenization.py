"""The bodies of POST /tokenize, /detokenize, /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from edge_http.formatting.body_fields import LENIENT, NO_HEADERS, BodyReader, FieldRules
from edge_http.formatting.decoding import check_num_messages, decode_body
from edge_http.openai.requests import Body, ChatBody, Message, ToolBody
from kvloom.errors import KvloomError, invalid_argument, unsupported
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.config import AdapterName

MAX_TOKENS: Final = 2**20
"""The most tokens that one request turns into text."""


class TokenizeBody(Body, kw_only=True):
    """A text (`prompt`) or a conversation (`messages`)."""

    model: str
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ToolBody] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    """If true, a text gets the tokens that the tokenizer adds, as a prompt does. The default is true. Conversations
    have those of their template."""
    add_generation_prompt: bool | None = None
    """If true, a conversation ends with the beginning of an answer. The default is true."""
    continue_final_message: bool | None = None
    """If true, the last message is that beginning."""
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    model: str
    tokens: list[int]


def decode_tokenize(
    raw: bytes, max_messages: int, rules: FieldRules = LENIENT, headers: Mapping[str, str] = NO_HEADERS
) -> TokenizeBody:
    """Decode a body. Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    body = _TOKENIZE.read(raw, rules, headers)
    if (body.prompt is None) == (body.messages is None):
        raise invalid_argument("Give either prompt or messages.", "messages" if body.messages else "prompt")
    if body.messages is None:
        _check_text_fields(body)
        return body
    check_num_messages(len(body.messages), max_messages)
    if body.add_special_tokens:
        message = "add_special_tokens: a conversation has the special tokens of its template."
        raise unsupported(message, "add_special_tokens")
    _check_ending(body)
    return body


def decode_detokenize(
    raw: bytes, rules: FieldRules = LENIENT, headers: Mapping[str, str] = NO_HEADERS
) -> DetokenizeBody:
    """Decode a body. Raises KvloomError (INVALID_ARGUMENT, REQUEST_TOO_LARGE) that names the field."""
    body = _DETOKENIZE.read(raw, rules, headers)
    if len(body.tokens) > MAX_TOKENS:
        message = f"tokens has {len(body.tokens)} entries; at most {MAX_TOKENS}."
        raise KvloomError(ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, message, field="tokens")
    return body


def conversation_of(body: TokenizeBody) -> ChatBody:
    """The request for an answer that has this prompt."""
    assert body.messages is not None
    options = body.chat_template_kwargs
    return ChatBody(model=body.model, messages=body.messages, tools=body.tools, chat_template_kwargs=options)


def _check_text_fields(body: TokenizeBody) -> None:
    for field in ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
        if getattr(body, field) is not None:
            raise invalid_argument(f"{field} goes only with messages.", field)


def _check_ending(body: TokenizeBody) -> None:
    has_beginning = body.add_generation_prompt is not False
    if body.continue_final_message and body.add_generation_prompt:
        message = "Give either add_generation_prompt or continue_final_message."
        raise invalid_argument(message, "continue_final_message")
    if not (has_beginning or body.continue_final_message):
        message = "add_generation_prompt: a conversation is tokenized as a prompt, which ends where an answer begins."
        raise unsupported(message, "add_generation_prompt")


_TOKENIZE: Final = BodyReader(TokenizeBody)
_DETOKENIZE: Final = BodyReader(DetokenizeBody)


class LoadAdapterBody(Body, kw_only=True):
    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """A directory below edge.adapters_dir; a relative path is relative to it."""
    base_model_name: str | None = None
    """The model. It need not be given where there is only one."""


class UnloadAdapterBody(Body, kw_only=True):
    lora_name: str
    """The adapter's own name, or MODEL:ADAPTER."""
    lora_int_id: int | None = None
    """Not used: adapters have no numbers here."""


def decode_load(raw: bytes) -> LoadAdapterBody:
    """Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    return decode_body(_LOAD_DECODER, raw)


def decode_unload(raw: bytes) -> UnloadAdapterBody:
    """Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    return decode_body(_UNLOAD_DECODER, raw)


_LOAD_DECODER: Final = msgspec.json.Decoder(LoadAdapterBody)
_UNLOAD_DECODER: Final = msgspec.json.Decoder(UnloadAdapterBody)
