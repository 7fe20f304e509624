"""What waits for a stream is sent in frames below the limit of a message, however large images make it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from kvloom.router_link import link
from kvloom.router_link.link import GrpcRouterLink
from kvloom.transport.channel_options import MAX_MESSAGE_BYTES
from kvloom.v1.generation_pb2 import Choice, PromptImage
from kvloom_common.discovery.records import ShardRecord
from kvloom_common.text.prompt_images import FIRST_IMAGE_ID, MAX_IMAGE_BYTES
from router.core.actions import CancelOnShard, SubmitAttempt
from router.core.events import ChoiceSpec
from router.links import shard_link
from router.links.shard_link import ShardLink
from router.request_validator import RequestValidator
from tests.fakes.link_requests import link_request, make_submit

NUM_REQUESTS = 2 * MAX_MESSAGE_BYTES // MAX_IMAGE_BYTES
SCALE = 1000
"""All sizes are so many times smaller here."""
PROMPT = [FIRST_IMAGE_ID, FIRST_IMAGE_ID + 1, 5]
IMAGES = [PromptImage(position=0, num_tokens=2, data=bytes(MAX_IMAGE_BYTES // SCALE))]


@pytest.fixture(autouse=True)
def scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (link, shard_link):
        monkeypatch.setattr(module, "MAX_FRAME_BYTES", module.MAX_FRAME_BYTES // SCALE)


def sent(take: Callable[[], Any]) -> tuple[list[int], int]:
    """How many submits each frame has, and how many frames came before the cancel."""
    sizes, num_before = list[int](), -1
    while (frame := take()) is not None:
        assert frame.ByteSize() * SCALE < MAX_MESSAGE_BYTES
        if frame.cancel_slots:
            num_before = len(sizes)
        sizes.append(len(frame.submits))
    return sizes, num_before


async def test_an_edge_sends_images_to_a_router() -> None:
    """A frame that is too large would end the stream, and all answers of the edge with it."""
    router = GrpcRouterLink("127.0.0.1:1", "edge")
    router._connected = True
    requests = [link_request(f"r{n}", prompt_token_ids=PROMPT, images=IMAGES) for n in range(NUM_REQUESTS)]
    first, *_ = [router.submit(request, cast(Any, None)) for request in requests]
    router.cancel(first)
    sizes, num_before = sent(router._take_frame)
    assert sum(sizes) == NUM_REQUESTS
    assert num_before == len(sizes) - 1, "no cancel overtakes the submit that it is for"
    assert sent(router._take_frame) == ([], -1)


async def test_a_router_sends_images_to_a_shard() -> None:
    """The stream is that of all clients whose answers the shard computes."""
    submit = make_submit(model="m", prompt_token_ids=PROMPT, choices=[Choice(slot=1)], images=IMAGES)
    request = RequestValidator({}, 1000, lambda: False).request_from_submit(submit, "client")
    shard = ShardLink(ShardRecord("s0", "127.0.0.1:1", "m", "i"), "router", cast(Any, None))
    for number in range(NUM_REQUESTS):
        shard.submit(SubmitAttempt("s0", number + 1, request, [ChoiceSpec(number, 0)], 4, 0))
    shard.cancel(CancelOnShard("s0", [0]))
    sizes, num_before = sent(shard._take_frame)
    assert sum(sizes) == NUM_REQUESTS
    assert num_before == len(sizes) - 1
