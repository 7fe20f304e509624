"""A prompt with packed ids is the same prompt to routers and shards, and gets the same checks."""

from __future__ import annotations

from typing import Any

import pytest

from kvloom.errors import KvloomError
from kvloom.text.token_ids import pack_token_ids
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import Choice
from kvloom.v1.shard_service_pb2 import ShardSubmit
from router.core.events import Request
from router.request_validator import RequestValidator
from shard_server.engines.base import EngineInfo
from shard_server.submits import resolve_submit
from tests.fakes.link_requests import make_submit
from tests.fakes.served_models import tiny_models
from tests.fakes.tiny_tokenizer import model_tokenizer

INFO = EngineInfo(
    engine="sim",
    model="tiny",
    block_size=4,
    num_blocks=100,
    max_batch=4,
    max_model_len=100,
    vocab_size=model_tokenizer().vocab_size,
    eos_token_ids=frozenset(),
    capabilities=frozenset(),
)


def by_router(**prompt: Any) -> list[int]:
    intake = RequestValidator(tiny_models(), 50, lambda: False)
    request = intake.request_from_submit(make_submit(model="tiny", choices=[Choice(slot=1)], **prompt), "c")
    assert isinstance(request, Request)
    return list(request.prompt_token_ids)


def by_shard(**prompt: Any) -> list[int]:
    [request] = resolve_submit(ShardSubmit(request_id="r", choices=[Choice(slot=1)], **prompt), INFO, 1)
    return list(request.prompt_token_ids)


READERS = pytest.mark.parametrize("read", [by_router, by_shard])


@READERS
def test_both_forms_are_read(read: Any) -> None:
    """A client of another version, or in another language, sends unpacked ids."""
    ids = [5, 300, 0]
    assert read(prompt_token_ids=ids) == read(packed_prompt_token_ids=pack_token_ids(ids)) == ids


@READERS
@pytest.mark.parametrize(
    "packed", [b"", b"\1\0\0\0\0", pack_token_ids([1, INFO.vocab_size]), pack_token_ids([1] * 101)]
)
def test_bad_prompts_are_refused_by_name(read: Any, packed: bytes) -> None:
    """No ids, torn ids, unknown ids or too many of them are the client's error, name a field, and break nothing."""
    with pytest.raises(KvloomError) as caught:
        read(packed_prompt_token_ids=packed)
    assert caught.value.field
    assert caught.value.reason != ErrorReason.ERROR_REASON_INTERNAL
