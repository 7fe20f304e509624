"""The options of a request as an SDK caller writes them, checked and turned into the wire's message."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Required, TypedDict

from google.protobuf.message import Message

from kvloom.client.conversation_options import set_conversation
from kvloom.conversation.tools import Tool
from kvloom.enums import Tier
from kvloom.errors import KvloomError, invalid_argument
from kvloom.objectives import OBJECTIVE_NAMES, check_objectives
from kvloom.request_fields import flat_field
from kvloom.sampling import check_num_choices, check_sampling, check_stop
from kvloom.text.chat_message import ChatMessage
from kvloom.v1 import router_service_pb2
from kvloom.v1.generation_pb2 import Guide


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `Client.generate` and `Client.plan`. Exactly one of `messages`, `text` and `token_ids`
    must be given; an option that is None counts as not given."""

    model: Required[str]
    messages: Sequence[ChatMessage | Mapping[str, Any]]
    """A conversation, which the router renders with the model's chat template. Mappings have OpenAI's shape: "role" and
    "content", and "tool_calls" or "tool_call_id" where tools were called."""
    text: str
    """A prompt that the router tokenizes unchanged."""
    token_ids: Sequence[int]
    """A prompt that is tokenized already."""
    tools: Sequence[Tool | Mapping[str, Any]]
    """The tools that the model may call: `Tool`s, or mappings in OpenAI's shape. Like the next three, only with
    `messages`."""
    tool_choice: Literal["auto", "none", "required"] | Mapping[str, Any]
    """Says if the model may or must call tools. A mapping {"name": ...}, or OpenAI's, names the tool to call. Default
    auto."""
    parallel_tool_calls: bool
    """With tool_choice "required": several calls are wanted, not one."""
    template_options: Mapping[str, Any]
    """Further variables of the chat template, e.g. {"enable_thinking": False}."""
    max_tokens: int
    temperature: float
    """0 to 2; default 1. 0 is greedy."""
    top_p: float
    """Above 0, at most 1; default 1."""
    top_k: int
    seed: int
    """Requests with the same seed draw the same random numbers. By default a random one is drawn."""
    presence_penalty: float
    """-2 to 2."""
    frequency_penalty: float
    """-2 to 2."""
    repetition_penalty: float
    """0.01 to 100; default 1. Penalises tokens of the prompt and of the answer."""
    min_p: float
    """0 to 1; default 0. Tokens less likely than this fraction of the likeliest one's probability are not sampled."""
    logit_bias: Mapping[int, float]
    """Maps up to 1024 token ids to a number, -100 to 100, that is added to their logits."""
    guide: Mapping[str, Any]
    """The form that the answer must have: one of json_object (True), json_schema (a mapping or text), regex, choice
    (texts) and grammar (see Guide in protos/kvloom/v1/generation.proto)."""
    prediction: str | Sequence[int]
    """The text of which the answer is expected to consist, or its tokens. It makes the answer faster where it is right,
    and never changes it. A text goes only with `messages` and `text`."""
    logprobs: int
    """How many of the likeliest tokens to report beside the chosen one (0 to 20)."""
    prompt_logprobs: int
    """The same for the tokens of the prompt but the first. They are in `Delta.start`; the prompt is computed again."""
    prompt_logprobs_start: int
    """The position of the first token in the prompt of which `prompt_logprobs` reports; default 0. What lies before it
    may come from the prefix cache, so an answer is scored cheaply as the end of a prompt."""
    shown_special_token_ids: Sequence[int]
    """Special tokens whose names appear in the text. The text of the others is empty."""
    stop: str | Sequence[str]
    """The answer ends before the first of these strings: at most 16, of at most 256 characters each."""
    stop_token_ids: Sequence[int]
    """The answer ends at the first of these tokens: at most 64."""
    ignore_eos: bool
    min_tokens: int
    """The answer does not end before it has this many tokens."""
    n: int
    """How many answers to generate (1 to 16); default 1."""
    timeout_seconds: float
    """The time from the request's arrival to its last token. The default is the router's."""
    request_id: str
    """Names the request in logs, in `Client.cancel` and in `Client.explain`. By default a random one is drawn."""
    models: Sequence[str]
    """The models that take the request, in this order, if `model` has no shard that could; at most 8."""
    session_key: str
    """Requests with the same key belong together, e.g. a conversation. A hint for placement, at most 256 characters."""
    tier: Tier | Literal["interactive", "batch"]
    """batch: the request can wait, and is rejected before others under overload. The default is interactive."""
    priority_class: str
    """Its class (docs/concepts/scheduling.md), which decides when it is served. By default that of its tier."""
    fairness_id: str
    """Requests with one id share evenly, with the caller's other ids, what the caller gets. At most 256 characters."""
    deadline_ms: float
    """Milliseconds from the request's arrival to its last token. A request that exceeds it fails, at once if that is
    foreseen (docs/how-to/deadlines.md)."""
    ttft_ms: float
    """Milliseconds to the first token. A request that cannot meet this fails at once; an admitted one never does."""
    tpot_ms: float
    """Mean milliseconds between the tokens after the first. It is only preferred and measured."""
    no_result_cache: bool
    """Neither take the answer from the router's result cache nor keep it there (docs/how-to/result-cache.md)."""
    receipt: bool
    """Ask for a signed receipt (docs/how-to/receipts.md), which is `Answer.receipt`."""
    resumable: bool
    """True makes the answer outlive its connection (docs/reference/grpc-api.md). The default is False."""


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "prompt_logprobs",
    "prompt_logprobs_start",
    "shown_special_token_ids",
)
_STOP = ("max_tokens", "stop_token_ids", "ignore_eos", "min_tokens")
_TOP = (
    "model",
    "n",
    "timeout_seconds",
    "request_id",
    "session_key",
    "text",
    "resumable",
    "no_result_cache",
    "receipt",
    "priority_class",
    "fairness_id",
)
_TIERS = {"interactive": router_service_pb2.TIER_INTERACTIVE, "batch": router_service_pb2.TIER_BATCH}
_INPUTS = ("messages", "text", "token_ids")


def build_request(options: GenerateOptions) -> router_service_pb2.GenerateRequest:
    """The wire's message. Raises KvloomError (INVALID_ARGUMENT) that names the option at fault, and TypeError for
    unknown options."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    unknown = given.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"These options are unknown: {', '.join(sorted(unknown))}.{_guess(unknown)}")
    if given.get("top_k") == -1:  # vLLM's and SGLang's way to say all tokens
        given["top_k"] = 0
    if sum(name in given for name in _INPUTS) != 1:
        raise invalid_argument("Give exactly one of messages, text and token_ids.", "messages")
    request = router_service_pb2.GenerateRequest()
    for name in _TOP:
        _set(request, name, given)
    if "tier" in given:
        if given["tier"] not in _TIERS:
            raise invalid_argument("tier must be interactive or batch.", "tier")
        request.tier = _TIERS[given["tier"]]
    request.models.extend(given.get("models", ()))
    for name in OBJECTIVE_NAMES:
        _set(request.objectives, name, given)
    for name in _SAMPLING:
        _set(request.sampling, name, given)
    if "guide" in given:
        _set_guide(request.sampling.guide, given["guide"])
    for name in _STOP:
        _set(request.stop, name, given)
    stop = given.get("stop", ())
    _set(request.stop, "stop", {"stop": [stop] if isinstance(stop, str) else stop})
    set_conversation(request, given)
    if "token_ids" in given:
        request.token_ids.SetInParent()
        _set(request.token_ids, "ids", {"ids": given["token_ids"]}, field="token_ids")
    if "prediction" in given:
        _set_prediction(request, given["prediction"])
    check_sampling(request.sampling)
    check_stop(request.stop)
    if request.HasField("objectives"):
        check_objectives(request.objectives, "")
    check_num_choices(given.get("n", 1))
    return request


def name_as_option(error: KvloomError, request: router_service_pb2.GenerateRequest) -> KvloomError:
    """Let the error of a router or a shard name the option at fault, as the caller has written it."""
    field = flat_field(error.field)
    given = request.WhichOneof("input") or ""
    if field in ("input", "prompt_token_ids", "token_ids.ids"):
        field = "messages" if given == "conversation" else given
    error.field = field
    return error


def _set(message: Message, name: str, values: Mapping[str, Any], *, field: str = "") -> None:
    if name not in values:
        return
    value = values[name]
    try:
        if isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (AttributeError, TypeError, ValueError) as error:
        raise invalid_argument(f"{field or name} has an unusable value: {error}", field or name) from error


def _guess(unknown: Iterable[str]) -> str:
    near = [difflib.get_close_matches(name, GenerateOptions.__annotations__, 1) for name in sorted(unknown)]
    meant = [names[0] for names in near if names]
    return f" Did you mean {', '.join(meant)}?" if meant else ""


def _set_prediction(request: router_service_pb2.GenerateRequest, prediction: str | Sequence[int]) -> None:
    if not isinstance(prediction, str):
        _set(request.sampling, "predicted_token_ids", {"predicted_token_ids": prediction}, field="prediction")
    elif request.WhichOneof("input") == "token_ids":
        raise invalid_argument("prediction must be token ids where the prompt is.", "prediction")
    else:
        request.predicted_text = prediction


def _set_guide(guide: Guide, form: Mapping[str, Any]) -> None:
    if len(form) != 1:
        raise invalid_argument("guide must hold exactly one form.", "guide")
    [(name, value)] = form.items()
    try:
        if name == "choice":
            guide.choice.texts.extend(value)
        elif name == "json_schema" and not isinstance(value, str):
            guide.json_schema = json.dumps(value, ensure_ascii=False)
        else:
            setattr(guide, name, value)
    except (AttributeError, TypeError, ValueError) as error:
        raise invalid_argument(f"guide has an unusable form: {error}", "guide") from error
