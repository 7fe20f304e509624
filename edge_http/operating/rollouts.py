"""Serves operators who take models and shards in and out of service: rollouts, and POST /admin/v1/shards/drain."""

from __future__ import annotations

from typing import Final

import msgspec
from aiohttp import web

from edge_http.edge import Edge
from edge_http.formatting.decoding import decode_body
from edge_http.operating.objects import DrainBody, RollbackBody
from edge_http.supervisor import CALL_SECONDS, supervisor
from edge_http.wire.body import read_json_body
from edge_http.wire.json_response import json_response
from kvloom.errors import invalid_argument
from kvloom.v1.supervisor_service_pb2 import DrainShardRequest, GetStateRequest, RollBackModelRequest
from kvloom_common.transport.plain_messages import as_plain

_DECODER: Final = msgspec.json.Decoder(RollbackBody)


async def list_rollouts(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:  # noqa: ARG001
    """Serve GET /admin/v1/rollouts: those that the supervisor of this machine drives and that have not ended."""
    async with supervisor(edge) as stub:
        state = await stub.GetState(GetStateRequest(), timeout=CALL_SECONDS)
    return json_response({"data": list(map(as_plain, state.rollouts))})


async def roll_back(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /admin/v1/rollouts/rollback."""
    caller = edge.callers.caller_of(request)
    with edge.admission.admit(caller), edge.admission.bodies.lease(caller) as lease:
        body = decode_body(_DECODER, await read_json_body(request, edge.config, lease))
    async with supervisor(edge) as stub:
        await stub.RollBackModel(RollBackModelRequest(name=body.name), timeout=CALL_SECONDS)
    return json_response({"done": True})


_DRAIN_DECODER: Final = msgspec.json.Decoder(DrainBody)


async def drain_shard(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """The supervisor of this machine asks the shard, which may be on any machine of its fleet."""
    caller = edge.callers.caller_of(request)
    with edge.admission.admit(caller), edge.admission.bodies.lease(caller) as lease:
        body = decode_body(_DRAIN_DECODER, await read_json_body(request, edge.config, lease))
    if body.deadline_seconds is not None and body.deadline_seconds < 0:
        raise invalid_argument("deadline_seconds must not be below 0.", "deadline_seconds")
    wanted = DrainShardRequest(shard=body.shard_id, draining=body.draining, deadline_seconds=body.deadline_seconds)
    async with supervisor(edge) as stub:
        answer = await stub.DrainShard(wanted, timeout=CALL_SECONDS)
    return json_response({"num_running": answer.num_running, "num_waiting": answer.num_waiting})
