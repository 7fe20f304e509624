"""The body of POST /v1/embeddings, and the response to it, in OpenAI's shape."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from operator import mul
from typing import Any, Final, Literal

from edge_http.formatting.body_fields import LENIENT, NO_HEADERS, BodyReader, FieldRules
from edge_http.formatting.json_bytes import encode_json
from edge_http.openai.prompt import PromptInput, text_prompt, token_prompt
from edge_http.openai.requests import Body, FallbackModels
from edge_http.openai.sampling import check_text_size
from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1 import generation_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import Pooling
from kvloom_common.text.tokenizer import ModelTokenizer

MAX_INPUTS: Final = 2048
MAX_TOKENS: Final = 300_000
"""The most tokens of all inputs of one request together. Both limits are OpenAI's."""

_POOLING_KINDS: Final = {
    None: generation_pb2.POOLING_KIND_UNSPECIFIED,
    "mean": generation_pb2.POOLING_KIND_MEAN,
    "last": generation_pb2.POOLING_KIND_LAST,
    "cls": generation_pb2.POOLING_KIND_CLS,
}


class EmbeddingsBody(Body, kw_only=True):
    model: str
    models: FallbackModels = None
    input: str | list[str | int | list[int]]
    """A text, several texts, the token ids of a text, or those of several texts."""
    encoding_format: Literal["float", "base64"] | None = None
    """The default is "float". "base64" is that of little-endian float32."""
    dimensions: int | None = None
    """How many dimensions are kept, from the first on. The rest of the vector is scaled to the length 1."""
    pooling: Literal["mean", "last", "cls"] | None = None
    """An extension: how the hidden states of the tokens become one vector. The default is the model's."""
    normalize: bool | None = None
    """An extension: whether vectors have the length 1. The default is true."""
    user: str | None = None
    """Without effect: its purpose is OpenAI's abuse monitoring."""


def decode_embeddings(
    raw: bytes, rules: FieldRules = LENIENT, headers: Mapping[str, str] = NO_HEADERS
) -> EmbeddingsBody:
    """Decode a body. Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    body = _EMBEDDINGS.read(raw, rules, headers)
    if body.dimensions is not None and body.dimensions < 1:
        raise invalid_argument("dimensions must be at least 1.", "dimensions")
    return body


def pooling_of(body: EmbeddingsBody) -> Pooling:
    return Pooling(kind=_POOLING_KINDS[body.pooling], raw_length=body.normalize is False)


def check_dimensions(dimensions: int | None, embedding_size: int) -> None:
    """Raise INVALID_ARGUMENT for more dimensions than the model's vectors have (0: not known)."""
    if dimensions is not None and embedding_size and dimensions > embedding_size:
        raise invalid_argument(
            f"dimensions is {dimensions}, but the embeddings of this model have {embedding_size}.", "dimensions"
        )


async def input_prompts(
    given: str | Sequence[str | int | Sequence[int]], tokenizer: ModelTokenizer, max_model_len: int, *, scope: str
) -> list[PromptInput]:
    """One prompt for a string or a list of ids, and several for a list of strings or of lists. `max_model_len` is the
    model's window in tokens, or 0 if it is not known. Raises KvloomError."""
    if isinstance(given, str):
        return await text_prompts([given], ["input"], tokenizer, max_model_len, scope=scope)
    if not given:
        raise invalid_argument("input must not be empty.", "input")
    texts = [text for text in given if isinstance(text, str)]
    ids = [token_id for token_id in given if isinstance(token_id, int)]
    lists = [list(token_ids) for token_ids in given if not isinstance(token_ids, str | int)]
    if len(ids) == len(given):
        prompts = [token_prompt(ids, "input", tokenizer)]
        check_sizes(prompts, max_model_len)
        return prompts
    if len(given) not in (len(texts), len(lists)):
        raise invalid_argument("input must not mix strings, token ids and lists of token ids.", "input")
    fields = [f"input[{i}]" for i in range(len(given))]
    check_num_inputs(len(given), "input")
    if texts:
        return await text_prompts(texts, fields, tokenizer, max_model_len, scope=scope)
    prompts = [token_prompt(token_ids, field, tokenizer) for token_ids, field in zip(lists, fields, strict=True)]
    check_sizes(prompts, max_model_len)
    return prompts


async def text_prompts(
    texts: Sequence[str], fields: Sequence[str], tokenizer: ModelTokenizer, max_model_len: int, *, scope: str
) -> list[PromptInput]:
    """The prompts of texts; `fields` are their places in the body, `scope` is the caller's. Raises KvloomError."""
    prompts: list[PromptInput] = []
    num_tokens = 0
    for text, field in zip(texts, fields, strict=True):
        if not text:
            raise invalid_argument(f"{field} must not be empty.", field)
        prompts.append(await text_prompt(text, field, tokenizer, max_model_len, scope=scope))
        num_tokens += len(prompts[-1].token_ids)
        if num_tokens > MAX_TOKENS:
            break  # `check_sizes` refuses it; the rest need not be tokenized
    check_sizes(prompts, max_model_len)
    return prompts


async def pair_prompts(
    pairs: Sequence[tuple[str, str]],
    fields: Sequence[str],
    tokenizer: ModelTokenizer,
    max_model_len: int,
    *,
    scope: str,
) -> list[PromptInput]:
    """The prompts of pairs of texts, for a cross-encoder; `fields` are the places of the second ones. Raises
    KvloomError."""
    prompts: list[PromptInput] = []
    num_tokens = 0
    for (first, second), field in zip(pairs, fields, strict=True):
        if not (first and second):
            raise invalid_argument(f"{field} must not be empty, nor what it is compared with.", field)
        check_text_size(len(first) + len(second), max_model_len, field)
        token_ids = await tokenizer.encode_pair(first, second, scope=scope)
        prompts.append(PromptInput(token_ids, f"{first}\n{second}", field))
        num_tokens += len(token_ids)
        if num_tokens > MAX_TOKENS:
            break  # as above: a text that is compared with many others would be read and kept as often
    check_sizes(prompts, max_model_len)
    return prompts


def check_num_inputs(num_inputs: int, field: str) -> None:
    if num_inputs > MAX_INPUTS:
        raise invalid_argument(f"{field} has {num_inputs} entries; at most {MAX_INPUTS} in one request.", field)


def check_sizes(prompts: Sequence[PromptInput], max_model_len: int) -> None:
    """Raise KvloomError (CONTEXT_LENGTH_EXCEEDED, REQUEST_TOO_LARGE) for inputs that are too long."""
    num_tokens = 0
    for prompt in prompts:
        size = len(prompt.token_ids)
        num_tokens += size
        if max_model_len and size > max_model_len:
            raise KvloomError(
                ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED,
                f"This model's maximum context length is {max_model_len} tokens, but {prompt.field} has {size}. Please "
                "shorten it, or embed it in parts.",
                field=prompt.field,
            )
    if num_tokens > MAX_TOKENS:
        field = prompts[0].field.partition("[")[0]
        message = f"The inputs have more than {MAX_TOKENS} tokens in all, which is the most in one request."
        raise KvloomError(ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, message, field=field)


def shortened(vector: bytes, dimensions: int | None, *, normalize: bool) -> array[float]:
    """The first `dimensions` of a vector of packed little-endian float32, or all; scaled to the length 1 again."""
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    if dimensions is None or dimensions >= len(values):
        return values
    values = values[:dimensions]
    if not normalize:
        return values
    length = math.sqrt(sum(map(mul, values, values)))
    return array("f", [value / length for value in values]) if length else values


def response_pieces(
    vectors: Sequence[bytes],
    body: EmbeddingsBody,
    model: str,
    num_prompt_tokens: int,
    details: Mapping[str, Any] | None = None,
) -> Iterator[bytes]:
    """The JSON of the response, in pieces of one vector each. `details`: its field `kvloom`."""
    yield b'{"object":"list","data":['
    for index, vector in enumerate(vectors):
        values = shortened(vector, body.dimensions, normalize=body.normalize is not False)
        if body.encoding_format == "base64":
            if sys.byteorder == "big":
                values.byteswap()
            embedding = base64.b64encode(values.tobytes()).decode()
        else:
            embedding = values.tolist()
        entry = encode_json({"object": "embedding", "index": index, "embedding": embedding})
        yield b"," + entry if index else entry
    usage = {"prompt_tokens": num_prompt_tokens, "total_tokens": num_prompt_tokens}
    more = b"" if details is None else b',"kvloom":' + encode_json(details)
    yield b'],"model":%b,"usage":%b%b}' % (encode_json(model), encode_json(usage), more)


_EMBEDDINGS: Final = BodyReader(EmbeddingsBody)
