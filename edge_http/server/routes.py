"""The routes of the HTTP API, besides those of administrators: one record for each method of each path."""

from __future__ import annotations

from typing import Any, Final

from edge_http.anthropic.requests import MessagesBody, PromptBody
from edge_http.endpoints.compacting import compact
from edge_http.endpoints.embeddings import embeddings
from edge_http.endpoints.generation import chat_completions, completions
from edge_http.endpoints.guardrail import GuardrailAction, GuardrailBody, guardrail
from edge_http.endpoints.health import health, metrics, metrics_targets, ready, version
from edge_http.endpoints.lora_adapters import load_lora_adapter, unload_lora_adapter
from edge_http.endpoints.messages import count_tokens, messages
from edge_http.endpoints.models import get_model, list_models
from edge_http.endpoints.moderations import moderations
from edge_http.endpoints.page import ADMIN_FILES, DOCS_FILES, PAGE_FILES, PAGE_ROUTES
from edge_http.endpoints.ranking import rerank, score
from edge_http.endpoints.receipts import receipt_keys
from edge_http.endpoints.responses import count_input_tokens, responses
from edge_http.endpoints.resume import cancel_response, resume_stream
from edge_http.endpoints.stored import cancel_stored, get_response
from edge_http.endpoints.tokenization import detokenize, tokenize
from edge_http.endpoints.usage import usage
from edge_http.openai import requests
from edge_http.openai import response_objects as objects
from edge_http.openai.embeddings import EmbeddingsBody
from edge_http.openai.ranking import RerankBody, ScoreBody
from edge_http.openai.responses.requests import CompactBody, StoredResponsesBody
from edge_http.openai.tokenization import DetokenizeBody, LoadAdapterBody, TokenizeBody, UnloadAdapterBody
from edge_http.openapi.parameters import ANTHROPIC_LIMITS, GENERATION, OPENAI_LIMITS
from edge_http.openapi.route import EVENT_STREAM, Handler, Route, Success
from edge_http.sockets.connection import connect
from edge_http.state.routes import STATE_ROUTES
from edge_http.wire.headers import (
    ANTHROPIC_REQUEST_ID,
    BROWNOUT,
    BUDGET_REMAINING,
    CACHE,
    CACHED_TOKENS,
    CONTEXT,
    COST,
    DEADLINE,
    EXPLAIN,
    FAILOVER,
    FAIRNESS_ID,
    FILE_SEARCH,
    IDEMPOTENCY_KEY,
    LAST_EVENT_ID,
    MODEL,
    OBJECTIVE,
    PRIORITY_CLASS,
    REASON,
    RECEIPT,
    REPLAYED,
    REQUEST_ID,
    RESPONSE_ID,
    RESUME,
    ROUTE,
    SHARD,
)

_GENERATION_ERRORS: Final = (404, 409, 410, 429, 500, 502, 503, 504)
_ANTHROPIC_ERRORS: Final = (404, 409, 410, 429, 500, 502, 504, 529)
_EMBEDDING_PARAMETERS: Final = (
    REQUEST_ID,
    "traceparent",
    IDEMPOTENCY_KEY,
    EXPLAIN,
    CACHE,
    RECEIPT,
    PRIORITY_CLASS,
    OBJECTIVE,
    FAIRNESS_ID,
    DEADLINE,
)
_COMMON_HEADERS: Final = (SHARD, CACHED_TOKENS, CACHE, BROWNOUT, MODEL, ROUTE, PRIORITY_CLASS, REPLAYED)
_ANSWER_HEADERS: Final = (*_COMMON_HEADERS, COST, BUDGET_REMAINING, REASON, FAILOVER)
_STATE_HEADERS: Final = (CONTEXT, FILE_SEARCH)
_STREAM_HEADERS: Final = (RESPONSE_ID, RESUME, *_COMMON_HEADERS)
_MESSAGES: Final = [{"role": "user", "content": "What is the capital of France?"}]
_MODEL: Final = "smollm2-135m-instruct"
_WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def _route(
    path: str, method: str, handler: Handler, name: str, tag: str, summary: str, *answers: Success, **more: Any
) -> Route:
    return Route(path=path, method=method, handler=handler, id=name, tag=tag, summary=summary, answers=answers, **more)


def _resumable(
    path: str, name: str, chunk: Any, get: Handler = resume_stream, cancel: Handler = cancel_response, **more: Any
) -> list[Route]:
    """Returns what can be done with a response that `path` has begun."""
    return [
        _route(
            f"{path}/{{id}}", "GET", get, f"resume{name}", "Text", "Resume a stream",
            Success("The events after the last one that the client has.", chunk, EVENT_STREAM, headers=_STREAM_HEADERS),
            Success("There is nothing more: stop asking.", status=204),
            parameters=("stream", "starting_after", LAST_EVENT_ID, REQUEST_ID), errors=(400, 404, 409, 410, 503),
            has_head=False,
            **more,
        ),
        _route(
            f"{path}/{{id}}/cancel", "POST", cancel, f"cancel{name}", "Text", "End a resumable answer",
            Success("The generation has ended.", objects.Cancelled),
            parameters=(REQUEST_ID,), errors=(404, 503), **more,
        ),
    ]  # fmt: skip


ROUTES: Final[tuple[Route, ...]] = (
    _route(
        "/v1/chat/completions", "POST", chat_completions, "createChatCompletion", "Text", "Answer a conversation",
        Success("The answer.", objects.ChatCompletion, headers=_ANSWER_HEADERS),
        Success("With stream: true.", objects.ChatCompletionChunk, EVENT_STREAM, headers=_STREAM_HEADERS),
        body=requests.ChatBody, parameters=GENERATION, errors=_GENERATION_ERRORS, headers=OPENAI_LIMITS,
        examples={
            "Streamed": {"model": _MODEL, "messages": _MESSAGES, "stream": True},
            "Not streamed": {"model": _MODEL, "messages": _MESSAGES, "max_tokens": 64},
            "With a tool": {"model": _MODEL, "messages": _MESSAGES, "tools": [_WEATHER], "tool_choice": "required"},
        },
    ),
    *_resumable("/v1/chat/completions", "ChatCompletion", objects.ChatCompletionChunk, get_response),
    _route(
        "/v1/completions", "POST", completions, "createCompletion", "Text", "Continue a text",
        Success("The continuation.", objects.Completion, headers=_ANSWER_HEADERS),
        Success("With stream: true.", objects.Completion, EVENT_STREAM, headers=_STREAM_HEADERS),
        body=requests.CompletionBody, parameters=GENERATION, errors=_GENERATION_ERRORS, headers=OPENAI_LIMITS,
        examples={"A text": {"model": _MODEL, "prompt": "Once upon a time", "max_tokens": 32}},
    ),
    *_resumable("/v1/completions", "Completion", objects.Completion),
    _route(
        "/v1/responses", "POST", responses, "createResponse", "Text", "Answer by OpenAI's Responses API",
        Success("The response.", objects.Response, headers=(*_ANSWER_HEADERS, *_STATE_HEADERS)),
        Success("With stream: true.", objects.NamedEvent, EVENT_STREAM, headers=(*_STREAM_HEADERS, *_STATE_HEADERS)),
        body=StoredResponsesBody, parameters=GENERATION, errors=_GENERATION_ERRORS, headers=OPENAI_LIMITS,
        examples={"A question": {"model": _MODEL, "input": "What is the capital of France?", "max_output_tokens": 32}},
    ),
    _route(
        "/v1/responses", "GET", connect, "connectResponses", "Text", "The same over WebSocket",
        Success("A WebSocket. Its messages are those of OpenAI's API.", status=101),
        parameters=(REQUEST_ID,), errors=(400, 403, 405, 429, 503), has_head=False,
    ),
    *_resumable("/v1/responses", "Response", objects.NamedEvent, get_response, cancel_stored),
    *STATE_ROUTES,
    _route(
        "/v1/messages", "POST", messages, "createMessage", "Text", "Answer by Anthropic's Messages API",
        Success("The message.", objects.AnthropicMessage, headers=_ANSWER_HEADERS),
        Success("With stream: true.", objects.NamedEvent, EVENT_STREAM, headers=_STREAM_HEADERS),
        body=MessagesBody, parameters=GENERATION, errors=_ANTHROPIC_ERRORS, error=objects.AnthropicError,
        headers=ANTHROPIC_LIMITS,
        examples={"A question": {"model": _MODEL, "max_tokens": 32, "messages": _MESSAGES}},
    ),
    _route(
        "/v1/responses/input_tokens", "POST", count_input_tokens, "countInputTokens",
        "Text", "The size of a response's prompt",
        Success("The number of tokens.", objects.InputTokens),
        body=StoredResponsesBody, parameters=(REQUEST_ID,), errors=(404, 429, 503),
        examples={"A question": {"model": _MODEL, "input": "What is the capital of France?"}},
    ),
    _route(
        "/v1/responses/compact", "POST", compact, "compactResponse", "Text", "Compact a conversation",
        Success("The input of what follows on the conversation.", objects.Compaction, headers=_ANSWER_HEADERS),
        body=CompactBody, parameters=GENERATION, errors=_GENERATION_ERRORS, headers=OPENAI_LIMITS,
        examples={
            "A conversation": {
                "model": _MODEL, "input": [*_MESSAGES, {"role": "assistant", "content": "It is Paris."}],
            }
        },
    ),
    _route(
        "/v1/messages/count_tokens", "POST", count_tokens, "countTokens", "Text", "The size of a message's prompt",
        Success("The number of tokens.", objects.TokenCount),
        body=PromptBody, parameters=(REQUEST_ID,), errors=(404, 429, 529), error=objects.AnthropicError,
        headers=(ANTHROPIC_REQUEST_ID,),
        examples={"A question": {"model": _MODEL, "messages": _MESSAGES}},
    ),
    *_resumable(
        "/v1/messages", "Message", objects.NamedEvent, error=objects.AnthropicError, headers=(ANTHROPIC_REQUEST_ID,)
    ),
    _route(
        "/v1/moderations", "POST", moderations, "createModeration", "Safety", "Judge texts by the safety policy",
        Success("One result for each text.", objects.ModerationObject),
        body=requests.ModerationBody, parameters=(REQUEST_ID,), errors=(429, 503),
        examples={"Two texts": {"input": ["Hello!", "How do looms work?"]}},
    ),
    _route(
        "/beta/litellm_basic_guardrail_api", "POST", guardrail, "judgeTexts", "Safety",
        "The safety policy as a guardrail of LiteLLM",
        Success("The judgement on all texts together.", GuardrailAction),
        body=GuardrailBody, parameters=(REQUEST_ID,), errors=(429, 503), scope="guardrails",
        examples={"A prompt": {"texts": ["How do looms work?"], "input_type": "request"}},
    ),
    _route(
        "/v1/embeddings", "POST", embeddings, "createEmbedding", "Embeddings", "Vectors of texts",
        Success("One vector for each input.", objects.EmbeddingList, headers=_COMMON_HEADERS),
        body=EmbeddingsBody, parameters=_EMBEDDING_PARAMETERS, errors=_GENERATION_ERRORS, headers=OPENAI_LIMITS,
        examples={"Two texts": {"model": _MODEL, "input": ["Looms weave cloth.", "Cats sleep a lot."]}},
    ),
    *(
        _route(
            path, "POST", rerank, f"rerank{number}", "Embeddings", "Order documents by their similarity to a query",
            Success("The best first.", objects.Ranking, headers=_COMMON_HEADERS),
            body=RerankBody, parameters=_EMBEDDING_PARAMETERS, errors=_GENERATION_ERRORS, headers=OPENAI_LIMITS,
            examples={"Two documents": {"model": _MODEL, "query": "weaving", "documents": ["Looms.", "Cats."]}},
        )
        for number, path in enumerate(("/v1/rerank", "/v2/rerank", "/rerank"), 1)
    ),
    *(
        _route(
            path, "POST", score, f"score{number}", "Embeddings", "How similar texts are",
            Success("One score for each pair.", objects.Scores, headers=_COMMON_HEADERS),
            body=ScoreBody, parameters=_EMBEDDING_PARAMETERS, errors=_GENERATION_ERRORS, headers=OPENAI_LIMITS,
            examples={"Two pairs": {"model": _MODEL, "text_1": "weaving", "text_2": ["Looms.", "Cats."]}},
        )
        for number, path in enumerate(("/v1/score", "/score"), 1)
    ),
    _route(
        "/tokenize", "POST", tokenize, "tokenize", "Text", "The tokens of a text or a conversation",
        Success("The ids.", objects.Tokens),
        body=TokenizeBody, parameters=(REQUEST_ID,), errors=(404, 429, 503),
        examples={
            "A text": {"model": _MODEL, "prompt": "Hello there.", "return_token_strs": True},
            "A conversation": {"model": _MODEL, "messages": _MESSAGES},
        },
    ),
    _route(
        "/detokenize", "POST", detokenize, "detokenize", "Text", "The text of tokens",
        Success("The text.", objects.TokensText),
        body=DetokenizeBody, parameters=(REQUEST_ID,), errors=(404, 429, 503),
        examples={"Two tokens": {"model": _MODEL, "tokens": [19556, 665]}},
    ),
    _route(
        "/v1/load_lora_adapter", "POST", load_lora_adapter, "loadLoraAdapter", "Models", "Load an adapter",
        Success("The adapter is served.", content_type="text/plain"), body=LoadAdapterBody, parameters=(REQUEST_ID,),
        errors=(404, 429, 501, 503, 504), examples={"An adapter": {"lora_name": "law", "lora_path": "law-v2"}},
        scope="admin", is_of_fabric=True,
    ),
    _route(
        "/v1/unload_lora_adapter", "POST", unload_lora_adapter, "unloadLoraAdapter", "Models", "Unload an adapter",
        Success("The adapter is gone.", content_type="text/plain"), body=UnloadAdapterBody, parameters=(REQUEST_ID,),
        errors=(404, 429, 501, 503, 504), examples={"An adapter": {"lora_name": "law"}},
        scope="admin", is_of_fabric=True,
    ),
    _route(
        "/v1/models", "GET", list_models, "listModels", "Models", "List the models",
        Success("All models.", objects.ModelList), headers=(ANTHROPIC_REQUEST_ID,),
    ),
    _route(
        "/v1/models/{id}", "GET", get_model, "getModel", "Models", "Describe a model",
        Success("The model.", objects.ModelObject), errors=(404,), headers=(ANTHROPIC_REQUEST_ID,), takes_slashes=True,
    ),
    _route(
        "/v1/usage", "GET", usage, "getUsage", "Usage", "The usage of the own tenant",
        Success("Sums, and budgets.", objects.TenantUsageObject), errors=(404, 503),
        parameters=("first_day", "last_day", "by", "format"), scope="usage",
    ),
    *(
        _route(
            path, "GET", health, name, "Operation", summary,
            Success("The process runs.", objects.Status), is_open=True,
        )
        for path, name, summary in (
            ("/health", "health", "Tell that the process runs"),
            ("/live", "live", "The same, under Kubernetes' name"),
        )
    ),
    _route(
        "/ready", "GET", ready, "ready", "Operation", "Tell if a shard can take work",
        Success("A shard can take work.", objects.Status),
        Success("No shard can take work yet, or any more.", objects.Status, status=503), is_open=True,
    ),
    _route(
        "/.well-known/kvloom-receipts.json", "GET", receipt_keys, "receiptKeys",
        "Operation", "The public keys of receipts",
        Success("The keys.", objects.ReceiptKeys), is_open=True, errors=(404,),
    ),
    _route(
        "/version", "GET", version, "version", "Operation", "The version",
        Success("The version.", objects.Version), is_open=True,
    ),
    _route(
        "/metrics", "GET", metrics, "metrics", "Operation", "Prometheus metrics",
        Success("The metrics of this edge.", content_type="text/plain"), scope="admin", is_of_fabric=True,
    ),
    _route(
        "/metrics/targets", "GET", metrics_targets, "metricsTargets", "Operation",
        "The processes of the fleet that serve metrics",
        Success("For Prometheus' HTTP service discovery.", list[objects.TargetGroup]), errors=(503,),
        scope="admin", is_of_fabric=True,
    ),
    *(
        _route(
            path, "GET", PAGE_ROUTES[path], f"file_{file.rpartition('/')[2].replace('.', '_')}",
            "Pages", f"A file of the {page}",
            Success("The file.", content_type=content_type), is_open=True,
        )
        for page, files in (
            ("chat page", PAGE_FILES), ("reference page", DOCS_FILES), ("admin page", ADMIN_FILES),
        )
        for path, (file, content_type) in files.items()
    ),
)  # fmt: skip
