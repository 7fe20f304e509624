"""Reads a router's decision file as a trace and a fleet, for `kvloom simulate --decisions FILE`.

Every request that produced a token becomes a call of an open loop with as many output tokens as were produced, also if
it was cancelled. The others did almost no work on a shard. They are not replayed, and count as failed in the recorded
row; those that were refused before they were placed are kept apart, for `kvloom whatif`.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvloom.errors import reason_name
from kvloom.v1.error_reason_pb2 import ErrorReason
from router.decisions.records import FORMAT_VERSION, FleetLine, FleetShard, RequestLine, read_decisions
from tools.failures import CommandError
from tools.simulate.calibration import Calibration, calibrate
from tools.simulate.fleet.recorded_fleet import RecordedFleet, UsualRequest, recorded_fleet, serving_shards
from tools.simulate.statistics import Slo, Statistics, summarise, without_warm_up
from tools.simulate.traces.open_loop import OpenTrace
from tools.simulate.traces.reading import MAX_CALLS, MAX_TOKENS, ReadFraction, line_error, read_lines
from tools.simulate.workload import Call, Outcome, SimulationResult

RECORDED: Final = "recorded"
"""Used in place of a policy name for the recorded run."""
MIN_LOAD_SHARE: Final = 0.8
"""If less than this share of the load is in the file, a note says that some is missing. Momentary counts scatter."""
MIN_IN_FLIGHT: Final = 30
"""The sum over the decisions that is needed to judge this."""
ERROR_REASONS: Final = {reason_name(reason).lower(): reason for reason in ErrorReason.values()}
MAX_UNEXPLAINED_HITS: Final = 0.02
"""The share of prompt tokens that were cached although no earlier prompt in the file has them."""


class RecordedRequest(msgspec.Struct, frozen=True, gc=False):
    """The fields of a line of the file that are needed."""

    arrived_at: float
    decided_at: float
    ended_at: float
    model: str
    block_size: int
    num_choices: int
    num_shard_sequences: int
    """Sequences on all shards when it was placed, as the router saw them."""
    shard_id: str
    num_cached_tokens: int
    ttft_seconds: float | None
    """None if it failed."""
    predictions: tuple[tuple[str, float, float | None], ...]
    error_reason: int
    """An ErrorReason; 0: none."""
    num_output_tokens: int
    """The tokens of all choices."""
    call: Call
    """Its id is set to the order of arrival after all lines are read."""

    def outcome(self, shard_index: int) -> Outcome:
        return Outcome(
            self.call,
            self.arrived_at,
            shard_index,
            self.num_cached_tokens,
            self.ttft_seconds or 0.0,
            self.ended_at,
            self.ttft_seconds is None,
            self.predictions,
            self.error_reason,
            self.num_output_tokens,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """Everything that a simulation takes from a decision file."""

    trace: OpenTrace
    fleet: RecordedFleet
    policy: str
    """The policy in force at the end of the file."""
    requests: Sequence[RecordedRequest]
    """The requests for the replayed model that were placed, by arrival."""
    refused: Sequence[RecordedRequest]
    """The requests that were refused before a placement, by arrival."""
    notes: Sequence[str]
    """Remarks for the reader of the figures."""

    def recorded(self, slo: Slo, max_requests: int | None = None) -> tuple[Statistics, dict[str, Calibration]]:
        """The figures of the recorded run, computed in the same way as for a simulation."""
        requests = self.requests[:max_requests]
        shard_ids = [*dict.fromkeys([*self.fleet.shard_ids, *(request.shard_id for request in requests)])]
        index_of = {shard_id: index for index, shard_id in enumerate(shard_ids)}
        outcomes = [request.outcome(index_of[request.shard_id]) for request in requests]
        result = SimulationResult(outcomes, (), 0.0, 0)
        summary = summarise(result, num_shards=len(shard_ids), num_measured_calls=len(outcomes), slo=slo)
        return summary, calibrate(without_warm_up(outcomes))


def predecessor_of(path: Path) -> Path | None:
    """The previous file of a rotation, if it still exists."""
    rotated = path.with_name(path.name + ".1")
    return rotated if rotated.is_file() else None


def read_decision_log(path: Path, on_fraction: ReadFraction | None = None) -> Replay:
    """Read a decision file, and before it FILE.1 if it exists. Raises CommandError."""
    notes: list[str] = []
    requests: list[RecordedRequest] = []
    refused: list[RecordedRequest] = []
    fleets: list[FleetLine] = []
    rotated = predecessor_of(path)
    if rotated is not None:
        notes.append(f"{rotated.name} was read before {path.name}")
    for file in filter(None, (rotated, path)):
        for line_number, line in _read_file(file, on_fraction):
            if isinstance(line, FleetLine):
                _check_fleet(file, line_number, line)
                fleets.append(line)
                continue
            if not fleets:
                raise line_error(
                    file,
                    line_number,
                    "type",
                    "there is a request before the first fleet: the beginning of the file is missing",
                )
            if len(requests) + len(refused) >= MAX_CALLS:
                raise line_error(file, line_number, "", f"more than {MAX_CALLS} requests")
            (requests if line.block_size else refused).append(_recorded_request(file, line_number, line))
    if not requests:
        raise CommandError(f"{path}: there are no requests in it")
    chosen = _of_one_model(requests, notes)
    chosen.sort(key=lambda request: request.arrived_at)
    refused = [request for request in refused if request.model == chosen[0].model]
    refused.sort(key=lambda request: request.arrived_at)
    chosen = [
        msgspec.structs.replace(request, call=dataclasses.replace(request.call, call_id=call_id))
        for call_id, request in enumerate(chosen)
    ]
    served = [request for request in chosen if request.ttft_seconds is not None]
    if not served:
        raise CommandError(f"{path}: no request in it got a token, so that there is nothing to replay")
    fleet = _fleet(path, fleets, served, notes)
    _note_missing_load(chosen, notes)
    _note_missing_prompts(served, notes)
    first = served[0].arrived_at
    trace = OpenTrace(
        [request.call for request in served],
        [request.arrived_at - first for request in served],
        0.0,
        served[0].block_size,
    )
    return Replay(trace, fleet, fleets[-1].policy, chosen, refused, notes)


def _read_file(path: Path, on_fraction: ReadFraction | None) -> Iterator[tuple[int, FleetLine | RequestLine]]:
    """(line number, line). Raises CommandError."""
    line_number = 0

    def numbered() -> Iterator[bytes]:
        nonlocal line_number
        for number, text in read_lines(path, on_fraction):
            line_number = number
            yield text

    try:
        for line in read_decisions(numbered()):
            yield line_number, line
    except ValueError as error:
        problem, _, place = str(error).partition(": ")[2].partition(" - at `$")
        raise line_error(path, line_number, place.strip("`."), problem) from error
    except RecursionError as error:
        raise line_error(path, line_number, "", "nested too deeply") from error


def _check_fleet(path: Path, line_number: int, line: FleetLine) -> None:
    if line.version > FORMAT_VERSION:
        raise line_error(path, line_number, "version", f"{line.version}, but this kvloom reads up to {FORMAT_VERSION}")
    for shard in line.shards:
        if min(shard.block_size, shard.num_blocks, shard.max_batch) < 1:
            raise line_error(path, line_number, f"shards {shard.shard_id}", "sizes must be at least 1")
        speeds = (shard.prefill_tokens_per_second, shard.decode_step_seconds, *shard.prefill_seconds.values())
        if not all(0 <= speed < math.inf for speed in speeds):
            raise line_error(path, line_number, f"shards {shard.shard_id}", "speeds must not be below 0")


def _recorded_request(path: Path, line_number: int, line: RequestLine) -> RecordedRequest:
    outcome = line.outcome
    times = (line.arrived_at, outcome.e2e_latency_seconds, outcome.queue_time_seconds, outcome.ttft_seconds or 0.0)
    if not all(math.isfinite(time) and time >= 0 for time in times):
        raise line_error(path, line_number, "outcome", "times must not be below 0")
    for field, count, lowest in (
        ("num_prompt_tokens", line.num_prompt_tokens, 1),
        ("num_choices", line.num_choices, 1),
        ("block_size", line.block_size, 1 if line.attempts or line.block_hashes else 0),
        ("outcome.num_output_tokens", outcome.num_output_tokens, 0),
        ("outcome.num_cached_tokens", outcome.num_cached_tokens, 0),
    ):
        if not lowest <= count <= MAX_TOKENS:
            raise line_error(path, line_number, field, f"{count} is not between {lowest} and {MAX_TOKENS}")
    try:
        hashes = tuple(line.hashes())
    except ValueError as error:
        raise line_error(path, line_number, "block_hashes", str(error)) from error
    if hashes and len(hashes) > line.num_prompt_tokens // line.block_size:
        problem = f"{len(hashes)} blocks of {line.block_size} tokens for a prompt of {line.num_prompt_tokens} tokens"
        raise line_error(path, line_number, "block_hashes", problem)
    scores = line.attempts[0].shards if line.attempts else ()
    is_served = outcome.ttft_seconds is not None and outcome.num_output_tokens > 0
    return RecordedRequest(
        arrived_at=line.arrived_at,
        decided_at=line.arrived_at + outcome.queue_time_seconds,
        ended_at=line.arrived_at + outcome.e2e_latency_seconds,
        model=line.model,
        block_size=line.block_size,
        num_choices=line.num_choices,
        num_shard_sequences=sum(score.num_running + score.num_waiting for score in scores),
        shard_id=outcome.shard_id,
        num_cached_tokens=min(outcome.num_cached_tokens, line.num_prompt_tokens),
        ttft_seconds=outcome.ttft_seconds if is_served else None,
        predictions=tuple(
            (judged.term, judged.predicted_seconds, judged.actual_seconds)
            for judged in outcome.predictions
            if judged.predicted_seconds is not None
        ),
        error_reason=ERROR_REASONS.get(outcome.error, 0),
        num_output_tokens=outcome.num_output_tokens,
        call=Call(
            call_id=0,
            num_prompt_tokens=line.num_prompt_tokens,
            num_output_tokens=max(1, math.ceil(outcome.num_output_tokens / line.num_choices)),
            block_hashes=hashes,
            session_key=line.session,
            model=line.model,
            tenant=line.tenant,
            is_batch=line.is_batch,
            key_id=line.key,
            max_tokens=line.max_tokens,
        ),
    )


def _of_one_model(requests: Sequence[RecordedRequest], notes: list[str]) -> list[RecordedRequest]:
    """The requests for the most requested model and block size."""
    counts = Counter((request.model, request.block_size) for request in requests)
    (model, block_size), count = counts.most_common(1)[0]
    if count < len(requests):
        others = len(requests) - count
        notes.append(
            f"{others} requests are for another model than {model} (or other blocks than of {block_size} "
            "tokens) and are left out"
        )
    return [request for request in requests if (request.model, request.block_size) == (model, block_size)]


def _fleet(
    path: Path, fleets: Sequence[FleetLine], served: Sequence[RecordedRequest], notes: list[str]
) -> RecordedFleet:
    """The last one that had shards for the model, with the latest speeds that were known."""
    states = [serving_shards(line, served[0].model, served[0].block_size) for line in fleets]
    states = [shards for shards in states if shards]
    if not states:
        raise CommandError(f"{path}: no shard with the model {served[0].model} in it")
    last = states[-1]
    counts = {len(shards) for shards in states}
    if len(counts) > 1:
        notes.append(f"the fleet had {min(counts)} to {max(counts)} shards; replayed with the {len(last)} at the end")
    if len({(shard.num_blocks, shard.max_batch) for shard in last}) > 1:
        notes.append("the shards differ in KV blocks or batch; replayed with the mean")
    if len(policies := list(dict.fromkeys(line.policy for line in fleets))) > 1:
        notes.append(f"the policy changed ({', '.join(policies)}): what is recorded is of all of them")
    return recorded_fleet([_with_known_speed(shard, states) for shard in last], _usual_request(served))


def _with_known_speed(shard: FleetShard, states: Sequence[Sequence[FleetShard]]) -> FleetShard:
    """A shard that has just started has not measured its steps yet; before, it had."""
    for earlier in (one for shards in reversed(states) for one in shards if one.shard_id == shard.shard_id):
        if earlier.decode_step_seconds > 0:
            return msgspec.structs.replace(
                shard,
                prefill_tokens_per_second=shard.prefill_tokens_per_second or earlier.prefill_tokens_per_second,
                decode_step_seconds=earlier.decode_step_seconds,
            )
    return shard


def _usual_request(served: Sequence[RecordedRequest]) -> UsualRequest:
    cached = statistics.fmean(request.num_cached_tokens for request in served)
    prompt = statistics.fmean(request.call.num_prompt_tokens for request in served)
    tpots = [
        (request.ended_at - request.arrived_at - (request.ttft_seconds or 0.0)) / (request.call.num_output_tokens - 1)
        for request in served
        if request.call.num_output_tokens > 1
    ]
    return UsualRequest(max(1.0, prompt - cached), cached, statistics.median(tpots) if tpots else None)


def _note_missing_load(requests: Sequence[RecordedRequest], notes: list[str]) -> None:
    """The file does not say which share of the requests is in it. The shards' counts do, whatever the reason: a
    sample, other routers in front of the same shards, lines that were dropped."""
    starts = sorted(request.decided_at for request in requests for _ in range(request.num_choices))
    ends = sorted(request.ended_at for request in requests for _ in range(request.num_choices))
    num_seen = sum(
        max(0, bisect.bisect_left(starts, request.decided_at) - bisect.bisect_right(ends, request.decided_at))
        for request in requests
    )
    num_told = sum(request.num_shard_sequences for request in requests)
    if num_told >= MIN_IN_FLIGHT and num_seen < MIN_LOAD_SHARE * num_told:
        share = max(num_seen, 1) / num_told
        notes.append(
            f"the file has only about {share:.0%} of the load that the shards had (sample_share, other routers, "
            f"dropped lines): the replay finds them too idle. --rate {1 / share:.2g} makes up for the load, not for "
            "the prompts that are missing in the caches"
        )


def _note_missing_prompts(served: Sequence[RecordedRequest], notes: list[str]) -> None:
    """Hits that no earlier request of the file explains: from before it began, or left out of it."""
    seen: set[int] = set()
    num_explained = 0
    for request in served:
        hashes = request.call.block_hashes
        num_known = next((index for index, one in enumerate(hashes) if one not in seen), len(hashes))
        num_explained += min(num_known * request.block_size, request.num_cached_tokens)
        seen.update(hashes)
    num_prompt_tokens = sum(request.call.num_prompt_tokens for request in served)
    unexplained = (sum(request.num_cached_tokens for request in served) - num_explained) / num_prompt_tokens
    if unexplained > MAX_UNEXPLAINED_HITS:
        notes.append(
            f"{unexplained:.0%} of the prompt tokens were cached by requests that are not in the file (sample_share, "
            "other routers, before it began): the replay has fewer hits than there were"
        )
