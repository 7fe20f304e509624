"""Events as values of JSON, without their content, and back.

Only lengths are kept of prompts, tokens and texts; block hashes stand for prompts, and what filters said for the text
that they were asked about. What the core never reads is left out.

The decisions among a core's actions, small enough to be logged with every event.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from kvloom.errors import KvloomError
from router.core import events as ev
from router.core.actions import (
    Action,
    CancelOnShard,
    CheckPrompt,
    RequestEnded,
    SendStep,
    ShardHealthChanged,
    SubmitAttempt,
)
from router.core.dispatch.prefill_handoffs import HandoffAbilities
from router.core.events import CachedChoice, CallReader, Event, Request, TextFilter
from router.core.frames import Finish, Start, Step

CHARACTER: Final = "x"
"""Stands for any text."""


class WitnessedFilter:
    """A filter whose verdicts are noted, or one that repeats them."""

    def __init__(self, text_filter: TextFilter | None, verdicts: deque[bool]) -> None:
        """`text_filter`: None repeats the verdicts."""
        self._filter = text_filter
        self._verdicts = verdicts

    def is_suspicious(self, text: str) -> bool:
        if self._filter is None:
            return self._verdicts.popleft() if self._verdicts else True
        verdict = self._filter.is_suspicious(text)
        self._verdicts.append(verdict)
        return verdict

    def __reduce__(self) -> tuple[type[WitnessedFilter], tuple[None, deque[bool]]]:
        return WitnessedFilter, (None, self._verdicts)


class WitnessedCalls:
    """A reader of calls whose findings are noted as verdicts of filters are, or one that repeats them."""

    def __init__(self, reader: CallReader | None, verdicts: deque[bool]) -> None:
        """`reader`: None repeats the verdicts."""
        self._reader = reader
        self._verdicts = verdicts

    def read(self, delta: str) -> tuple[bool, bool]:
        verdicts = self._verdicts
        if self._reader is None:
            return (verdicts.popleft(), verdicts.popleft()) if len(verdicts) > 1 else (False, False)
        found = self._reader.read(delta)
        verdicts.extend(found)
        return found

    def __reduce__(self) -> tuple[type[WitnessedCalls], tuple[None, deque[bool]]]:
        return WitnessedCalls, (None, self._verdicts)


def error_without_text(reason: int, retry_after_seconds: float) -> KvloomError:
    return KvloomError(reason, "", retry_after_seconds=retry_after_seconds)


def can_hand_over(sampling: Any) -> bool:
    """HandoffAbilities of what is left of a request's sampling."""
    return sampling is None or sampling[0]


def wants_logprobs(sampling: Any) -> bool:
    return sampling is not None and sampling[1]


def without_content(request: Request, abilities: HandoffAbilities) -> Request:
    """The request with lengths of its prompt and output, and what the core asks about its sampling. It must have its
    block hashes."""
    sampling = request.sampling
    return msgspec.structs.replace(
        request,
        prompt_token_ids=range(len(request.prompt_token_ids)),
        images=(),
        prompt_text=CHARACTER if request.prompt_text else "",
        choices=[
            msgspec.structs.replace(choice, output_token_ids=(0,) * len(choice.output_token_ids))
            for choice in request.choices
        ],
        sampling=None if sampling is None else [abilities.can_hand_over(sampling), abilities.wants_logprobs(sampling)],
        stop=None,
        cache_salt="",
        pooling=None if request.pooling is None else True,
        safety_identifier="",
        traceparent="",
        issue_ticket=None,
        count_reasoning=None,
        call_reader=None,
    )


def to_plain(event: Event, abilities: HandoffAbilities) -> Any:
    """A value that `encode` takes. A TokensOnlyFrame must be one that can be read again."""
    match event:
        case ev.TokensOnlyFrame():
            step = event.step
            return [event.shard_id, step.slots, list(map(len, step.deltas)), _parts(event.read_rest(), abilities)]
        case ev.StepArrived():
            return [event.shard_id, *_plain_step(event.step)]
        case ev.FrameArrived():
            return [event.shard_id, _parts(event.parts, abilities)]
        case ev.RequestArrived():
            request = without_content(event.request, abilities)
            outputs = [len(choice.output_token_ids) for choice in request.choices]
            choices = [msgspec.structs.replace(choice, output_token_ids=()) for choice in request.choices]
            small = msgspec.structs.replace(request, prompt_token_ids=(), choices=choices)
            cached = [
                [len(choice.token_ids), list(map(len, choice.deltas)), _plain_finish(choice.finish)]
                for choice in event.cached
            ]
            has_ticket = event.ticket is not None
            has_reader = event.request.call_reader is not None
            return [small, len(request.prompt_token_ids), outputs, has_ticket, event.result_cache, cached, has_reader]
        case ev.SafetyUp():
            filters = [event.prefilter is not None, event.prompt_filter is not None]
            return [event.screens_prompts, event.screens_answers, *filters]
        case _:
            return event


def from_plain(name: str, plain: Any, verdicts: deque[bool]) -> Event:
    """The event of that class. `verdicts`: what its filters will say. Raises ValueError."""
    match name:
        case "TokensOnlyFrame":
            shard_id, slots, lengths, rest = plain
            parts = [from_plain(part, content, verdicts) for part, content in rest]
            step = Step(slots=slots, token_ids=[0] * len(slots), deltas=[CHARACTER * length for length in lengths])
            return ev.TokensOnlyFrame(shard_id, step, lambda: parts)  # pyrefly: ignore[bad-argument-type]
        case "StepArrived":
            shard_id, step, num_tokens, lengths = plain
            found = _convert(step, Step)
            found.token_ids, found.deltas = [0] * num_tokens, [CHARACTER * length for length in lengths]
            return ev.StepArrived(shard_id, found)
        case "FrameArrived":
            shard_id, parts = plain
            found = [from_plain(part, content, verdicts) for part, content in parts]
            return ev.FrameArrived(shard_id, found)  # pyrefly: ignore[bad-argument-type]
        case "RequestArrived":
            return _request_arrived(plain, verdicts)
        case "SafetyUp":
            screens_prompts, screens_answers, *has_filters = plain
            filters = [WitnessedFilter(None, verdicts) if has_filter else None for has_filter in has_filters]
            return ev.SafetyUp(screens_prompts, screens_answers, *filters)
        case _:
            return _convert(plain, getattr(ev, name))


def encode(value: Any) -> bytes:
    return _encoder.encode(value)


def _request_arrived(plain: Any, verdicts: deque[bool]) -> ev.RequestArrived:
    small, num_prompt_tokens, outputs, has_ticket, result_cache, cached, *has_reader = plain
    request = _convert(small, Request)
    if any(has_reader):
        request = msgspec.structs.replace(request, call_reader=lambda _: WitnessedCalls(None, verdicts))
    choices = [
        msgspec.structs.replace(choice, output_token_ids=(0,) * count)
        for choice, count in zip(request.choices, outputs, strict=True)
    ]
    return ev.RequestArrived(
        msgspec.structs.replace(request, prompt_token_ids=range(num_prompt_tokens), choices=choices),
        has_ticket or None,
        result_cache,
        [
            CachedChoice([0] * count, [CHARACTER * length for length in lengths], _convert(finish, Finish))
            for count, lengths, finish in cached
        ],
    )


def _parts(parts: Iterable[Any], abilities: HandoffAbilities) -> list[list[Any]]:
    return [
        [type(part).__name__, to_plain(part, abilities) if type(part) is ev.StepArrived else part] for part in parts
    ]


def _plain_step(step: Step) -> tuple[Step, int, list[int]]:
    small = msgspec.structs.replace(
        step,
        token_ids=[],
        deltas=[],
        logprobs=[(slot, None) for slot, _ in step.logprobs],
        starts=[_plain_start(start) for start in step.starts],
        finishes=[_plain_finish(finish) for finish in step.finishes],
    )
    return small, len(step.token_ids), list(map(len, step.deltas))


def _plain_start(start: Start) -> Start:
    return msgspec.structs.replace(start, prompt_logprobs=(None,) * len(start.prompt_logprobs))


def _plain_finish(finish: Finish) -> Finish:
    if not (finish.stop_string or finish.embedding or finish.handoff):
        return finish
    return msgspec.structs.replace(
        finish,
        stop_string=CHARACTER * len(finish.stop_string),
        embedding=finish.embedding and b"0",
        handoff=finish.handoff and b"0",
    )


def _convert(plain: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(plain, kind, str_keys=True, dec_hook=_from_hook)
    except (msgspec.ValidationError, TypeError) as error:
        raise ValueError(f"{kind.__name__}: {error}") from error


def _to_hook(value: Any) -> Any:
    """Values of the core that JSON does not have."""
    if isinstance(value, KvloomError):
        return [int(value.reason), value.retry_after_seconds]
    if isinstance(value, Mapping):
        return dict(value)
    return list(value)  # a range, an array or a view of memory


def _from_hook(kind: Any, plain: Any) -> Any:
    if kind is KvloomError:
        return error_without_text(*plain)
    return plain


_encoder: Final = msgspec.json.Encoder(enc_hook=_to_hook)


Decision = list[Any]
"""Says what was decided, and about what. Equal decisions have equal lists, also when they were read from JSON."""


def raised(error: Exception) -> Decision:
    """The core has refused the event, or failed."""
    return ["raised", type(error).__name__]


def decisions(actions: Iterable[Action]) -> list[Decision]:
    found: list[Decision] = []
    for action in actions:
        match action:
            case SendStep():
                step = action.step
                sent = array("q", [*step.slots, *step.num_tokens])
                ends = [[finish.slot, finish.reason] for finish in step.finishes]
                found.append(["send", action.client_id, len(step.token_ids), zlib.crc32(sent), ends])
            case SubmitAttempt():
                slots = [choice.slot for choice in action.choices]
                given = [len(choice.output_token_ids) for choice in action.choices]
                name = action.request.request_id or action.prepares
                found.append(["submit", name, action.attempt_id, action.shard_id, slots, given, action.max_tokens])
            case CancelOnShard():
                found.append(["cancel", action.shard_id, list(action.slots)])
            case RequestEnded():
                found.append(["end", action.request_id, action.reason, action.error_reason, action.num_output_tokens])
            case ShardHealthChanged():
                found.append(["health", action.shard_id, action.state.value, action.symptom])
            case CheckPrompt():
                found.append(["check", action.request_id])
            case _:
                pass
    return found
