"""One answer from its submission to its end: the requests to the router, and the sink of their results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec
import structlog

from edge_http.answers.answer import EdgeAnswer, PromptSink
from edge_http.answers.carried_output import CarriedOutput, CarriedSink
from edge_http.answers.streamed_answer import StreamedAnswer
from edge_http.edge import Edge
from edge_http.openai.field_names import named_for_clients
from edge_http.resume.resumable_stream import ResumableStream
from kvloom.errors import KvloomError
from kvloom.router_link.link import LinkRequest
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.delivery_log import DeliveryLog, WitnessLine

log = structlog.get_logger()

MAX_OPEN_REQUESTS: Final = 128
"""One answer has at most so many requests open at a time: enough for full batches, and few enough that one call does
not fill the queues of a router and its shards. Only embeddings have more, and those wait until others have ended."""
ROUTER_GRACE_SECONDS: Final = 5.0
"""The router ends a request at its deadline; this much later the edge ends it by itself."""


class Submission(msgspec.Struct, frozen=True):
    operation: str
    """OpenTelemetry's name: "chat" or "text_completion"."""
    model: str
    num_prompt_tokens: int
    n: int
    requests: Sequence[LinkRequest | None]
    """One for each prompt; None if all its choices have ended. Choices are numbered across all prompts:
    prompt * n + choice."""
    guide_field: str
    """The field of the body that asked for guided decoding."""
    timeout_seconds: float
    prompt_field: str
    """The field of the body that has the prompt."""
    carried: CarriedOutput | None = None
    """The beginning of the output, which is not generated."""


OnSubmitted = Callable[[int, int], None]
"""Called with a prompt's number and the link's handle of its request."""


def on_submitted(_prompt: int, _handle: int) -> None:
    """Does nothing, where nothing needs to know of requests."""


class RunAnswer(Protocol):
    """Brings an answer to its end, as `run_submission` does."""

    async def __call__(
        self, edge: Edge, submission: Submission, answer: EdgeAnswer, on_submitted: OnSubmitted = on_submitted
    ) -> None:
        """Raises the error that ended the answer."""
        ...


async def run_submission(
    edge: Edge,
    submission: Submission,
    answer: EdgeAnswer,
    on_submitted: OnSubmitted = on_submitted,
) -> None:
    """Submit the requests and wait for the end of the answer. Raises the error that ended it. No request is left
    running in the fabric once this returns: the handler is cancelled when the client goes away, and cancels the
    requests that are still open."""
    handles: list[int] = []
    answer.is_direct = True
    deadline = asyncio.get_running_loop().call_later(
        submission.timeout_seconds + ROUTER_GRACE_SECONDS, _time_out, answer
    )
    try:
        for number, request in enumerate(submission.requests):
            if request is not None:
                if number >= MAX_OPEN_REQUESTS:
                    await answer.wait_room()
                    if answer.ended.done():
                        break
                sink = answer if len(submission.requests) == 1 else PromptSink(answer, number * submission.n)
                if submission.carried is not None:
                    sink = CarriedSink(answer, submission.carried)
                handles.append(edge.link.submit(request, sink))
                on_submitted(number, handles[-1])
        await answer.ended
    except asyncio.CancelledError:
        answer.fail(KvloomError(ErrorReason.ERROR_REASON_CANCELLED, "The client went away."))
        edge.metrics.on_disconnect()
        raise
    except KvloomError as error:  # from submit
        answer.fail(error)
    finally:
        deadline.cancel()
        if answer.num_open:
            for handle in handles:
                edge.link.cancel(handle)
        if edge.witness is not None:
            _note_delivered(edge.witness, submission, answer)
        only = submission.requests[0] if len(submission.requests) == 1 else None
        edge.metrics.on_answer(
            submission.operation,
            submission.model,
            answer,
            submission.num_prompt_tokens,
            answer.num_events,
            "" if only is None else only.wanted.request_id,
        )
    if answer.error is not None:
        answer.error = named_for_clients(answer.error, submission.prompt_field, submission.guide_field)
        raise answer.error


async def run_resumable(
    edge: Edge,
    submission: Submission,
    answer: StreamedAnswer,
    stream: ResumableStream,
    on_submitted: OnSubmitted = on_submitted,
    run: RunAnswer = run_submission,
) -> None:
    """Runs `run` for an answer that outlives its connection. Never raises."""
    try:
        await run(edge, submission, answer, on_submitted)
    except KvloomError:
        stream.has_failed = True  # the error is the answer's as well
    except Exception:
        log.exception("request_broke")
        answer.fail(KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "Something went wrong on our side."))
    finally:
        if not stream.ended:
            stream.refuse(answer.error or KvloomError(ErrorReason.ERROR_REASON_CANCELLED, "The request was cancelled."))


def _note_delivered(witness: DeliveryLog, submission: Submission, answer: EdgeAnswer) -> None:
    ids = [request.wanted.request_id for request in submission.requests if request is not None]
    if ids:
        name = ids[0] if len(submission.requests) == 1 else ids[0].rpartition(".")[0]
        witness.note(WitnessLine(name, answer.num_output_tokens, answer.error is None and not answer.num_open))


def _time_out(answer: EdgeAnswer) -> None:
    answer.fail(KvloomError(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, "The request took too long."))
