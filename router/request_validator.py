"""Turns the requests that clients send into the core's `Request`: checked, tokenized and with a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from kvloom.adapters import Adapter, full_name
from kvloom.errors import KvloomError, invalid_argument, unsupported
from kvloom.guide import GUIDE_FIELD, check_guide
from kvloom.router_link.link import LinkRequest
from kvloom.sampling import (
    MAX_CHOICES,
    MAX_PREDICTED_TOKENS,
    check_num_choices,
    check_prompt_logprobs,
    check_sampling,
    check_stop,
)
from kvloom.text.token_ids import unpack_token_ids
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from kvloom.v1.router_service_pb2 import FleetState, GenerateRequest, Submit
from kvloom_common.access.kv_shares import CacheSalts
from kvloom_common.conversation.call_guide import ToolPlace
from kvloom_common.conversation.model_output import fit_to_parser, output_form, prompted
from kvloom_common.conversation.prompt import conversation_prompt, num_written_chars
from kvloom_common.conversation.tool_plan import ToolPlan, plan_tools
from kvloom_common.kv_share import KvShare
from kvloom_common.models.model_routes import NO_ROUTES, ChosenRoute, ModelRoutes
from kvloom_common.models.served_model import ServedModel
from kvloom_common.parsers.spec import ParserSpec, ToolSchema
from kvloom_common.text.prompt_images import words_of
from router import convert
from router.caller_scope import TRUSTED, CallerScope
from router.continuation_tickets import ContinuationTickets
from router.conversation_intake import (
    MESSAGES,
    check_only_for_conversations,
    conversation_error,
    template_options,
    wanted_messages,
    wanted_tools,
)
from router.core.events import ChoiceSpec, Request, TierRank
from router.core.priority_classes import PriorityClass
from router.model_choice import choose_model
from router.parsed_output import ParsedOutput
from router.partial_choices import wanted_choices
from router.prompt_checks import PromptChecks
from router.request_builder import (
    NO_CLASSES,
    NO_SALTS,
    RequestBuilder,
    check_names,
    copied,
    new_request_id,
    tier_of,
    with_seed,
)

NO_TOOLS: Final = ToolPlan()


class PreparedRequest(NamedTuple):
    """The request that the intake has made of a `Generate`, and how its answer is to be written."""

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


class RequestValidator:
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
        check_residency: Callable[[str], None] | None = None,
        guardrails_of: Callable[[str], Sequence[str]] | None = None,
        *,
        meters_usage: bool = False,
        caches_results: bool = False,
        gives_receipts: bool = False,
        holds_calls: bool = False,
        classes: Mapping[str, PriorityClass] = NO_CLASSES,
        prefers_others: Callable[[str, TierRank], bool] | None = None,
        tickets: ContinuationTickets | None = None,
    ) -> None:
        """`models`: by name and alias, and with adapters; they may come and go. `adapter_named` also finds the adapters
        of models without a card, with their models. `kv_share_of` gives the guaranteed share of a caller; None: there
        are none. `check_residency` raises KvloomError for a tenant whose requests may not be computed here; None: all
        may. `guardrails_of` gives the rules that a tenant has chosen; None: there are none. `meters_usage`: requests
        get what usage records need. `holds_calls`: answers are gated. `classes`: those that are declared, with the
        built-in ones. `prefers_others`: whether a model is to be passed by requests
        that may have another; None: none is. `tickets`: of answers of clients outside the fabric; None: there are no
        such clients."""
        self._models = models
        self._routes = routes
        self._has_ready_shard = has_ready_shard
        self._prefers_others = prefers_others
        self._checks = PromptChecks(models, max_prompt_tokens, needs_prompt_text)
        self._builder = RequestBuilder(
            self._checks,
            adapter_named,
            cache_salts,
            kv_share_of,
            check_residency,
            guardrails_of,
            meters_usage=meters_usage,
            caches_results=caches_results,
            gives_receipts=gives_receipts,
            holds_calls=holds_calls,
            classes=classes,
            tickets=tickets,
        )
        self.on_memory_level = self._checks.on_memory_level

    def request_from_submit(self, submit: Submit, client_id: str, scope: CallerScope = TRUSTED) -> Request:
        """Returns a request that arrived over a client's stream. Raises KvloomError."""
        _check_choices(submit)
        choices = convert.choices_from_proto(list(submit.choices))
        return self._request_of_tokens(submit, _prompt_of(submit), choices, client_id, scope)

    def request_from_link(self, request: LinkRequest, choices: Sequence[ChoiceSpec], client_id: str) -> Request:
        """Returns a request that was made in this process. Raises KvloomError."""
        check_num_choices(len(choices), "choices")
        return self._request_of_tokens(request.submit, request.prompt_token_ids, choices, client_id)

    def _request_of_tokens(
        self,
        submit: Submit,
        token_ids: Sequence[int],
        choices: Sequence[ChoiceSpec],
        client_id: str,
        scope: CallerScope = TRUSTED,
    ) -> Request:
        wanted = submit.request
        name, sampling = wanted.model, wanted.sampling
        check_names(
            request_id=wanted.request_id,
            tenant=submit.tenant,
            traceparent=submit.traceparent,
            session_key=wanted.session_key,
            client_request_id=submit.client_request_id,
        )
        check_sampling(sampling, "sampling.")
        check_stop(wanted.stop, "stop.")
        if scope.access is not None:
            scope.access.check_models((name,), self._models)
        model = self._models.get(name)
        words = self._words(token_ids, wanted, is_trusted=scope is TRUSTED) if wanted.images else token_ids
        self._checks.check_tokens(token_ids, model, "prompt_token_ids", words)
        check_prompt_logprobs(sampling, len(token_ids), len(choices))
        text = submit.prompt_text  # It is read only once because every access decodes it.
        self._checks.check_num_chars(len(text), "prompt_text")
        if not text or scope is not TRUSTED:
            # Processes of the fabric send the text of which the tokens are made; that of others could be another one.
            text = self._checks.screened(words, model, name) if self._checks.needs_text() else text
        own, stop = with_seed(sampling, model), copied(wanted.stop)
        return self._builder.build(submit, wanted, (token_ids, text), choices, client_id, model, own, stop, scope)

    def fleet_shown(self, fleet: FleetState, scope: CallerScope) -> FleetState:
        """The models and adapters that a caller may use. Raises KvloomError (UNAUTHENTICATED)."""
        access = scope.access
        if access is None:
            return fleet
        shown = FleetState()
        shown.CopyFrom(fleet)
        shown.ClearField("models")
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
        tenant: str = "",
    ) -> PreparedRequest:
        """Returns the request of a `Generate`; the slots of its choices are their indexes. `tenant`: whose it is, if
        its scope believes that. Raises KvloomError."""
        check_num_choices(wanted.n or 1)
        check_names(request_id=wanted.request_id, traceparent=traceparent, session_key=wanted.session_key)
        check_sampling(wanted.sampling, "sampling.")
        check_stop(wanted.stop, "stop.")
        tenant = scope.tenant(tenant)
        cache_salt = self._builder.cache_salt(tenant)
        tier = tier_of(wanted)
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
            raise self._checks.model_not_found(wanted.model)
        choices = wanted_choices(wanted, model.tokenizer, self._checks.max_prompt_tokens)
        is_embedding = wanted.HasField("pooling")
        sampling = with_seed(wanted.sampling, model)
        stop = copied(wanted.stop)
        plan, parser = NO_TOOLS, None
        if wanted.images and wanted.WhichOneof("input") != "token_ids":
            raise invalid_argument("images go only with token_ids, which have their tokens.", "images")
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
        given_id = wanted.request_id = wanted.request_id or new_request_id()
        said = Submit(
            tenant=tenant,
            traceparent=traceparent,
            client_request_id=client_request_id,
            num_ended_tokens=sum(len(choice.token_ids) for choice in wanted.partial_choices if choice.done),
            output_form=output_form(parser, plan.tools),
        )
        prompt, num_choices = (token_ids, text), wanted.n or 1
        request = self._builder.build(
            said, wanted, prompt, choices, client_id, model, sampling, stop, scope, num_choices
        )
        output = None
        if parser is not None:
            output = ParsedOutput(given_id, parser, [ToolSchema(tool.name, tool.parameters) for tool in plan.tools])
            output.restore(choices, model.tokenizer, sampling.shown_special_token_ids)
        guide_field = GUIDE_FIELD if plan.guide is None or wanted.sampling.HasField("guide") else "tools"
        return PreparedRequest(request, output, guide_field, chosen)

    async def _tokenized(
        self, wanted: GenerateRequest, model: ServedModel, cache_salt: str, *, add_special_tokens: bool
    ) -> tuple[Sequence[int], str]:
        """Returns (token ids, text for the safety service) of a prompt that is no conversation."""
        match wanted.WhichOneof("input"):
            case "text":
                if not wanted.text:
                    raise invalid_argument("text must not be empty.", "text")
                self._checks.check_num_chars(len(wanted.text), "text")
                token_ids = await model.tokenizer.encode(
                    wanted.text, scope=cache_salt, add_special_tokens=add_special_tokens
                )
                self._checks.check_tokens(token_ids, model, "text")
                return token_ids, wanted.text
            case "token_ids":
                token_ids = wanted.token_ids.ids[:]
                words = self._words(token_ids, wanted, is_trusted=False) if wanted.images else token_ids
                self._checks.check_tokens(token_ids, model, "token_ids.ids", words)
                return token_ids, self._checks.screened(words, model, wanted.model)
            case _:
                raise invalid_argument("One of text, conversation and token_ids is required.", "input")

    def _words(self, token_ids: Sequence[int], wanted: GenerateRequest, *, is_trusted: bool) -> Sequence[int]:
        """The tokens of a prompt with images that stand for none; see `words_of`. Raises KvloomError."""
        self._checks.check_images(wanted.images)
        if wanted.sampling.HasField("prompt_logprobs"):
            field = "sampling.prompt_logprobs"
            raise unsupported(f"{field}: the tokens of images have no log-probabilities.", field)
        return words_of(token_ids, wanted.images, is_trusted=is_trusted)

    async def _predicted_token_ids(self, wanted: GenerateRequest, model: ServedModel, cache_salt: str) -> Sequence[int]:
        if wanted.sampling.predicted_token_ids:
            raise invalid_argument(
                "predicted_text and sampling.predicted_token_ids exclude each other.", "predicted_text"
            )
        self._checks.check_num_chars(len(wanted.predicted_text), "predicted_text")
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
        self._checks.check_num_chars(num_written_chars(messages, plan.tools), MESSAGES)
        try:
            token_ids, rendered = await conversation_prompt(
                model.tokenizer, messages, plan.tools, options, scope=cache_salt
            )
        except KvloomError as error:
            raise conversation_error(error) from error
        self._checks.check_tokens(token_ids, model, MESSAGES)
        parser = prompted(plan.parser, rendered)
        fit_to_parser(sampling, stop, parser, model.tokenizer)
        return token_ids, rendered, parser


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


def _check_choices(submit: Submit) -> None:
    if len(submit.choices) == 1 and submit.choices[0].index < MAX_CHOICES:
        return  # as nearly always
    check_num_choices(len(submit.choices), "choices")
    indexes = {choice.index for choice in submit.choices}
    if len(indexes) < len(submit.choices):
        raise invalid_argument("choices must have different indexes.", "choices")
    if max(indexes) >= MAX_CHOICES:
        raise invalid_argument(f"An index of choices must be below {MAX_CHOICES}.", "choices")
