"""The prompt of a request's body, as the prefix index knows prompts.

With the model's tokenizer it is the tokens that the engine computes, so that its KV events can be compared with them.
Without one it is the bytes of the JSON that hold the prompt, four for a token: about as many as there are in a token of
English, and equal as far as two bodies begin alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from typing import Any, Final

import msgspec

from edge_http.endpoints.generation import template_options
from edge_http.openai.messages import chat_messages
from edge_http.openai.requests import decode_chat, decode_completion
from edge_http.openai.tools import tools_of
from kvloom.errors import KvloomError
from kvloom_common.conversation.prompt import conversation_prompt
from kvloom_common.text.tokenizer import ModelTokenizer
from tools.gateway.kv_events import prefix_salt

BYTES_PER_TOKEN: Final = 4
MAX_MESSAGES: Final = 100_000
CHAT_PATH: Final = "/v1/chat/completions"
COMPLETION_PATH: Final = "/v1/completions"


class GatewayBody(msgspec.Struct):
    """The parts of a body that matter for its placement, whichever API it is of. Everything else is for the engine to
    judge."""

    model: Any = ""
    stream: Any = False
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    cache_salt: Any = ""
    instructions: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()

    @property
    def most_tokens(self) -> int | None:
        """The longest answer that it allows; None: it does not say."""
        limits = (self.max_tokens, self.max_completion_tokens, self.max_output_tokens)
        return min((limit for limit in limits if type(limit) is int and limit > 0), default=None)


class GatewayPrompt(msgspec.Struct, frozen=True):
    token_ids: Sequence[int] = (0,)
    salt: str = ""
    """Prompts with different ones share no blocks."""
    most_tokens: int | None = None
    is_stream: bool = False


NO_PROMPT: Final = GatewayPrompt()
"""That of a request without a body, or with one that is no JSON."""
_DECODER: Final = msgspec.json.Decoder(GatewayBody)


class PromptReader:
    def __init__(self, adapters: Container[str] = (), tokenizer: ModelTokenizer | None = None) -> None:
        """`adapters`: the names of models that are adapters of the one model."""
        self.adapters = adapters
        self._tokenizer = tokenizer

    async def read(self, path: str, raw: bytes) -> GatewayPrompt:
        """Raises ValueError if the body is no JSON object."""
        try:
            body = _DECODER.decode(raw)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from error
        adapter = body.model if isinstance(body.model, str) and body.model in self.adapters else ""
        salt = prefix_salt(adapter, body.cache_salt if isinstance(body.cache_salt, str) else "")
        token_ids = None if self._tokenizer is None else await _tokenized(path, raw, self._tokenizer, salt)
        return GatewayPrompt(token_ids or _pieces(body), salt, body.most_tokens, body.stream is True)


def _pieces(body: GatewayBody) -> Sequence[int]:
    text = b"".join((body.instructions, body.system, body.tools, body.messages, body.prompt, body.input))
    return array("I", text[: len(text) // BYTES_PER_TOKEN * BYTES_PER_TOKEN]) or NO_PROMPT.token_ids


async def _tokenized(path: str, raw: bytes, tokenizer: ModelTokenizer, scope: str) -> Sequence[int] | None:
    """The tokens of a prompt; None if it is of another API, or if it is not one that kvloom's own edge would take."""
    try:
        if path == CHAT_PATH:
            chat = decode_chat(raw, MAX_MESSAGES)
            messages, tools, options = chat_messages(chat.messages), tools_of(chat).tools, template_options(chat)
            is_continued = bool(chat.continue_final_message)
            return (await conversation_prompt(tokenizer, messages, tools, options, is_continued, scope=scope))[0]
        if path == COMPLETION_PATH:
            prompt = decode_completion(raw).prompt
            if isinstance(prompt, str):
                return await tokenizer.encode(prompt, scope=scope, add_special_tokens=True)
            if all(isinstance(token_id, int) and 0 <= token_id < 2**32 for token_id in prompt):
                return array("I", (token_id for token_id in prompt if isinstance(token_id, int)))
    except KvloomError:  # the engine may take it, or say what is wrong
        return None
    return None
