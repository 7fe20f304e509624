"""Compares the streams of a disturbed run with those of an undisturbed one, and asks the router about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import grpc.aio

from kvloom.v1.router_service_pb2 import ExplainRequest, ExplainResponse
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom_common.trust.fabric_trust import FabricTrust
from tools.bench.streams import MeasuredStream
from tools.failures import CommandError

CALL_TIMEOUT_SECONDS: Final = 10.0


async def explain(
    trust: FabricTrust, router_address: str, streams: Sequence[MeasuredStream]
) -> dict[str, ExplainResponse]:
    """Returns what the router says of each stream, by its name. Raises CommandError."""
    async with trust.open_channel(router_address, "router") as channel:
        stub = RouterServiceStub(channel)
        answers: dict[str, ExplainResponse] = {}
        for stream in streams:
            request = ExplainRequest(client_request_id=stream.name)
            try:
                answers[stream.name] = await stub.Explain(request, timeout=CALL_TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise CommandError(f"{stream.name} cannot be explained: {error.details()}") from error
        return answers


def num_tokens_computed_again(stream: MeasuredStream, explained: ExplainResponse) -> int:
    """Tokens of prompt and answer that the stream's later shards had to compute, because they were not cached there."""
    return sum(
        explained.outcome.num_prompt_tokens
        + sum(at <= decision.decided_at_seconds for at in stream.pieces_at)
        - next(s.num_overlap_tokens for s in decision.plan.shards if s.shard_id == decision.plan.picked_shard_id)
        for decision in explained.decisions[1:]
    )


def num_differing_bytes(one: str, other: str) -> int:
    """Position by position, and what only one of them has."""
    a, b = one.encode(), other.encode()
    return sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
