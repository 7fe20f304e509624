"""The content of a receipt, its canonical form, and its digests.

A receipt is one JSON object. Its canonical form has sorted keys and no white space, and there are no fractional numbers
in it: those of the sampling parameters are texts. It comes in a bundle, with what is needed to compute the answer
again:

    {"receipt": {...}, "signature": "...", "key_id": "...", "request": {...}, "output": [...]}
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec
from google.protobuf import json_format
from google.protobuf.message import Message
from msgspec import UNSET, UnsetType

from kvloom.v1.generation_pb2 import Pooling, SamplingParams, StopConditions
from kvloom_common.finish_reasons import FINISH_REASON_NAMES
from kvloom_common.tenancy.prices import Price

M = TypeVar("M", bound=Message)
VERSION: Final = 1
MAX_BUNDLE_BYTES: Final = 16 * 2**20
_CONTENT: Final = frozenset({"guide", "predicted_token_ids", "stop"})
"""Fields of sampling parameters and stop conditions that have texts of a client."""


class SignedPrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `Price` (kvloom_common/tenancy/prices.py) in whole numbers."""

    id: str
    model: str
    effective_from_ms: int
    """Milliseconds since 1970."""
    prompt_nanos: int
    cached_nanos: int
    output_nanos: int
    request_nanos: int
    batch_percent: int
    result_cache_percent: int

    @classmethod
    def of(cls, price: Price) -> SignedPrice:
        fields = msgspec.structs.asdict(price)
        return cls(effective_from_ms=int(fields.pop("effective_from") * 1000), **fields)

    @property
    def price(self) -> Price:
        fields = msgspec.structs.asdict(self)
        return Price(effective_from=fields.pop("effective_from_ms") / 1000, **fields)


class Receipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a bundle that is signed. Checksums and digests are SHA-256 in hexadecimal."""

    version: int
    request_id: str
    ended_at_ms: int
    """Milliseconds since 1970."""
    tenant: str
    model: str
    model_version: str
    weights_checksum: str
    """The checksum of the model's files (kvloom_common/text/model_checksum.py)."""
    card_checksum: str
    """The checksum of the model's card: tokenizer, chat template, defaults."""
    chat_template_checksum: str
    adapter: str
    adapter_checksum: str
    engine_variant: str
    """Names what the bits depend on besides the weights; "": several variants have computed the answer, or one that
    promises no bits, so that it cannot be computed again."""
    request_digest: str
    """The digest of the bundle's `request`."""
    output_digest: str
    """The digest of the bundle's `output`."""
    seed: int
    policy_revision: str
    """The revision of the safety policy; "": nothing was screened."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    is_result_cache_hit: bool
    is_batch: bool
    price: SignedPrice
    cost_nanos: int


class RequestedGeneration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request as the engine got it."""

    prompt_token_ids: list[int]
    sampling: dict[str, Any]
    """SamplingParams, as JSON; fractional numbers are texts."""
    stop: dict[str, Any]
    """StopConditions, as JSON. `max_tokens` is the limit that applied."""
    indexes: list[int]
    """The indexes of the choices."""
    pooling: dict[str, Any] | UnsetType = UNSET
    """Pooling, as JSON. There is one only if the prompt's embedding was asked for."""


class Output(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One choice."""

    index: int
    token_ids: list[int]
    finish_reason: str
    """The name in `FinishReason`, without its prefix, in lower case."""
    stop_string: str
    embedding: str | UnsetType = UNSET
    """The embedding of the prompt, if that was asked for: base64 of the engine's little-endian float32, before a
    client's `dimensions` shorten it."""


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    receipt: Receipt
    signature: str
    """Ed25519 of `signed_bytes(receipt)`, in hexadecimal."""
    key_id: str
    request: RequestedGeneration
    output: list[Output]


_encoder: Final = msgspec.json.Encoder(order="sorted")
_decoder: Final = msgspec.json.Decoder(Bundle)


def canonical(value: Any) -> bytes:
    return _encoder.encode(value)


def digest(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def signed_bytes(receipt: Receipt) -> bytes:
    """Returns the bytes that are signed. Their head keeps the signature from being taken for one of anything else."""
    return b"kvloom receipt\n" + canonical(receipt)


def encode_bundle(bundle: Bundle) -> bytes:
    return _encoder.encode(bundle)


def decode_bundle(encoded: bytes | str) -> Bundle:
    """Raises ValueError with what is wrong."""
    try:
        bundle = _decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no receipt: {error}") from error
    if bundle.receipt.version != VERSION:
        raise ValueError(f"it is of version {bundle.receipt.version}; this program knows version {VERSION}")
    return bundle


def wanted_of(
    prompt_token_ids: Sequence[int], sampling: SamplingParams, stop: StopConditions, max_tokens: int | None,
    indexes: Sequence[int], pooling: Pooling | None = None,
) -> RequestedGeneration:  # fmt: skip
    limited = StopConditions()
    limited.CopyFrom(stop)
    if max_tokens is not None:
        limited.max_tokens = max_tokens
    return RequestedGeneration(
        prompt_token_ids=list(prompt_token_ids),
        sampling=_as_json(sampling),
        stop=_as_json(limited),
        indexes=list(indexes),
        pooling=UNSET if pooling is None else _as_json(pooling),
    )


def without_content(wanted: RequestedGeneration) -> dict[str, Any]:
    """The request without the prompt, and without other texts of the client."""
    plain = {name: value for name, value in msgspec.to_builtins(wanted).items() if name != "prompt_token_ids"}
    for parameters in ("sampling", "stop"):
        plain[parameters] = {name: value for name, value in plain[parameters].items() if name not in _CONTENT}
    return plain


def sampling_of(wanted: RequestedGeneration) -> SamplingParams:
    """Raises ValueError."""
    return _of_json(wanted.sampling, SamplingParams())


def pooling_of(wanted: RequestedGeneration) -> Pooling | None:
    """None: an answer was asked for. Raises ValueError."""
    return None if wanted.pooling is UNSET else _of_json(wanted.pooling, Pooling())


def stop_of(wanted: RequestedGeneration) -> StopConditions:
    """Raises ValueError."""
    return _of_json(wanted.stop, StopConditions())


def output_of(index: int, token_ids: Sequence[int], reason: int, stop_string: str, embedding: bytes) -> Output:
    return Output(
        index=index,
        token_ids=list(token_ids),
        finish_reason=FINISH_REASON_NAMES[reason],
        stop_string=stop_string,
        embedding=base64.b64encode(embedding).decode() if embedding else UNSET,
    )


def _as_json(message: Message) -> dict[str, Any]:
    return _with_texts(json_format.MessageToDict(message, preserving_proto_field_name=True))


def _with_texts(value: Any) -> Any:
    """Fractional numbers as texts: how they are written in JSON differs between programs."""
    if isinstance(value, dict):
        return {key: _with_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_texts(item) for item in value]
    return repr(value) if isinstance(value, float) else value


def _of_json(value: dict[str, Any], message: M) -> M:
    try:
        return json_format.ParseDict(value, message)
    except json_format.ParseError as error:
        raise ValueError(f"its request cannot be read: {error}") from error
