"""The names of attributes of spans. OpenTelemetry's conventions for generative AI still move, so the names are pinned
here, as of open-telemetry/semantic-conventions-genai in autumn 2026."""

from __future__ import annotations

from typing import Final

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
PROVIDER_KVLOOM: Final = "kvloom"
REQUEST_MODEL: Final = "gen_ai.request.model"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
CHOICE_COUNT: Final = "gen_ai.request.choice.count"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
CONVERSATION: Final = "gen_ai.conversation.id"
SESSION: Final = "session.id"
"""Langfuse and others group traces by it."""
USER: Final = "user.id"
ERROR_TYPE: Final = "error.type"
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"

REQUEST_ID: Final = "kvloom.client_request_id"
TENANT: Final = "kvloom.tenant"
SHARD: Final = "kvloom.shard.id"
CLASS: Final = "kvloom.priority_class"
ATTEMPTS: Final = "kvloom.attempts"
TTFT: Final = "kvloom.ttft_seconds"
QUEUE_TIME: Final = "kvloom.queue_time_seconds"
BATCH_SIZE: Final = "kvloom.step.started_sequences"
RULE: Final = "kvloom.safety.rule"
"""The name of the safety policy's rule."""

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""By route. Calls of other routes have no operation of these conventions."""
