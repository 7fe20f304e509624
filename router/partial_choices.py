"""Checks the choices of a `Generate` that resumes an answer which a lost router had begun."""

from __future__ import annotations

from collections.abc import Sequence

from kvloom.errors import KvloomError, invalid_argument
from kvloom.guide import GUIDE_FIELD
from kvloom.sampling import DEFAULT_TEMPERATURE
from kvloom.v1.router_service_pb2 import GenerateRequest, PartialChoice
from kvloom_common.text.tokenizer import ModelTokenizer
from router.core.events import ChoiceSpec


def wanted_choices(wanted: GenerateRequest, tokenizer: ModelTokenizer, max_tokens: int) -> tuple[ChoiceSpec, ...]:
    """Returns the choices that have not ended, each with the output that the client has already received. Their slots
    are their indexes. `max_tokens` limits each choice's output if the request has no limit. Raises KvloomError
    (INVALID_ARGUMENT) that names the field."""
    num_choices = wanted.n or 1
    partial_choices: dict[int, PartialChoice] = {}
    if wanted.stop.HasField("max_tokens"):
        max_tokens = min(max_tokens, wanted.stop.max_tokens)
    for position, choice in enumerate(wanted.partial_choices):
        at = f"partial_choices[{position}]"
        if choice.index >= num_choices:
            raise invalid_argument(f"{at}.index is {choice.index}, but n is {num_choices}.", f"{at}.index")
        if choice.index in partial_choices:
            raise invalid_argument(f"{at}.index is {choice.index}, as that of another entry.", f"{at}.index")
        partial_choices[choice.index] = choice
        if not choice.done:
            _check_output(choice, at, tokenizer, max_tokens)
    _check_seed(wanted)
    choices = tuple(
        _spec(index, partial_choices.get(index))
        for index in range(num_choices)
        if not _is_done(partial_choices.get(index))
    )
    if not choices:
        raise invalid_argument(
            "Every choice of partial_choices is done, so there is nothing to resume.", "partial_choices"
        )
    return choices


def num_wanted_choices(wanted: GenerateRequest) -> int:
    """Returns the number of choices that a request asks for. The request need not have been checked yet."""
    done = {choice.index for choice in wanted.partial_choices if choice.done}
    return max(1, (wanted.n or 1) - len(done))


def named_for_callers(error: KvloomError, guide_field: str = GUIDE_FIELD) -> KvloomError:
    """Renames the error's field for callers of `Generate`. Some errors are found only by the core and by shards, whose
    requests name the prompt and the output that was given in another way. `guide_field` asked for the guide."""
    if error.field == "prompt_token_ids":
        field = "input"
    elif error.field == GUIDE_FIELD and guide_field != GUIDE_FIELD:
        field = guide_field
    elif error.field.startswith("choices."):
        field = "partial_choices." + error.field.removeprefix("choices.")
    else:
        return error
    return error.renamed(field, error.message)


def _is_done(choice: PartialChoice | None) -> bool:
    return choice is not None and choice.done


def _spec(index: int, choice: PartialChoice | None) -> ChoiceSpec:
    if choice is None:
        return ChoiceSpec(slot=index, index=index)
    return ChoiceSpec(index, index, choice.token_ids[:], choice.num_delivered_chars)


def _check_output(choice: PartialChoice, at: str, tokenizer: ModelTokenizer, max_tokens: int) -> None:
    token_ids: Sequence[int] = choice.token_ids
    field = f"{at}.token_ids"
    if len(token_ids) > max_tokens:
        raise invalid_argument(f"{field} has {len(token_ids)} tokens, but at most {max_tokens} are wanted.", field)
    if token_ids and max(token_ids) >= tokenizer.vocab_size:
        message = f"{field} holds {max(token_ids)}, but ids of this model are below {tokenizer.vocab_size}."
        raise invalid_argument(message, field)


def _check_seed(wanted: GenerateRequest) -> None:
    """Rejects a request without a seed, because another seed would lead to another answer."""
    sampling = wanted.sampling
    temperature = sampling.temperature if sampling.HasField("temperature") else DEFAULT_TEMPERATURE
    if (
        temperature > 0.0
        and not sampling.HasField("seed")
        and any(choice.token_ids for choice in wanted.partial_choices)
    ):
        message = "sampling.seed is required to resume an answer; the first response has the seed that was drawn."
        raise invalid_argument(message, "sampling.seed")
