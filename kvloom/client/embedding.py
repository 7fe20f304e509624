"""`Embedding`, the vector of one text, with the requests for it as an SDK caller writes them; and `Moderation`."""

from __future__ import annotations

import dataclasses
import sys
import uuid
from array import array
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from kvloom.errors import KvloomError, invalid_argument
from kvloom.sampling import draw_seed
from kvloom.v1 import generation_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import Pooling, SequenceFinish
from kvloom.v1.router_service_pb2 import GenerateRequest, ModerateResponse

MAX_INPUTS: Final = 2048
MAX_OPEN_EMBEDDINGS: Final = 32
"""How many inputs of one call a fleet has at a time: enough for full batches."""

Input = str | Sequence[int]
PoolingName = Literal["mean", "last", "cls"]

_POOLING_KINDS: Final[Mapping[str | None, generation_pb2.PoolingKind.ValueType]] = {
    None: generation_pb2.POOLING_KIND_UNSPECIFIED,
    "mean": generation_pb2.POOLING_KIND_MEAN,
    "last": generation_pb2.POOLING_KIND_LAST,
    "cls": generation_pb2.POOLING_KIND_CLS,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one text."""

    vector: Sequence[float]
    """float32 numbers; the length is 1 unless `normalize` was False."""
    num_prompt_tokens: int
    receipt: bytes = b""
    """The signed receipt as JSON, if the request asked for one and its router could give one."""

    @classmethod
    def of(cls, finish: SequenceFinish) -> Embedding:
        """Raises KvloomError (INTERNAL) if there is no vector."""
        if not finish.embedding:
            raise KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "The router gave no embedding.")
        vector = array("f", finish.embedding)
        if sys.byteorder == "big":
            vector.byteswap()
        return cls(vector, finish.num_prompt_tokens, finish.receipt)


def embedding_requests(
    model: str,
    inputs: Input | Sequence[Input],
    pooling: PoolingName | None,
    timeout_seconds: float,
    *,
    normalize: bool,
    receipt: bool = False,
) -> list[GenerateRequest]:
    """One request for each input. Raises KvloomError (INVALID_ARGUMENT)."""
    if pooling not in _POOLING_KINDS:
        raise invalid_argument("pooling must be mean, last or cls.", "pooling")
    wanted = Pooling(kind=_POOLING_KINDS[pooling], raw_length=not normalize)  # pyrefly: ignore[bad-argument-type]
    requests: list[GenerateRequest] = []
    for field, given in _fields(inputs):
        request = GenerateRequest(
            model=model,
            pooling=wanted,
            timeout_seconds=timeout_seconds,
            request_id=f"req-{uuid.uuid4().hex}",
            receipt=receipt,
        )
        request.sampling.seed = draw_seed()
        try:
            if isinstance(given, str):
                request.text = given
            else:
                request.token_ids.ids.extend(given)
        except (TypeError, ValueError) as error:  # no ids, too large ones, or lone surrogates
            raise invalid_argument(f"{field} is neither a text nor token ids: {error}", field) from error
        if not given:
            raise invalid_argument(f"{field} must not be empty.", field)
        requests.append(request)
    return requests


def _fields(inputs: Input | Sequence[Input]) -> list[tuple[str, Input]]:
    """The inputs with their names in error messages."""
    if isinstance(inputs, str):
        return [("inputs", inputs)]
    if not inputs:
        raise invalid_argument("inputs must not be empty.", "inputs")
    ids = [token_id for token_id in inputs if isinstance(token_id, int)]
    if len(ids) == len(inputs):
        return [("inputs", ids)]
    if len(inputs) > MAX_INPUTS:
        raise invalid_argument(f"inputs has {len(inputs)} entries; at most {MAX_INPUTS} are allowed.", "inputs")
    several = [one for one in inputs if not isinstance(one, int)]
    if len(several) < len(inputs):
        raise invalid_argument("inputs must not mix token ids with texts or lists of token ids.", "inputs")
    return [(f"inputs[{number}]", one) for number, one in enumerate(several)]


@dataclasses.dataclass(frozen=True, slots=True)
class Moderation:
    """The categories of the safety policy that a text belongs to. It is true if there is any."""

    categories: tuple[str, ...]
    """The categories of the rules that the text breaks, no matter if those are for prompts or for answers."""
    known_categories: tuple[str, ...]
    """All categories of the policy."""
    policy_revision: str
    """Identifies the version of the policy that was applied."""

    def __bool__(self) -> bool:
        return bool(self.categories)


def moderations(answer: ModerateResponse) -> list[Moderation]:
    known = tuple(answer.categories)
    return [Moderation(tuple(result.categories), known, answer.policy_revision) for result in answer.results]
