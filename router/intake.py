"""Turns the requests that clients send into the core's `Request`: checked, tokenized and with a seed."""

from __future__ import annotations

import itertools
import math
import secrets
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from kvloom.adapters import Adapter, full_name, unknown_name
from kvloom.errors import KvloomError, invalid_argument, unsupported
from kvloom.guide import GUIDE_FIELD, check_guide
from kvloom.objectives import check_objectives
from kvloom.router_link.link import LinkRequest
from kvloom.sampling import (
    MAX_CHOICES,
    MAX_PREDICTED_TOKENS,
    check_num_choices,
    check_prompt_logprobs,
    check_sampling,
    check_stop,
    draw_seed,
    is_greedy,
    max_cached_tokens,
)
from kvloom.text.token_ids import are_below, unpack_token_ids
from kvloom.v1 import router_service_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import Pooling, PoolingKind, SamplingParams, StopConditions
from kvloom.v1.router_service_pb2 import FleetState, GenerateRequest, Submit
from kvloom.v1.router_service_pb2 import Objectives as WantedObjectives
from kvloom_common.access.cache_salts import CacheSalts
from kvloom_common.conversation.call_guide import ToolPlace
from kvloom_common.conversation.model_output import fit_to_parser, prompted
from kvloom_common.conversation.prompt import conversation_prompt, screened_text
from kvloom_common.conversation.tool_plan import ToolPlan, plan_tools
from kvloom_common.kv_share import KvShare
from kvloom_common.limits.byte_budget import memory_error
from kvloom_common.limits.memory_policy import LARGE_BYTES, MemoryLevel
from kvloom_common.models.model_routes import NO_ROUTES, ChosenRoute, ModelRoutes
from kvloom_common.models.served_model import ServedModel, adapters_by_model
from kvloom_common.parsers.spec import ParserSpec, ToolSchema
from router import convert
from router.caller_scope import TRUSTED, CallerAccess, CallerScope
from router.continuation_tickets import ContinuationTickets, digest_of
from router.conversation_intake import (
    MESSAGES,
    check_only_for_conversations,
    conversation_error,
    template_options,
    wanted_messages,
    wanted_tools,
)
from router.core.events import ChoiceSpec, Request, Tier
from router.core.objectives import Objectives
from router.core.priority_classes import CLASS_OF_TIER, SHADOW, PriorityClass
from router.model_choice import choose_model
from router.parsed_output import ParsedOutput
from router.partial_choices import wanted_choices

MAX_NAME_CHARS: Final = 256
"""The longest request id (the router's or the caller's), tenant, trace context or session key."""
CHARS_PER_TOKEN: Final = 4
"""The usual number, by which large prompts of tokens are told apart from small ones."""
MAX_CHARS_PER_TOKEN: Final = 16
"""A text with more characters than this per allowed prompt token is rejected before any work is done on it."""
MAX_NAMED_MODELS: Final = 8
"""How many models an error names."""
_TIERS: Final[Mapping[int, Tier]] = {
    router_service_pb2.TIER_UNSPECIFIED: Tier.INTERACTIVE,
    router_service_pb2.TIER_INTERACTIVE: Tier.INTERACTIVE,
    router_service_pb2.TIER_BATCH: Tier.BATCH,
}


NO_TOOLS: Final = ToolPlan()
NO_SALTS: Final = CacheSalts(b"")


class AcceptedGenerate(NamedTuple):
    """The intake makes this of a `Generate`."""

    request: Request
    output: ParsedOutput | None
    """None: the output is text."""
    guide_field: str
    """The field that asked for the guide."""
    chosen: ChosenRoute | None
    """How the model was chosen; None if it was named."""

    @property
    def route(self) -> str:
        """The same for people; "" if it was named."""
        return "" if self.chosen is None else self.chosen.how

    @property
    def chosen_model(self) -> str:
        """The name of the model if the request did not name it, else ""."""
        return "" if self.chosen is None else self.model

    @property
    def model(self) -> str:
        """The name of the model, with that of the adapter if there is one."""
        return self.request.full_name


NO_CLASSES: Final[Mapping[str, PriorityClass]] = {}
_BUILT_IN: Final = {one.name: one for one in CLASS_OF_TIER.values()}


class Intake:
    """Checks requests and tokenizes them."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        max_prompt_tokens: int,
        needs_prompt_text: Callable[[], bool],
        routes: ModelRoutes = NO_ROUTES,
        has_ready_shard: Callable[[str], bool] = lambda _: True,
        adapter_named: Callable[[str], tuple[str, Adapter] | None] = lambda _: None,
        cache_salts: CacheSalts = NO_SALTS,
        kv_share_of: Callable[[str], KvShare | None] | None = None,
        *,
        meters_usage: bool = False,
        caches_results: bool = False,
        gives_receipts: bool = False,
        classes: Mapping[str, PriorityClass] = NO_CLASSES,
        prefers_others: Callable[[str, Tier], bool] | None = None,
        tickets: ContinuationTickets | None = None,
    ) -> None:
        """`models`: by name and alias, and with adapters; they may come and go. `adapter_named` also finds the adapters
        of models without a card, with their models. `kv_share_of` gives the guaranteed share of a caller; None: there
        are none. `meters_usage`: requests get what usage records need. `classes`: those that are declared, with the
        built-in ones. `prefers_others`: whether a model is to be passed by requests that may have another; None: none
        is. `tickets`: of answers of clients outside the fabric; None: there are no such clients."""
        self._tickets = tickets
        self._classes = classes
        self._meters_usage = meters_usage
        self._cache_salt = cache_salts.of
        self._kv_share_of = kv_share_of
        self._caches_results = caches_results
        self._gives_receipts = gives_receipts
        self._keeps_answers = caches_results or gives_receipts
        self._models = models
        self._adapter_named = adapter_named
        self._routes = routes
        self._has_ready_shard = has_ready_shard
        self._prefers_others = prefers_others
        self._max_prompt_tokens = max_prompt_tokens
        self._max_tokens_now = max_prompt_tokens
        """The limit now: less while memory is short. The same holds for the characters."""
        self._max_chars_now = max_prompt_tokens * MAX_CHARS_PER_TOKEN
        self._needs_prompt_text = needs_prompt_text

    def on_memory_level(self, level: MemoryLevel) -> None:
        """From now on large prompts are refused, or all of them, or those above the usual limit."""
        most = (self._max_prompt_tokens * MAX_CHARS_PER_TOKEN, LARGE_BYTES, 0)[level]
        self._max_chars_now = min(most, self._max_prompt_tokens * MAX_CHARS_PER_TOKEN)
        self._max_tokens_now = min(most // CHARS_PER_TOKEN, self._max_prompt_tokens)

    def request_from_submit(self, submit: Submit, client_id: str, scope: CallerScope = TRUSTED) -> Request:
        """Returns a request that arrived over a client's stream. Raises KvloomError."""
        _check_choices(submit)
        choices = convert.choices_from_proto(list(submit.choices))
        request = self._request(submit, _prompt_of(submit), choices, client_id, scope)
        if submit.HasField("objectives"):
            request = with_objectives(request, submit.objectives, scope)
        return _embedding(request, submit.pooling) if submit.HasField("pooling") else request

    def request_from_link(self, wanted: LinkRequest, choices: Sequence[ChoiceSpec], client_id: str) -> Request:
        """Returns a request that was made in this process. Raises KvloomError."""
        check_num_choices(len(choices), "choices")
        request = self._request(wanted, wanted.prompt_token_ids, choices, client_id)
        if wanted.objectives is not None:
            request = with_objectives(request, wanted.objectives)
        return request if wanted.pooling is None else _embedding(request, wanted.pooling)

    def _request(
        self,
        submit: Submit | LinkRequest,
        token_ids: Sequence[int],
        choices: Sequence[ChoiceSpec],
        client_id: str,
        scope: CallerScope = TRUSTED,
    ) -> Request:
        _check_names(
            request_id=submit.request_id,
            tenant=submit.tenant,
            traceparent=submit.traceparent,
            session_key=submit.session_key,
            client_request_id=submit.client_request_id,
        )
        check_sampling(submit.sampling, "sampling.")
        check_stop(submit.stop, "stop.")
        if scope.access is not None:
            scope.access.check_models((submit.model,), self._models)
        model = self._models.get(submit.model)
        self._check_prompt(token_ids, model, "prompt_token_ids")
        check_prompt_logprobs(submit.sampling, len(token_ids), len(choices))
        text = submit.prompt_text  # It is read only once because every access decodes it.
        self._check_text_size(text, "prompt_text")
        tenant = sys.intern(scope.tenant(submit.tenant))
        request = Request(
            request_id=scope.request_id(submit.request_id or new_request_id()),
            client_id=client_id,
            # Usage records keep it for minutes, so all share one string.
            model=sys.intern(submit.model) if model is None else model.name,
            prompt_token_ids=token_ids,
            prompt_text=text if text and scope is TRUSTED else self._screened(text, token_ids, model, submit.model),
            choices=choices,
            max_tokens=_max_tokens(submit.stop, model),
            sampling=_with_seed(submit.sampling, model),
            stop=_copied(submit.stop),
            timeout_seconds=_checked_timeout(submit.timeout_seconds),
            tier=_tier(submit.tier),
            tenant=tenant,
            key_id=submit.key_id if scope.caller is None else scope.key_id,
            cache_salt=self._cache_salt(tenant),
            traceparent=submit.traceparent,
            session_key=submit.session_key,
            client_request_id=submit.client_request_id,
            max_cached_tokens=max_cached_tokens(submit.sampling),
        )
        if scope is not TRUSTED:
            assert isinstance(submit, Submit)
            checksum = submit.adapter_checksum or _adapter_checksum(model)
            digest = digest_of(request, 0, submit.priority_class, checksum)
            request = self._from_outside(request, submit, model, digest, submit.num_ended_tokens)
        if self._kv_share_of is not None and (share := self._kv_share_of(tenant)) is not None:
            request = msgspec.structs.replace(request, kv_share=share)
        if self._classes or submit.priority_class or submit.fairness_id or scope.access is not None:
            request = self._with_class(request, submit, scope.access)
        if self._meters_usage:
            request = _metered(request, submit.num_ended_tokens, scope, submit.num_foreign_tokens)
            request = _with_reasoning(request, model, submit.num_ended_reasoning_tokens, scope)
        if self._keeps_answers:
            request = self._kept(request, submit, model)
        if submit.has_fallback_model:
            request = msgspec.structs.replace(request, has_fallback_model=True)
        if model is None:
            found = self._adapter_named(request.model)
            return request if found is None else _with_adapter(request, *found, submit.adapter_checksum)
        if model.adapter is None:
            return request
        return _with_adapter(request, model.base_name, model.adapter, submit.adapter_checksum)

    def fleet_shown(self, fleet: FleetState, scope: CallerScope) -> FleetState:
        """The models and adapters that a caller may use. Raises KvloomError (UNAUTHENTICATED)."""
        access = scope.access
        if access is None:
            return fleet
        shown = FleetState(draining=fleet.draining, reads_packed_token_ids=fleet.reads_packed_token_ids)
        adapters = [full_name(model.name, one.name) for model in fleet.models for one in model.adapters]
        names_by_model: dict[str, list[str]] = {}
        for name, model in self._models.items():
            names_by_model.setdefault(model.name, []).append(name)
        usable = {
            own
            for own in (*(model.name for model in fleet.models), *adapters)
            if any(True for _ in access.usable(names_by_model.get(own, (own,)), self._models))
        }
        for model in fleet.models:
            shown_adapters = [one for one in model.adapters if full_name(model.name, one.name) in usable]
            if shown_adapters or model.name in usable:
                shown.models.add().CopyFrom(model)
                del shown.models[-1].adapters[:]
                shown.models[-1].adapters.extend(shown_adapters)
        return shown

    async def accept_generate(
        self,
        wanted: GenerateRequest,
        client_id: str,
        traceparent: str = "",
        scope: CallerScope = TRUSTED,
        client_request_id: str = "",
    ) -> AcceptedGenerate:
        """Returns the request of a `Generate`; the slots of its choices are their indexes. Raises KvloomError."""
        check_num_choices(wanted.n or 1)
        _check_names(request_id=wanted.request_id, traceparent=traceparent, session_key=wanted.session_key)
        check_sampling(wanted.sampling, "sampling.")
        check_stop(wanted.stop, "stop.")
        tenant = scope.tenant("")
        cache_salt = self._cache_salt(tenant)
        tier = _tier(wanted.tier)
        prefers_others = self._prefers_others
        model, chosen = choose_model(
            wanted,
            self._models,
            self._routes,
            self._has_ready_shard,
            tenant,
            scope.access,
            None if prefers_others is None else lambda name: prefers_others(name, tier),
        )
        if model is None:
            raise self._model_not_found(wanted.model)
        choices = wanted_choices(wanted, model.tokenizer, self._max_prompt_tokens)
        is_embedding = wanted.HasField("pooling")
        sampling = _with_seed(wanted.sampling, model)
        stop = _copied(wanted.stop)
        plan, parser = NO_TOOLS, None
        if wanted.WhichOneof("input") == "conversation":
            if is_embedding:
                raise invalid_argument("An embedding is one of text or token_ids, not of a conversation.", "pooling")
            plan = self._tool_plan(wanted, model, sampling)
            token_ids, text, parser = await self._tokenized_conversation(
                wanted, model, plan, sampling, stop, cache_salt
            )
        else:
            check_only_for_conversations(wanted)
            token_ids, text = await self._tokenized(wanted, model, cache_salt, add_special_tokens=is_embedding)
        check_prompt_logprobs(wanted.sampling, len(token_ids), wanted.n or 1)
        if wanted.predicted_text:
            sampling.predicted_token_ids.extend(await self._predicted_token_ids(wanted, model, cache_salt))
        given_id = wanted.request_id or new_request_id()
        request = Request(
            request_id=scope.request_id(given_id),
            client_id=client_id,
            model=model.name,
            prompt_token_ids=token_ids,
            prompt_text=text,
            choices=choices,
            max_tokens=_max_tokens(wanted.stop, model),
            sampling=sampling,
            stop=stop,
            timeout_seconds=_checked_timeout(wanted.timeout_seconds),
            tier=tier,
            tenant=tenant,
            key_id=scope.key_id,
            cache_salt=cache_salt,
            traceparent=traceparent,
            session_key=wanted.session_key,
            client_request_id=client_request_id,
            max_cached_tokens=max_cached_tokens(sampling),
        )
        if scope is not TRUSTED:
            checksum = wanted.adapter_checksum or _adapter_checksum(model)
            digest = digest_of(request, wanted.n or 1, wanted.priority_class, checksum)
            request = self._from_outside(request, wanted, model, digest, _num_ended_tokens(wanted))
        if self._kv_share_of is not None and (share := self._kv_share_of(tenant)) is not None:
            request = msgspec.structs.replace(request, kv_share=share)
        if self._classes or wanted.priority_class or wanted.fairness_id or scope.access is not None:
            request = self._with_class(request, wanted, scope.access)
        if self._meters_usage:
            request = _with_reasoning(_metered(request, _num_ended_tokens(wanted), scope), model, 0, scope)
        if self._keeps_answers:
            request = self._kept(request, wanted, model)
        if wanted.HasField("objectives"):
            request = with_objectives(request, wanted.objectives, scope)
        if is_embedding:
            request = _embedding(request, wanted.pooling)
        if model.adapter is not None:
            request = _with_adapter(request, model.base_name, model.adapter, wanted.adapter_checksum)
        output = None
        if parser is not None:
            output = ParsedOutput(given_id, parser, [ToolSchema(tool.name, tool.parameters) for tool in plan.tools])
            output.restore(choices, model.tokenizer, sampling.shown_special_token_ids)
        guide_field = GUIDE_FIELD if plan.guide is None or wanted.sampling.HasField("guide") else "tools"
        return AcceptedGenerate(request, output, guide_field, chosen)

    def _from_outside(
        self, request: Request, wanted: Submit | GenerateRequest, model: ServedModel | None, digest: str, num_ended: int
    ) -> Request:
        """The request of a client outside the fabric, of which no more is believed than its ticket proves. `digest`:
        see `digest_of`; `num_ended`: how many tokens it says that other choices of its answer have. Raises
        KvloomError."""
        tickets = self._tickets
        answer_id = secrets.token_hex(8) if self._meters_usage else ""
        if tickets is None:
            request = self._with_claims(request, model, answer_id) if request.has_output else request
            return msgspec.structs.replace(request, answer_id=answer_id)
        if request.has_output or num_ended:
            is_alone = isinstance(wanted, GenerateRequest)
            ticket = tickets.redeem(wanted.continuation_ticket, digest, request, is_alone=is_alone)
            if ticket is None:
                return self._with_claims(request, model, answer_id)
            # What its earlier output is, only the client says: it is screened as a prompt.
            return msgspec.structs.replace(
                request,
                answer_id=ticket.answer_id,
                num_ended_tokens=num_ended,
                most_cached_tokens=ticket.num_cached_tokens,
                prompt_text=self._text_with_claims(request, model),
            )
        return msgspec.structs.replace(
            request, answer_id=answer_id, issue_ticket=partial(tickets.issue, digest, answer_id)
        )

    def _with_class(
        self, request: Request, wanted: Submit | LinkRequest | GenerateRequest, access: CallerAccess | None
    ) -> Request:
        """Raises KvloomError (INVALID_ARGUMENT, PERMISSION_DENIED)."""
        _check_names(fairness_id=wanted.fairness_id)
        name, known = wanted.priority_class, self._classes or _BUILT_IN
        if access is not None:
            name = access.class_of(name, CLASS_OF_TIER[request.tier].name, "priority_class")
            if not (self._classes or name or wanted.fairness_id):
                return request
        found = known.get(name or CLASS_OF_TIER[request.tier].name)
        if found is None and request.is_continued:
            found = known[CLASS_OF_TIER[request.tier].name]  # it began where the class was declared
        if found is None or name == SHADOW.name:
            raise invalid_argument(f"priority_class: there is no class {name[:64]!r}.", "priority_class")
        return msgspec.structs.replace(request, priority_class=found, fairness_id=wanted.fairness_id)

    def _kept(
        self, request: Request, wanted: Submit | LinkRequest | GenerateRequest, model: ServedModel | None
    ) -> Request:
        """The request, with whether its answer may be cached, and whether it gets a receipt."""
        is_new = not request.has_output
        is_cacheable = (
            self._caches_results and is_new and not wanted.no_result_cache and _is_deterministic(wanted, request, model)
        )
        wants_receipt = self._gives_receipts and is_new and wanted.receipt
        if not (is_cacheable or wants_receipt):
            return request
        return msgspec.structs.replace(request, is_cacheable=is_cacheable, wants_receipt=wants_receipt)

    async def _tokenized(
        self, wanted: GenerateRequest, model: ServedModel, cache_salt: str, *, add_special_tokens: bool
    ) -> tuple[Sequence[int], str]:
        """Returns (token ids, text for the safety service) of a prompt that is no conversation."""
        match wanted.WhichOneof("input"):
            case "text":
                if not wanted.text:
                    raise invalid_argument("text must not be empty.", "text")
                self._check_text_size(wanted.text, "text")
                token_ids = await model.tokenizer.encode(
                    wanted.text, scope=cache_salt, add_special_tokens=add_special_tokens
                )
                self._check_prompt(token_ids, model, "text")
                return token_ids, wanted.text
            case "token_ids":
                token_ids = wanted.token_ids.ids[:]
                self._check_prompt(token_ids, model, "token_ids.ids")
                return token_ids, self._text_for_screening(token_ids, model, wanted.model)
            case _:
                raise invalid_argument("One of text, conversation and token_ids is required.", "input")

    async def _predicted_token_ids(self, wanted: GenerateRequest, model: ServedModel, cache_salt: str) -> Sequence[int]:
        if wanted.sampling.predicted_token_ids:
            raise invalid_argument(
                "predicted_text and sampling.predicted_token_ids exclude each other.", "predicted_text"
            )
        self._check_text_size(wanted.predicted_text, "predicted_text")
        token_ids = await model.tokenizer.encode(wanted.predicted_text, scope=cache_salt)
        return token_ids[:MAX_PREDICTED_TOKENS]

    def _tool_plan(self, wanted: GenerateRequest, model: ServedModel, sampling: SamplingParams) -> ToolPlan:
        """Plans what the tools mean for the model. `sampling` gets the guide that they need, if any."""
        has_reasoning = model.output is not None and model.output.reasoning
        if not (wanted.tools or wanted.HasField("tool_choice") or has_reasoning):
            return NO_TOOLS
        tools, choice = wanted_tools(wanted)
        place = ToolPlace(at="")
        plan = plan_tools(tools, choice, is_parallel=wanted.parallel_tool_calls, model=model.output, place=place)
        if plan.demands_call and sampling.HasField("guide"):
            raise invalid_argument("tool_choice demands a call, which has no room for another form.", GUIDE_FIELD)
        if plan.guide is not None and not sampling.HasField("guide"):
            # With a guide of the caller's own, the answer has another form, and so no calls.
            check_guide(plan.guide, "tools")
            sampling.guide.CopyFrom(plan.guide)
        return plan

    async def _tokenized_conversation(
        self,
        wanted: GenerateRequest,
        model: ServedModel,
        plan: ToolPlan,
        sampling: SamplingParams,
        stop: StopConditions,
        cache_salt: str,
    ) -> tuple[Sequence[int], str, ParserSpec | None]:
        """Returns (token ids, text for the safety service, parser of the answer). `sampling` and `stop` then fit the
        parser."""
        messages = wanted_messages(wanted)
        options = template_options(wanted)
        text = screened_text(messages, plan.tools)
        self._check_text_size(text, MESSAGES)
        try:
            token_ids, rendered = await conversation_prompt(
                model.tokenizer, messages, plan.tools, options, scope=cache_salt
            )
        except KvloomError as error:
            raise conversation_error(error) from error
        self._check_prompt(token_ids, model, MESSAGES)
        parser = prompted(plan.parser, rendered)
        fit_to_parser(sampling, stop, parser, model.tokenizer)
        return token_ids, text, parser

    def _check_prompt(self, token_ids: Sequence[int], model: ServedModel | None, field: str) -> None:
        if not token_ids:
            raise invalid_argument(f"{field} must not be empty.", field)
        if len(token_ids) > self._max_tokens_now:
            if len(token_ids) <= self._max_prompt_tokens:
                raise memory_error()
            raise KvloomError(
                ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE,
                f"The prompt has {len(token_ids)} tokens; at most {self._max_prompt_tokens} are allowed.",
                field=field,
            )
        # The vocabularies of models without a card are not known here; their shards check the ids.
        if model is not None and not _are_below(token_ids, model.tokenizer.vocab_size):
            raise invalid_argument(
                f"{field} holds {max(token_ids)}, but ids of this model are below {model.tokenizer.vocab_size}.", field
            )

    def _check_text_size(self, text: str, field: str) -> None:
        self._check_num_chars(len(text), field)

    def _check_num_chars(self, num_chars: int, field: str) -> None:
        if num_chars > self._max_chars_now:
            limit = self._max_prompt_tokens * MAX_CHARS_PER_TOKEN
            if num_chars <= limit:
                raise memory_error()
            raise KvloomError(
                ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE,
                f"{field} has {num_chars} characters; at most {limit} are allowed.",
                field=field,
            )

    def _with_claims(self, request: Request, model: ServedModel | None, answer_id: str) -> Request:
        """The request of a client outside the fabric, whose choices have output: it counts, and is screened, as a part
        of the prompt. Raises KvloomError."""
        num_claimed = sum(len(choice.output_token_ids) for choice in request.choices)
        text = self._text_with_claims(request, model)
        return msgspec.structs.replace(request, num_claimed_tokens=num_claimed, prompt_text=text, answer_id=answer_id)

    def _text_with_claims(self, request: Request, model: ServedModel | None) -> str:
        outputs = [choice.output_token_ids for choice in request.choices if choice.output_token_ids]
        texts = [request.prompt_text, *(self._text_for_screening(ids, model, request.model) for ids in outputs)]
        return "\n".join(filter(None, texts))

    def _screened(self, text: str, token_ids: Sequence[int], model: ServedModel | None, name: str) -> str:
        """The text for the safety service of a prompt of tokens. Processes of the fabric send the text of which they
        are made; that of others could be another one."""
        return self._text_for_screening(token_ids, model, name) if self._needs_prompt_text() else text

    def _text_for_screening(self, token_ids: Sequence[int], model: ServedModel | None, name: str) -> str:
        """Decodes the tokens of a client that sent no text, so that leaving it out does not bypass the safety check.
        Returns "" when prompts are not screened."""
        if not self._needs_prompt_text():
            return ""
        if model is None:
            raise self._model_not_found(name)
        return model.tokenizer.decode(token_ids)

    def _model_not_found(self, model: str) -> KvloomError:
        if not model:
            return invalid_argument("model is required.", "model")
        message = (
            f"The model {model[:MAX_NAME_CHARS]!r} does not exist here; this router serves {self._named_models()}."
        )
        if any(model.startswith(f"{name}:") for name in self._models):
            message = unknown_name(model, adapters_by_model(self._models.values()))
        return KvloomError(ErrorReason.ERROR_REASON_MODEL_NOT_FOUND, message, field="model")

    def _named_models(self) -> str:
        own = (name for name, model in self._models.items() if model.adapter is None)
        names = [repr(name) for name in itertools.islice(own, MAX_NAMED_MODELS + 1)]
        return ", ".join(names[:MAX_NAMED_MODELS]) + (", and others" if len(names) > MAX_NAMED_MODELS else "") or "none"


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


def with_objectives(request: Request, wanted: WantedObjectives, scope: CallerScope = TRUSTED) -> Request:
    """That a router has admitted the request before is for processes of the fabric to say. Raises KvloomError
    (INVALID_ARGUMENT)."""
    check_objectives(wanted)
    objectives = convert.objectives_from_proto(wanted)
    if objectives.is_admitted and scope is not TRUSTED:
        objectives = msgspec.structs.replace(objectives, is_admitted=False)
    return msgspec.structs.replace(request, objectives=objectives)


def within_deadline(request: Request, seconds: float) -> Request:
    """The request, whose caller waits for so long and no longer."""
    objectives = request.objectives or Objectives()
    deadline_seconds = objectives.elapsed_seconds + max(seconds, 0.0)
    if objectives.deadline_seconds is not None:
        deadline_seconds = min(deadline_seconds, objectives.deadline_seconds)
    objectives = msgspec.structs.replace(objectives, deadline_seconds=deadline_seconds)
    return msgspec.structs.replace(request, objectives=objectives)


def seed_of(request: Request) -> int:
    """Returns the seed that the client gave or the intake drew."""
    assert isinstance(request.sampling, SamplingParams)
    return request.sampling.seed


def _prompt_of(submit: Submit) -> Sequence[int]:
    if not submit.packed_prompt_token_ids:
        return submit.prompt_token_ids[:]
    try:
        return unpack_token_ids(submit.packed_prompt_token_ids)
    except ValueError as error:
        field = "packed_prompt_token_ids"
        raise invalid_argument(f"{field} is truncated: every id has four bytes.", field) from error


def _adapter_checksum(model: ServedModel | None) -> str:
    return "" if model is None or model.adapter is None else model.adapter.checksum


def _num_ended_tokens(wanted: GenerateRequest) -> int:
    return sum(len(choice.token_ids) for choice in wanted.partial_choices if choice.done)


def _check_choices(submit: Submit) -> None:
    if len(submit.choices) == 1 and submit.choices[0].index < MAX_CHOICES:
        return  # as nearly always
    check_num_choices(len(submit.choices), "choices")
    indexes = {choice.index for choice in submit.choices}
    if len(indexes) < len(submit.choices):
        raise invalid_argument("choices must have different indexes.", "choices")
    if max(indexes) >= MAX_CHOICES:
        raise invalid_argument(f"An index of choices must be below {MAX_CHOICES}.", "choices")


def _embedding(request: Request, pooling: Pooling) -> Request:
    """The request, for its prompt's embedding and no tokens. Raises KvloomError."""
    if len(request.choices) != 1 or request.choices[0].output_token_ids:
        raise invalid_argument("An embedding has one choice, without output tokens.", "choices")
    if pooling.kind not in PoolingKind.values():  # The enum is open, so any number can arrive.
        raise invalid_argument(f"pooling.kind has no value {pooling.kind}.", "pooling.kind")
    # A copy: the original would keep its whole frame in memory.
    wanted = Pooling(kind=pooling.kind, raw_length=pooling.raw_length)
    return msgspec.structs.replace(request, max_tokens=0, pooling=wanted)


def _with_adapter(request: Request, model: str, adapter: Adapter, checksum: str) -> Request:
    """The request, for an adapter of that model. `checksum` is that of the adapter with which the answer began, if it
    was. Raises KvloomError."""
    if request.pooling is not None:
        raise unsupported("An embedding is that of a model alone, not of an adapter: name the model.", "model")
    if checksum:
        _check_names(adapter_checksum=checksum)
        adapter = adapter._replace(checksum=checksum)
    return msgspec.structs.replace(request, model=sys.intern(model), adapter=adapter)


def _metered(request: Request, num_ended_tokens: int, scope: CallerScope, num_foreign_tokens: int = 0) -> Request:
    """With what usage records need. What a client outside the fabric says of its answer changes none of it."""
    if scope is not TRUSTED:
        return request
    if num_ended_tokens:
        request = msgspec.structs.replace(request, num_ended_tokens=num_ended_tokens)
    if num_foreign_tokens:
        num_given = sum(len(choice.output_token_ids) for choice in request.choices)
        request = msgspec.structs.replace(request, num_foreign_tokens=min(num_foreign_tokens, num_given))
    return request


def _with_reasoning(
    request: Request, model: ServedModel | None, num_ended_reasoning_tokens: int, scope: CallerScope
) -> Request:
    """With what counts its tokens of reasoning. An answer whose form a guide dictates has none."""
    spec = None if model is None else model.output
    sampling = request.sampling
    is_guided = isinstance(sampling, SamplingParams) and sampling.HasField("guide")
    if model is None or spec is None or not spec.reasoning or is_guided:
        return request
    # Only here, because most models write none.
    from kvloom_common.conversation.reasoning_tokens import ReasoningCounter

    num_ended = min(num_ended_reasoning_tokens, request.num_ended_tokens) if scope is TRUSTED else 0
    counter = ReasoningCounter(spec, model.tokenizer, request.prompt_token_ids)
    return msgspec.structs.replace(request, num_ended_reasoning_tokens=num_ended, count_reasoning=counter)


def _check_names(**names: str) -> None:
    """Raises KvloomError for the first name that is too long; keywords are field names."""
    if max(map(len, names.values())) <= MAX_NAME_CHARS:
        return
    for field, value in names.items():
        if len(value) > MAX_NAME_CHARS:
            raise invalid_argument(f"{field} has {len(value)} characters; at most {MAX_NAME_CHARS} are allowed.", field)


def _are_below(token_ids: Sequence[int], limit: int) -> bool:
    return are_below(token_ids, limit) if isinstance(token_ids, array) else max(token_ids) < limit


def _tier(tier: int) -> Tier:
    if tier not in _TIERS:  # The enum is open, so any number can arrive.
        raise invalid_argument(f"tier has no value {tier}.", "tier")
    return _TIERS[tier]


def _checked_timeout(timeout_seconds: float) -> float:
    if not math.isfinite(timeout_seconds) or timeout_seconds < 0:
        raise invalid_argument("timeout_seconds must not be negative.", "timeout_seconds")
    return timeout_seconds


def _max_tokens(stop: StopConditions, model: ServedModel | None) -> int | None:
    if stop.HasField("max_tokens"):
        return stop.max_tokens
    return None if model is None else model.default_max_tokens


def _with_seed(sampling: SamplingParams, model: ServedModel | None) -> SamplingParams:
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


def _is_deterministic(
    wanted: Submit | LinkRequest | GenerateRequest, request: Request, model: ServedModel | None
) -> bool:
    """True when nothing was drawn for the request, and its answer consists of tokens only (or of a vector)."""
    sampling = request.sampling
    assert isinstance(sampling, SamplingParams)
    if sampling.HasField("logprobs") or sampling.HasField("prompt_logprobs"):
        return False
    if _has_pooling(wanted) or is_greedy(sampling):
        return True
    defaults = None if model is None else model.default_sampling
    return (wanted.sampling.HasField("seed") and not wanted.seed_is_drawn) or (
        defaults is not None and defaults.HasField("seed")
    )


def _has_pooling(wanted: Submit | LinkRequest | GenerateRequest) -> bool:
    return wanted.pooling is not None if isinstance(wanted, LinkRequest) else wanted.HasField("pooling")


def _copied(stop: StopConditions) -> StopConditions:
    copy = StopConditions()
    copy.CopyFrom(stop)
    return copy
