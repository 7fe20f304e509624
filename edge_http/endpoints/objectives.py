"""The deadline and the objectives of a request (docs/how-to/deadlines.md): what its headers say, and how much time it
has."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec
from aiohttp import web

from edge_http.edge import Edge
from edge_http.wire.headers import DEADLINE, SLO_TPOT, SLO_TPOT_LLM_D, SLO_TTFT, SLO_TTFT_LLM_D
from edge_http.wire.request_headers import RequestHeaders
from edge_http.wire.request_record import seconds_since_arrival
from kvloom.errors import invalid_argument
from kvloom.objectives import MAX_MILLISECONDS, check_milliseconds
from kvloom.v1.router_service_pb2 import GenerateRequest, Objectives
from kvloom_common.models.served_model import ServedModel

MAX_CHARS: Final = 32
"""No number of milliseconds needs more."""
MIN_TIMEOUT_SECONDS: Final = 0.001
"""0 would mean that there is no limit."""


class TimedJob(msgspec.Struct, kw_only=True):
    """The fields of every job that is submitted to the router."""

    asked: RequestHeaders
    """The wishes that its headers have."""
    wanted: GenerateRequest
    """The message that says what its client wants. The request of each prompt has a copy."""
    model: ServedModel
    has_fallback_model: bool = False
    """True when another model may take it."""
    deadline: float | None = None
    """When it must have ended, on the event loop's clock; None: after fabric.request_timeout_seconds."""


def set_objectives(edge: Edge, request: web.BaseRequest, job: TimedJob) -> None:
    """Give the job what the headers say, if it does not have it yet. Raises KvloomError (INVALID_ARGUMENT)."""
    if not job.asked.has_objectives or job.wanted.HasField("objectives"):
        return
    objectives = objectives_of(request.headers, seconds_since_arrival())
    job.deadline = _earlier_deadline(edge, job.deadline, objectives)
    job.wanted.objectives.CopyFrom(objectives)


def seconds_left(edge: Edge, job: TimedJob) -> float:
    """The time until the job's deadline. Without one, it has all of a request's time."""
    if job.deadline is None:
        return edge.request_timeout_seconds
    return max(job.deadline - asyncio.get_running_loop().time(), MIN_TIMEOUT_SECONDS)


def _earlier_deadline(edge: Edge, deadline: float | None, objectives: Objectives) -> float | None:
    """The job's deadline, or that of its objectives if it is earlier."""
    if not objectives.HasField("deadline_ms"):
        return deadline
    now = asyncio.get_running_loop().time()
    latest = now + edge.request_timeout_seconds if deadline is None else deadline
    return min(latest, now + (objectives.deadline_ms - objectives.elapsed_ms) / 1e3)


def objectives_of(headers: Mapping[str, str], elapsed_seconds: float) -> Objectives:
    """`elapsed_seconds`: how long ago the request arrived. Raises KvloomError (INVALID_ARGUMENT) that names the
    header."""
    return Objectives(
        deadline_ms=_milliseconds(headers, DEADLINE),
        ttft_ms=_agreed(headers, SLO_TTFT, SLO_TTFT_LLM_D),
        tpot_ms=_agreed(headers, SLO_TPOT, SLO_TPOT_LLM_D),
        elapsed_ms=min(max(elapsed_seconds, 0.0) * 1e3, MAX_MILLISECONDS),
    )


def _agreed(headers: Mapping[str, str], name: str, alias: str) -> float | None:
    value, other = _milliseconds(headers, name), _milliseconds(headers, alias)
    if value is not None and other is not None and value != other:
        raise invalid_argument(f"{alias} contradicts {name}: give one of them.", alias)
    return other if value is None else value


def _milliseconds(headers: Mapping[str, str], name: str) -> float | None:
    given = headers.get(name)
    if given is None:
        return None
    try:
        # float() would also take "1_000" and "٣".
        value = float(given) if given.isascii() and "_" not in given and len(given) <= MAX_CHARS else float("nan")
    except ValueError:
        value = float("nan")
    check_milliseconds(value, name)
    return value
