"""The state that another edge needs to continue a response, and continuing the response of another edge."""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Iterator, Sequence, Set
from typing import Final

import msgspec

from edge_http.admission import AdmissionPermit
from edge_http.answers.recorded_answer import RecordedAnswer
from edge_http.answers.shape import ResponseShape, formatter_of, parsed_outputs, prompt_field_of
from edge_http.edge import Edge
from edge_http.formatting.response_formatter import Envelope, ResponseFormatter
from edge_http.openai.prompt import PromptInput
from edge_http.openai.prompt_report import PromptReport
from edge_http.resume.publication import Publication
from edge_http.resume.records import (
    AnswerState,
    AssignmentRecord,
    RequestsRecord,
    ResponseRecord,
    event_data,
)
from edge_http.resume.response_name import ResponseName
from edge_http.resume.resumable_stream import ResumableStream
from edge_http.submission import OnSubmitted, Submission, run_resumable
from edge_http.wire.headers import explanation
from kvloom.objectives import delay_objectives
from kvloom.router_link.group import give_seed
from kvloom.router_link.link import ChoiceProgress, LinkRequest
from kvloom.text.token_ids import pack_token_ids, unpack_token_ids
from kvloom.v1.router_service_pb2 import Submit
from kvloom_common.models.served_model import ServedModel
from kvloom_common.text.detokenizer import IncrementalDetokenizer
from kvloom_common.text.tokenizer import ModelTokenizer

LEAST_SECONDS: Final = 0.001
"""The shortest time limit: 0 would mean none."""


def register_for_recovery(
    edge: Edge,
    stream: ResumableStream,
    response: ResponseRecord,
    answer: RecordedAnswer,
    formatter: ResponseFormatter,
    submission: Submission,
) -> OnSubmitted:
    """Let the journal have the response. Its requests get seeds, because an edge that continues the response has to
    draw the same random numbers."""
    records: list[bytes] = []
    for request in submission.requests:
        assert request is not None
        give_seed(request)
        records.append(_recorded(request))
    requests = RequestsRecord(time.time() + submission.timeout_seconds, records)
    return _publish(edge, Publication(stream, response, requests, answer, formatter.prefixes))


def _publish(edge: Edge, publication: Publication) -> OnSubmitted:
    def on_submitted(prompt: int, handle: int) -> None:
        if edge.losses is not None:
            publication.attempts[prompt] = edge.losses.assignments(handle)

    edge.resume.publish(publication)
    return on_submitted


def take_over(
    edge: Edge,
    permit: AdmissionPermit,
    response: ResponseRecord,
    requests: RequestsRecord,
    state: AnswerState,
    link_ids: Set[str] = frozenset(),
) -> ResumableStream:
    """Continue another edge's response from `state`, which covers everything that its client can have. The stream has
    no reader yet. `link_ids` are those of the other edge's links. Raises KvloomError (MODEL_NOT_FOUND)."""
    model = edge.models.find(response.model)
    shape = recorded_shape(response)
    formatter = recorded_formatter(response, model, requests)
    num_before = state.num_events - len(state.events)
    name = ResponseName(response.id, response.caller, response.tenant, response.idempotency_key, response.body_digest)
    stream = edge.resume.open(name, num_before)
    for event in event_data(state.events, formatter.prefixes, formatter.suffix):
        stream.log.append(event)
    answer = RecordedAnswer(
        response.prompt_sizes,
        response.n,
        formatter,
        stream,
        response.headers,
        parsed=parsed_outputs(shape, len(response.prompt_sizes) * response.n),
        with_details=response.with_details,
        with_explanation=response.with_explanation,
    )
    answer.features = edge.features
    answer.restore(
        _progress(state, range(len(state.token_ids)), 0),
        state.starts,
        state.finishes,
        state.num_events,
        functools.partial(_delivered_text, model.tokenizer, requests, response.n),
    )
    submits = requests.submits()
    attempts = _settle(edge, response, submits, state, link_ids)
    timeout_seconds = max(requests.deadline_unix_seconds - time.time(), LEAST_SECONDS)
    submission = Submission(
        operation=response.operation,
        model=response.model,
        num_prompt_tokens=sum(response.prompt_sizes),
        n=response.n,
        requests=_remaining(response, submits, state, timeout_seconds),
        guide_field=response.guide_field,
        timeout_seconds=timeout_seconds,
        prompt_field=prompt_field_of(shape),
    )
    publication = Publication(stream, response, requests, answer, formatter.prefixes)
    publication.is_taken_over = True
    publication.earlier_attempts = attempts
    on_submitted = _publish(edge, publication)
    if state.num_events or state.starts:
        more = explanation(answer.first_start) if response.with_explanation else {}
        stream.begin({**response.headers, **more})
    permit.handed_over = True
    job = run_resumable(edge, submission, answer, stream, on_submitted)
    edge.resume.start(stream, job, answer.fail, permit.release)
    stream.await_reader()
    return stream


def recorded_shape(response: ResponseRecord) -> ResponseShape:
    if response.shape:
        return msgspec.msgpack.decode(response.shape, type=ResponseShape)
    return ResponseShape("chat" if response.operation == "chat" else "completion")


def recorded_formatter(
    response: ResponseRecord, model: ServedModel, requests: RequestsRecord | None = None
) -> ResponseFormatter:
    """The formatter that the response's edge used. Without `requests` it is only for answers that have begun."""
    envelope = Envelope(
        id=response.id,
        model=response.model,
        system_fingerprint=response.system_fingerprint,
        num_choices=len(response.prompt_sizes) * response.n,
        include_usage=response.include_usage,
        num_prompt_tokens=sum(response.prompt_sizes),
        created=response.created,
    )
    report = None
    if response.echoes and requests is not None:
        prompts = [PromptInput(_prompt_of(submit), submit.prompt_text, "prompt") for submit in requests.submits()]
        report = PromptReport(prompts, response.n, response.echoes, response.echo_logprobs)
    return formatter_of(recorded_shape(response), envelope, model.tokenizer, report)


def _delivered_text(
    tokenizer: ModelTokenizer, requests: RequestsRecord, n: int, choice: ChoiceProgress
) -> Iterator[str]:
    """The text of a choice, token by token, as far as it was delivered."""
    sampling = Submit.FromString(requests.requests[choice.index // n]).request.sampling
    detokenizer = IncrementalDetokenizer(tokenizer, shown_special_token_ids=sampling.shown_special_token_ids)
    num_left = choice.num_chars
    for token_id in choice.token_ids:
        piece = detokenizer.push((token_id,))[:num_left]
        num_left -= len(piece)
        yield piece


def _settle(
    edge: Edge, response: ResponseRecord, submits: Sequence[Submit], state: AnswerState, link_ids: Set[str]
) -> list[list[AssignmentRecord]]:
    """Report to the routers how many tokens of the other edges' attempts were delivered: none of an attempt that began
    too late for the journal to know it. Returns these attempts, which are all over now."""
    settled: list[list[AssignmentRecord]] = []
    for number, (submit, attempts) in enumerate(zip(submits, state.attempts, strict=True)):
        of_prompt = state.token_ids[number * response.n : (number + 1) * response.n]
        num_delivered = sum(map(len, of_prompt))
        over = [
            AssignmentRecord(
                one.link_id,
                one.first_token,
                max(0, num_delivered - one.first_token) if one.num_tokens is None else one.num_tokens,
            )
            for one in attempts
        ]
        settled.append(over)
        if edge.losses is not None:
            for link_id in sorted(link_ids - {one.link_id for one in over}):
                edge.losses.note_delegated_loss(link_id, submit.request.request_id, 0)
            for one in over:
                edge.losses.note_delegated_loss(one.link_id, submit.request.request_id, one.num_tokens or 0)
    return settled


def _remaining(
    response: ResponseRecord, submits: Sequence[Submit], state: AnswerState, timeout_seconds: float
) -> list[LinkRequest | None]:
    """The requests of the choices that have not ended; None for a prompt without any."""
    remaining: list[LinkRequest | None] = []
    for number, submit in enumerate(submits):
        first = number * response.n
        indexes = [index for index in range(first, first + response.n) if index not in state.finishes]
        partial_choices = _progress(state, indexes, first)
        if not partial_choices:
            remaining.append(None)
            continue
        ended = [index for index in range(first, first + response.n) if index in state.finishes]
        submit.num_ended_tokens = sum(len(state.token_ids[index]) for index in ended)
        submit.num_ended_reasoning_tokens = sum(state.finishes[index].num_reasoning_tokens for index in ended)
        remaining.append(_continued(submit, partial_choices, timeout_seconds))
    return remaining


def _progress(state: AnswerState, indexes: Sequence[int], first: int) -> list[ChoiceProgress]:
    """The progress of these choices, numbered from `first` on."""
    choices: list[ChoiceProgress] = []
    for index in indexes:
        choice = ChoiceProgress(index - first)
        choice.token_ids = state.token_ids[index][:]
        choice.num_chars = state.num_chars[index]
        choice.is_done = index in state.finishes
        if index in state.starts:
            choice.num_cached_tokens = state.starts[index].num_cached_tokens
        choices.append(choice)
    return choices


def _recorded(request: LinkRequest) -> bytes:
    """The request as the journal has it: the whole message, with the prompt."""
    submit = Submit()
    submit.CopyFrom(request.submit)
    submit.packed_prompt_token_ids = pack_token_ids(request.prompt_token_ids)
    return submit.SerializeToString()


def _prompt_of(submit: Submit) -> array[int]:
    return unpack_token_ids(submit.packed_prompt_token_ids)


def _continued(submit: Submit, partial_choices: list[ChoiceProgress], timeout_seconds: float) -> LinkRequest:
    """The recorded request for these choices. It has been on its way for as long as its time limit is shorter now."""
    wanted = submit.request
    if wanted.HasField("objectives"):
        delay_objectives(wanted.objectives, wanted.timeout_seconds - timeout_seconds)
    wanted.timeout_seconds = timeout_seconds
    prompt_token_ids = _prompt_of(submit)
    submit.ClearField("packed_prompt_token_ids")
    return LinkRequest(submit, prompt_token_ids, partial_choices)
