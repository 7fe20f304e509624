"""Makes the core's `Request` of what a client wants and of its prompt, in one place for all ways to the router.

What only a part of all fabrics has (guaranteed shares, usage, receipts, the result cache) is added by functions that
are there only if it is on.
"""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from kvloom.adapters import Adapter
from kvloom.errors import invalid_argument, unsupported
from kvloom.objectives import check_objectives
from kvloom.sampling import draw_seed, is_greedy, max_cached_tokens
from kvloom.v1 import router_service_pb2
from kvloom.v1.generation_pb2 import Pooling, PoolingKind, SamplingParams, StopConditions
from kvloom.v1.router_service_pb2 import GenerateRequest, OutputForm, Submit
from kvloom_common.access.kv_shares import CacheSalts
from kvloom_common.conversation.model_output import parser_of
from kvloom_common.kv_share import KvShare
from kvloom_common.models.served_model import ServedModel
from kvloom_common.text.prompt_images import words_of
from router import convert
from router.caller_scope import TRUSTED, CallerScope
from router.continuation_tickets import ContinuationTickets, digest_of
from router.core.events import ChoiceSpec, Request, TierRank
from router.core.objectives import Objectives
from router.core.priority_classes import CLASS_OF_TIER, ROUTERS_OWN, PriorityClass
from router.parsed_output import call_reader
from router.prompt_checks import MAX_NAME_CHARS, PromptChecks

NO_SALTS: Final = CacheSalts(b"")
MAX_GUARDRAILS: Final = 32
MAX_SAFETY_IDENTIFIER_CHARS: Final = 512
"""Agents name their installation, account and session in it: Claude Code takes some 200 characters."""
NO_CLASSES: Final[Mapping[str, PriorityClass]] = {}
_BUILT_IN: Final = {one.name: one for one in CLASS_OF_TIER.values()}
_TIERS: Final[Mapping[int, TierRank]] = {
    router_service_pb2.TIER_UNSPECIFIED: TierRank.INTERACTIVE,
    router_service_pb2.TIER_INTERACTIVE: TierRank.INTERACTIVE,
    router_service_pb2.TIER_BATCH: TierRank.BATCH,
}

Extra = Callable[[Request, Submit, GenerateRequest, ServedModel | None], Mapping[str, Any]]
"""A function by which a feature adds to a request: it returns the changed fields, by name."""


class RequestBuilder:
    """The one place where a `Request` is made. One for each router."""

    def __init__(
        self,
        checks: PromptChecks,
        adapter_named: Callable[[str], tuple[str, Adapter] | None] = lambda _: None,
        cache_salts: CacheSalts = NO_SALTS,
        kv_share_of: Callable[[str], KvShare | None] | None = None,
        check_residency: Callable[[str], None] | None = None,
        guardrails_of: Callable[[str], Sequence[str]] | None = None,
        *,
        meters_usage: bool = False,
        caches_results: bool = False,
        gives_receipts: bool = False,
        holds_calls: bool = False,
        classes: Mapping[str, PriorityClass] = NO_CLASSES,
        tickets: ContinuationTickets | None = None,
    ) -> None:
        """The arguments are those of RequestValidator (router/request_validator.py)."""
        self._checks = checks
        self._adapter_named = adapter_named
        self.cache_salt = cache_salts.of
        self._classes = classes
        self._tickets = tickets
        self._meters_usage = meters_usage
        self._guardrails_of = guardrails_of
        self._extras: list[Extra] = []
        if check_residency is not None:
            self._extras.append(partial(_check_residency, check_residency))
        if kv_share_of is not None:
            self._extras.append(partial(_share, kv_share_of))
        if meters_usage:
            self._extras.append(_usage)
        if holds_calls:
            self._extras.append(_calls)
        if caches_results or gives_receipts:
            self._extras.append(partial(_kept, caches_results, gives_receipts))

    def build(
        self,
        submit: Submit,
        wanted: GenerateRequest,
        prompt: tuple[Sequence[int], str],
        choices: Sequence[ChoiceSpec],
        client_id: str,
        model: ServedModel | None,
        sampling: SamplingParams,
        stop: StopConditions,
        scope: CallerScope = TRUSTED,
        num_choices: int = 0,
    ) -> Request:
        """The request for a checked prompt: its tokens, and the text for the safety service. `submit` says what its
        client says of it, and `wanted` what it wants, whose sampling and stop conditions have become the given ones.
        `model` is None for one without a card. `num_choices`: those of the whole answer; 0: it came over a
        stream, which does not say. Raises KvloomError."""
        tenant = sys.intern(scope.tenant(submit.tenant))
        objectives, pooling = None, None
        if wanted.HasField("objectives"):
            objectives = _objectives(wanted.objectives, scope)
        if wanted.HasField("pooling"):
            if wanted.images:
                raise unsupported("An embedding is one of tokens without images.", "images")
            pooling = _pooling(wanted.pooling, choices)
        name, adapter = self._model_and_adapter(wanted, model)
        request = Request(
            request_id=scope.request_id(wanted.request_id or new_request_id()),
            client_id=client_id,
            model=name,
            prompt_token_ids=prompt[0],
            prompt_text=prompt[1],
            choices=choices,
            images=tuple(wanted.images),
            max_tokens=_max_tokens(stop, model) if pooling is None else 0,
            sampling=sampling,
            stop=stop,
            pooling=pooling,
            timeout_seconds=_checked_timeout(wanted.timeout_seconds),
            tenant=tenant,
            key_id=submit.key_id if scope.caller is None else scope.key_id,
            cache_salt=self.cache_salt(tenant),
            traceparent=submit.traceparent,
            client_request_id=submit.client_request_id,
            session_key=wanted.session_key,
            tier=tier_of(wanted),
            adapter=adapter,
            max_cached_tokens=max_cached_tokens(sampling),
            has_fallback_model=submit.has_fallback_model,
            objectives=objectives,
        )
        if scope is not TRUSTED:
            request = self._from_outside(request, submit, wanted, model, num_choices)
        chosen = () if self._guardrails_of is None else self._guardrails_of(tenant)
        if chosen or wanted.guardrails or wanted.safety_identifier or wanted.tells_safety_rules:
            request = msgspec.structs.replace(request, **_safety(wanted, chosen))
        changes: dict[str, Any] = {}
        for extra in self._extras:
            changes.update(extra(request, submit, wanted, model))
        if self._classes or wanted.priority_class or wanted.fairness_id or scope.access is not None:
            changes.update(self._class(request, wanted, scope))
        return msgspec.structs.replace(request, **changes) if changes else request

    def _model_and_adapter(self, wanted: GenerateRequest, model: ServedModel | None) -> tuple[str, Adapter | None]:
        """Raises KvloomError."""
        if model is None:
            found = self._adapter_named(wanted.model)
            if found is None:
                return sys.intern(wanted.model), None  # usage records keep it for minutes, so all share one string
            name, adapter = found
        elif model.adapter is None:
            return model.name, None
        else:
            name, adapter = model.base_name, model.adapter
        if wanted.HasField("pooling"):
            raise unsupported("An embedding is that of a model alone, not of an adapter: name the model.", "model")
        if wanted.adapter_checksum:  # that of the adapter with which the answer began
            check_names(adapter_checksum=wanted.adapter_checksum)
            adapter = adapter._replace(checksum=wanted.adapter_checksum)
        return sys.intern(name), adapter

    def _class(self, request: Request, wanted: GenerateRequest, scope: CallerScope) -> Mapping[str, Any]:
        """Raises KvloomError (INVALID_ARGUMENT, PERMISSION_DENIED)."""
        name, fairness_id, of_tier = wanted.priority_class, wanted.fairness_id, CLASS_OF_TIER[request.tier].name
        check_names(fairness_id=fairness_id)
        if scope.access is not None:
            name = scope.access.class_of(name, of_tier, "priority_class")
        if not (self._classes or name or fairness_id):
            return {}
        known = self._classes or _BUILT_IN
        found = known.get(name or of_tier)
        if found is None and request.is_continued:
            found = known[of_tier]  # it began where the class was declared
        if found is None or name in ROUTERS_OWN:
            raise invalid_argument(f"priority_class: there is no class {name[:64]!r}.", "priority_class")
        return {"priority_class": found, "fairness_id": fairness_id}

    # -- clients outside the fabric -----------------------------------------------------------------------------------

    def _from_outside(
        self, request: Request, submit: Submit, wanted: GenerateRequest, model: ServedModel | None, num_choices: int
    ) -> Request:
        """The request of a client outside the fabric, of which no more is believed than its ticket proves. Raises
        KvloomError."""
        tickets = self._tickets
        answer_id = secrets.token_hex(8) if self._meters_usage else ""
        if tickets is None:
            request = self._with_claims(request, model, answer_id) if request.has_output else request
            return msgspec.structs.replace(request, answer_id=answer_id)
        checksum = "" if request.adapter is None else request.adapter.checksum
        digest = digest_of(request, num_choices, wanted.priority_class, checksum)
        if request.has_output or submit.num_ended_tokens:
            ticket = tickets.redeem(wanted.continuation_ticket, digest, request, is_alone=num_choices > 0)
            if ticket is None:
                return self._with_claims(request, model, answer_id)
            # What its earlier output is, only the client says: it is screened as a prompt.
            return msgspec.structs.replace(
                request,
                answer_id=ticket.answer_id,
                num_ended_tokens=submit.num_ended_tokens,
                most_cached_tokens=ticket.num_cached_tokens,
                prompt_text=self._text_with_claims(request, model),
            )
        return msgspec.structs.replace(
            request, answer_id=answer_id, issue_ticket=partial(tickets.issue, digest, answer_id)
        )

    def _with_claims(self, request: Request, model: ServedModel | None, answer_id: str) -> Request:
        """The request of a client outside the fabric, whose choices have output: it counts, and is screened, as a part
        of the prompt. Raises KvloomError."""
        num_claimed = sum(len(choice.output_token_ids) for choice in request.choices)
        text = self._text_with_claims(request, model)
        return msgspec.structs.replace(request, num_claimed_tokens=num_claimed, prompt_text=text, answer_id=answer_id)

    def _text_with_claims(self, request: Request, model: ServedModel | None) -> str:
        outputs = [choice.output_token_ids for choice in request.choices if choice.output_token_ids]
        texts = [request.prompt_text, *(self._checks.screened(ids, model, request.model) for ids in outputs)]
        return "\n".join(filter(None, texts))


# -- what features add ------------------------------------------------------------------------------------------------


def _check_residency(check_residency: Callable[[str], None], request: Request, *_: object) -> Mapping[str, Any]:
    """Raises KvloomError."""
    check_residency(request.tenant)
    return {}


def _share(
    kv_share_of: Callable[[str], KvShare | None],
    request: Request,
    *_: object,
) -> Mapping[str, Any]:
    return {"kv_share": kv_share_of(request.tenant)}


def _usage(request: Request, submit: Submit, wanted: GenerateRequest, model: ServedModel | None) -> Mapping[str, Any]:
    """Add what usage records need. What a client outside the fabric says of its answer changes none of it: it has an
    answer id. An answer whose form a guide dictates has no reasoning."""
    changes: dict[str, Any] = {}
    is_trusted = not request.answer_id
    if is_trusted and (submit.num_ended_tokens or submit.num_foreign_tokens):
        num_given = sum(len(choice.output_token_ids) for choice in request.choices)
        changes["num_ended_tokens"] = submit.num_ended_tokens
        changes["num_foreign_tokens"] = min(submit.num_foreign_tokens, num_given)
    spec = None if model is None else model.output
    assert isinstance(request.sampling, SamplingParams)
    if model is None or spec is None or not spec.reasoning or request.sampling.HasField("guide"):
        return changes
    # Only here, because most models write none.
    from kvloom_common.conversation.reasoning_tokens import ReasoningCounter

    if is_trusted:
        changes["num_ended_reasoning_tokens"] = min(submit.num_ended_reasoning_tokens, submit.num_ended_tokens)
    words = request.prompt_token_ids
    if wanted.images:
        words = words_of(words, wanted.images, is_trusted=True)
    changes["count_reasoning"] = ReasoningCounter(spec, model.tokenizer, words)
    return changes


def _calls(request: Request, submit: Submit, _wanted: GenerateRequest, model: ServedModel | None) -> Mapping[str, Any]:
    """Add what tells calls from text in gated answers. Raises KvloomError (INVALID_ARGUMENT)."""
    if not submit.HasField("output_form"):
        return {}
    form = OutputForm()
    form.CopyFrom(submit.output_form)
    try:
        parser_of(form)
    except ValueError as error:
        raise invalid_argument(f"output_form: {error}", "output_form") from error
    assert isinstance(request.sampling, SamplingParams)
    tokenizer = None if model is None else model.tokenizer
    return {"call_reader": partial(call_reader, form, tokenizer, request.sampling.shown_special_token_ids)}


def _safety(wanted: GenerateRequest, chosen: Sequence[str]) -> Mapping[str, Any]:
    """`chosen`: the guardrails of the tenant. Raises KvloomError (INVALID_ARGUMENT)."""
    names = wanted.guardrails
    if len(wanted.safety_identifier) > MAX_SAFETY_IDENTIFIER_CHARS:
        message = f"safety_identifier has at most {MAX_SAFETY_IDENTIFIER_CHARS} characters."
        raise invalid_argument(message, "safety_identifier")
    if len(names) > MAX_GUARDRAILS or any(not 0 < len(name) <= MAX_NAME_CHARS for name in names):
        message = f"guardrails has at most {MAX_GUARDRAILS} names of 1 to {MAX_NAME_CHARS} characters."
        raise invalid_argument(message, "guardrails")
    return {
        "guardrails": tuple(dict.fromkeys((*chosen, *names))),
        "safety_identifier": wanted.safety_identifier,
        "tells_safety_rules": wanted.tells_safety_rules,
    }


def _kept(
    caches_results: bool,
    gives_receipts: bool,
    request: Request,
    _submit: Submit,
    wanted: GenerateRequest,
    model: ServedModel | None,
) -> Mapping[str, Any]:
    """Say whether the answer may be cached, and whether it gets a receipt."""
    if request.has_output:
        return {}
    return {
        "is_cacheable": caches_results
        and not (wanted.no_result_cache or request.guardrails)
        and _is_deterministic(wanted, request, model),
        "wants_receipt": gives_receipts and wanted.receipt,
    }


def _is_deterministic(wanted: GenerateRequest, request: Request, model: ServedModel | None) -> bool:
    """Return whether nothing was drawn for the request, and its answer consists of tokens only (or of a vector)."""
    sampling = request.sampling
    assert isinstance(sampling, SamplingParams)
    if sampling.HasField("logprobs") or sampling.HasField("prompt_logprobs"):
        return False
    if request.pooling is not None or is_greedy(sampling):
        return True
    defaults = None if model is None else model.default_sampling
    return (wanted.sampling.HasField("seed") and not wanted.seed_is_drawn) or (
        defaults is not None and defaults.HasField("seed")
    )


# -- parts of a request -----------------------------------------------------------------------------------------------


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


def tier_of(wanted: GenerateRequest) -> TierRank:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    tier = wanted.tier
    if tier not in _TIERS:  # The enum is open, so any number can arrive.
        raise invalid_argument(f"tier has no value {tier}.", "tier")
    return _TIERS[tier]


def with_seed(sampling: SamplingParams, model: ServedModel | None) -> SamplingParams:
    """Returns a copy (the original would keep its whole frame in memory) with the model's defaults and a fixed seed, so
    that a later attempt draws the same numbers."""
    fixed = SamplingParams()
    if model is not None and model.default_sampling is not None:
        fixed.CopyFrom(model.default_sampling)
        fixed.MergeFrom(sampling)
    else:
        fixed.CopyFrom(sampling)
    if not fixed.HasField("seed"):
        fixed.seed = draw_seed()
    return fixed


def copied(stop: StopConditions) -> StopConditions:
    """Returns a copy: the original would keep its whole frame in memory."""
    copy = StopConditions()
    copy.CopyFrom(stop)
    return copy


def check_names(**names: str) -> None:
    """Raises KvloomError for the first name that is too long; keywords are field names."""
    if max(map(len, names.values())) <= MAX_NAME_CHARS:
        return
    for field, value in names.items():
        if len(value) > MAX_NAME_CHARS:
            raise invalid_argument(f"{field} has {len(value)} characters; at most {MAX_NAME_CHARS} are allowed.", field)


def within_deadline(request: Request, seconds: float) -> Request:
    """The request, whose caller waits for so long and no longer."""
    objectives = request.objectives or Objectives()
    deadline_seconds = objectives.elapsed_seconds + max(seconds, 0.0)
    if objectives.deadline_seconds is not None:
        deadline_seconds = min(deadline_seconds, objectives.deadline_seconds)
    objectives = msgspec.structs.replace(objectives, deadline_seconds=deadline_seconds)
    return msgspec.structs.replace(request, objectives=objectives)


def _objectives(wanted: router_service_pb2.Objectives, scope: CallerScope) -> Objectives:
    """That a router has admitted the request before is for processes of the fabric to say. Raises KvloomError
    (INVALID_ARGUMENT)."""
    check_objectives(wanted)
    objectives = convert.objectives_from_proto(wanted)
    if objectives.is_admitted and scope is not TRUSTED:
        return msgspec.structs.replace(objectives, is_admitted=False)
    return objectives


def _pooling(pooling: Pooling, choices: Sequence[ChoiceSpec]) -> Pooling:
    """A copy: the original would keep its whole frame in memory. Raises KvloomError."""
    if len(choices) != 1 or choices[0].output_token_ids:
        raise invalid_argument("An embedding has one choice, without output tokens.", "choices")
    if pooling.kind not in PoolingKind.values():  # The enum is open, so any number can arrive.
        raise invalid_argument(f"pooling.kind has no value {pooling.kind}.", "pooling.kind")
    return Pooling(kind=pooling.kind, raw_length=pooling.raw_length)


def _checked_timeout(timeout_seconds: float) -> float:
    if not math.isfinite(timeout_seconds) or timeout_seconds < 0:
        raise invalid_argument("timeout_seconds must not be negative.", "timeout_seconds")
    return timeout_seconds


def _max_tokens(stop: StopConditions, model: ServedModel | None) -> int | None:
    if stop.HasField("max_tokens"):
        return stop.max_tokens
    return None if model is None else model.default_max_tokens
