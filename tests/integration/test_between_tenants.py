"""Attacks of one tenant on another one by everything that a request can ask for: no kind of request finds another
tenant's cached blocks, no adapter is used by those who may not, and nothing is billed to, or by, somebody else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import pytest

from kvloom.v1 import router_service_pb2 as pb
from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH, Pooling, SamplingParams, SequenceFinish, StopConditions
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom_common.config import AdapterConfig, ControlConfig
from kvloom_common.tenancy.table import Tenant
from kvloom_common.trust.shared_secret import SharedSecret
from router.server import RouterServer
from shard_server.engines.sim_engine import SimEngine
from tests.fakes.fake_control import OTHER_KEY, SEARCH_KEY, SEARCH_KEY_2, FakeControl, key_of, two_organisations
from tests.fakes.link_requests import make_submit
from tests.fakes.router_world import TIMEOUT_SECONDS, RouterWorld
from tests.fakes.shard_world import EOS, VOCABULARY, sim_config
from tests.fakes.trusted_router import MODEL, SECRET, served_router
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

PROMPT: Final = list(range(1, 65))
POETRY_KEY, BASE_KEY = "kvl-poetry", "kvl-base"
CONVERSATION: Final = pb.Conversation(messages=[pb.Message(role="user", content="the quick brown fox " * 30)])
KINDS: Final[dict[str, dict[str, Any]]] = {
    "an answer": {},
    "several answers": {"n": 3},
    "log-probabilities": {"sampling": SamplingParams(logprobs=3)},
    "a prompt's log-probabilities": {"sampling": SamplingParams(prompt_logprobs=2)},
    "the end of them": {"sampling": SamplingParams(prompt_logprobs=2, prompt_logprobs_start=48)},
    "an embedding": {"pooling": Pooling()},
    "an adapter's answer": {"model": f"{MODEL}:poetry"},
    "a batch": {"tier": pb.TIER_BATCH},
    "a session": {"session_key": "the same", "fairness_id": "the same"},
    "a resumable answer": {"resumable": True},
    "tools": {
        "conversation": CONVERSATION,
        "tools": [pb.Tool(name="f", parameters='{"type": "object"}')],
    },
}
COMPUTED_AGAIN: Final = {"a prompt's log-probabilities", "an embedding"}
"""They need every token's hidden state."""


class Rig(NamedTuple):
    stub: RouterServiceStub
    server: RouterServer
    control: FakeControl


@pytest.fixture
async def rig(world: RouterWorld, tmp_path: Path) -> AsyncIterator[Rig]:
    """A router with tenants, and a shard whose model has the adapters law and poetry."""
    control = FakeControl(trust=SharedSecret(SECRET, ("control",), "control"))
    control.put(
        *two_organisations(),
        key_of(POETRY_KEY, "other/app", models=(f"{MODEL}:poetry",)),
        key_of(BASE_KEY, "other/app", models=(MODEL,)),
    )
    port = await control.start()
    world.config.data_dir = str(tmp_path)
    world.config.control = ControlConfig(enabled=True, host="127.0.0.1", port=port)
    config = sim_config()
    config.model.name, config.model.max_loaded_adapters = MODEL, 4
    config.model.adapters = [AdapterConfig("law", "law"), AdapterConfig("poetry", "poetry")]
    engine = SimEngine(MODEL, config.shard, VOCABULARY, frozenset({EOS}), max_loaded_adapters=4)
    async with (
        served_router(world, config=config, engine=engine) as (server, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        identities = server.callers.identities
        assert identities is not None
        await eventually(lambda: identities.tenants.connected, "the table")
        yield Rig(RouterServiceStub(channel), server, control)
    await control.stop()


def wanted(**fields: Any) -> pb.GenerateRequest:
    given = {} if "conversation" in fields else {"token_ids": pb.TokenIds(ids=PROMPT)}
    return pb.GenerateRequest(
        **{"model": MODEL, "stop": StopConditions(max_tokens=4, ignore_eos=True), **given, **fields}
    )


async def num_cached(rig: Rig, key: str, **fields: Any) -> int:
    found = 0
    call = rig.stub.Generate(wanted(**fields), metadata=bearer(key), timeout=TIMEOUT_SECONDS)
    async for response in call:
        for delta in response.deltas:
            found = max(found, delta.start.num_cached_tokens, delta.finish.num_cached_tokens)
    return found


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def test_no_kind_of_request_finds_anothers_blocks(rig: Rig) -> None:
    """A cached block tells that its prompt was sent. Each kind takes a way of its own to the cache. Each attack is
    by a tenant that has sent nothing yet: by the same kind of request, and when the victims have sent all kinds."""
    names = [f"{role}{number}" for role in ("victim", "same", "later") for number in range(len(KINDS))]
    rig.control.put(*(Tenant(f"other/{name}") for name in names))
    rig.control.put(*(key_of(f"kvl-{name}", f"other/{name}") for name in names))
    await known(rig)
    for number, (kind, fields) in enumerate(KINDS.items()):
        assert await num_cached(rig, f"kvl-victim{number}", **fields) == 0
        assert await num_cached(rig, f"kvl-same{number}", **fields) == 0, kind
        own = await num_cached(rig, f"kvl-victim{number}", **fields)
        assert own > 0 or kind in COMPUTED_AGAIN  # otherwise the test could not see it
    for number, (kind, fields) in enumerate(KINDS.items()):
        assert await num_cached(rig, f"kvl-later{number}", **fields) == 0, kind


async def known(rig: Rig) -> None:
    identities = rig.server.callers.identities
    assert identities is not None
    await eventually(lambda: identities.tenants.table.version == rig.control.version, "the change")


@pytest.mark.parametrize("name", [f"{MODEL}:law", "law", MODEL])
async def test_an_adapter_of_others_is_refused_by_every_name(rig: Rig, name: str) -> None:
    """Who may use one adapter of a model may use neither the model nor another adapter, and sees neither."""
    for call in (
        rig.stub.Generate(wanted(model=name), metadata=bearer(POETRY_KEY)),
        rig.stub.Generate(wanted(model=f"{MODEL}:poetry", models=[name]), metadata=bearer(POETRY_KEY)),
        rig.stub.Plan(pb.PlanRequest(request=wanted(model=name)), metadata=bearer(POETRY_KEY)),
    ):
        assert await code_of(call) == grpc.StatusCode.PERMISSION_DENIED
    listed = await rig.stub.ListModels(pb.ListModelsRequest(), metadata=bearer(POETRY_KEY), timeout=TIMEOUT_SECONDS)
    assert "law" not in str(listed)


async def test_a_model_does_not_include_its_adapters(rig: Rig) -> None:
    """They may have been trained on texts of another tenant."""
    for name in (f"{MODEL}:law", "law"):
        call = rig.stub.Generate(wanted(model=name), metadata=bearer(BASE_KEY))
        assert await code_of(call) == grpc.StatusCode.PERMISSION_DENIED


async def test_a_checksum_does_not_lead_to_another_adapter(rig: Rig) -> None:
    """A request that continues an answer says which weights it began with: not whichever it likes."""
    law = await checksum(rig, SEARCH_KEY, f"{MODEL}:law")
    assert law != await checksum(rig, POETRY_KEY, f"{MODEL}:poetry")
    call = rig.stub.Generate(
        wanted(model=f"{MODEL}:poetry", adapter_checksum=law), metadata=bearer(POETRY_KEY), timeout=TIMEOUT_SECONDS
    )
    assert await code_of(call) == grpc.StatusCode.NOT_FOUND


async def checksum(rig: Rig, key: str, model: str) -> str:
    call = rig.stub.Generate(wanted(model=model), metadata=bearer(key), timeout=TIMEOUT_SECONDS)
    return next(iter({response.adapter_checksum async for response in call if response.adapter_checksum}))


async def code_of(call: Any) -> grpc.StatusCode:
    """How the call ends."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        if hasattr(call, "read"):
            async for _ in call:
                pass
    async with asyncio.timeout(TIMEOUT_SECONDS):
        return await call.code()


async def opened(rig: Rig, key: str, link_id: str, *lost: pb.LostRequest) -> Any:
    """A stream of many requests, with its first frame read."""
    stream = rig.stub.Connect(metadata=bearer(key), timeout=TIMEOUT_SECONDS)
    hello = pb.ClientHello(client_id="client", link_id=link_id, lost=lost)
    await stream.write(pb.RouterServiceConnectRequest(hello=hello))
    assert await stream.read() is not grpc.aio.EOF
    return stream


async def ended(stream: Any) -> SequenceFinish:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while True:
            frame = await stream.read()
            assert frame is not grpc.aio.EOF, await stream.details()
            if frame.step.finishes:
                return frame.step.finishes[0]


async def test_a_link_of_anothers_name_ends_nothing(rig: Rig) -> None:
    """A client names its link, and a new stream of the link ends the earlier one: only the same caller's. Nor does what
    one caller says of another one's lost requests end them."""
    stream = await opened(rig, SEARCH_KEY, "the link")
    submit = make_submit(
        request_id="r", model=MODEL, prompt_token_ids=PROMPT, choices=[{"slot": 1, "index": 0}],
        stop=StopConditions(max_tokens=400, ignore_eos=True),
    )  # fmt: skip
    await stream.write(pb.RouterServiceConnectRequest(submits=[submit]))
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not (await stream.read()).step.starts:
            pass
    for request_id in ("r", "r@acme/search"):
        lost = pb.LostRequest(request_id=request_id, link_id="the link")
        (await opened(rig, OTHER_KEY, "the link", lost)).cancel()
        cancel = pb.CancelRequest(request_id=request_id, link_id="the link")
        await rig.stub.Cancel(cancel, metadata=bearer(OTHER_KEY), timeout=TIMEOUT_SECONDS)
    finish = await ended(stream)
    assert (finish.reason, finish.num_output_tokens) == (FINISH_REASON_LENGTH, 400)
    again = await opened(rig, SEARCH_KEY_2, "the link")
    assert await stream.read() is grpc.aio.EOF  # the same caller's
    again.cancel()
