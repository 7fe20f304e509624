"""Responses that fork from a stored one behind a token of its output (`previous_response_id` with `at`).

A stored response has its seed and the tokens of its output. A fork gets the same prompt and the same seed, and the
router the tokens up to the fork, as if another router had generated them: random numbers are a function of seed and
position, so a fork whose request changes nothing has the same output.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edge_http.answers.carried_output import CarriedOutput
from edge_http.endpoints.generation_job import GenerationJob
from kvloom.errors import KvloomError, invalid_argument
from kvloom.sampling import draw_seed
from kvloom.v1.error_reason_pb2 import ErrorReason


class Generation(msgspec.Struct):
    """The facts from which the output of a response is continued."""

    model: str
    seed: int
    token_ids: list[int]


def give_seed(job: GenerationJob) -> None:
    """Draw the job's seed, if there is none, so that it is known."""
    job.take_default_seed()
    if not job.sampling.HasField("seed"):
        job.sampling.seed, job.wanted.seed_is_drawn = draw_seed(), True


def generation_json(job: GenerationJob, token_ids: Sequence[int]) -> bytes:
    """The JSON of the generation of a job that has ended."""
    return msgspec.json.encode(Generation(job.model.name, job.sampling.seed, list(token_ids)))


def fork(job: GenerationJob, stored: bytes, num_tokens: int) -> None:
    """Have the job continue an output behind so many tokens. Raises KvloomError (INVALID_ARGUMENT,
    FAILED_PRECONDITION)."""
    known = msgspec.json.decode(stored, type=Generation)
    if known.model != job.model.name:
        raise invalid_argument(f"A fork at a token needs the model of the response, {known.model!r}.", "model")
    if num_tokens >= max(1, len(known.token_ids)):
        raise invalid_argument(f"at must be less than {len(known.token_ids)}, the tokens of the output.", "at")
    job.sampling.seed = known.seed
    if not num_tokens:
        return
    carried = CarriedOutput.of(known.token_ids[:num_tokens], job.model.tokenizer)
    if carried.progress(job.model.tokenizer, job.stop) is None:
        message = f"The output cannot be continued behind its first {num_tokens} tokens."
        raise KvloomError(ErrorReason.ERROR_REASON_FAILED_PRECONDITION, message, field="at")
    job.carried = carried
