"""The metrics of an edge."""

from __future__ import annotations

from typing import Final

from kvloom_common.limits.memory_watch import MemoryRecords
from kvloom_common.metrics.series import LATENCY_SECONDS, TOKEN_SECONDS, TOKENS
from kvloom_common.metrics.table import MetricTable
from kvloom_common.metrics.tenant_table import TenantTableRecords

# A row has two lines, of which the formatter makes six.
# fmt: off
TABLE: Final = MetricTable("edge")
GEN_AI_CLIENT_TOKEN_USAGE: Final = TABLE.histogram(
    "gen_ai_client_token_usage", "tokens", "Tokens of a prompt (input) and of its answer (output), observed when the "
    "answer ends.", "gen_ai_operation_name", "gen_ai_request_model", "gen_ai_token_type", buckets=TOKENS)
GEN_AI_SERVER_REQUEST_DURATION_SECONDS: Final = TABLE.histogram(
    "gen_ai_server_request_duration_seconds", "seconds", "From a request's submission to a router to the end of its "
    "answer, observed at that end.",
    "gen_ai_operation_name", "gen_ai_request_model", "error_type", buckets=LATENCY_SECONDS)
GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN_SECONDS: Final = TABLE.histogram(
    "gen_ai_server_time_per_output_token_seconds", "seconds", "Mean time between the tokens of an answer after the "
    "first, observed when the answer ends.", "gen_ai_operation_name", "gen_ai_request_model", buckets=TOKEN_SECONDS)
GEN_AI_SERVER_TIME_TO_FIRST_TOKEN_SECONDS: Final = TABLE.histogram(
    "gen_ai_server_time_to_first_token_seconds", "seconds", "From a request's submission to a router to its first "
    "token, observed when the answer ends.", "gen_ai_operation_name", "gen_ai_request_model", buckets=LATENCY_SECONDS)
CASCADE_DISCARDED_TOKENS: Final = TABLE.counter(
    "kvloom_edge_cascade_discarded_tokens", "tokens", "Tokens of candidates of cascades that did not pass a test, or "
    "failed: no client got them.", "route", "model", "reason")
CELL_REQUESTS: Final = TABLE.counter(
    "kvloom_edge_cell_requests", "requests", "Requests that a cell has got; one that moved counts for both.", "cell")
CELL_ROUND_TRIP: Final = TABLE.gauge(
    "kvloom_edge_cell_round_trip_seconds", "seconds", "How long a router of the cell takes to answer: the shortest of "
    "the latest times.", "cell")
CLIENT_DISCONNECTS: Final = TABLE.counter(
    "kvloom_edge_client_disconnects", "clients", "Clients that went away before their answer ended.")
CONTINUED_ANSWERS: Final = TABLE.counter(
    "kvloom_edge_continued_answers", "answers", "Streamed answers whose model was lost and that the next model of "
    "their route continued.", "route", "model", "continued_by")
EVICTED_RESPONSES: Final = TABLE.counter(
    "kvloom_edge_evicted_responses", "answers", "Answers whose events were forgotten to keep others'.")
EXPIRED_RESPONSES: Final = TABLE.counter(
    "kvloom_edge_expired_responses", "answers", "Answers cancelled because no client came back.")
IGNORED_FIELDS: Final = TABLE.counter(
    "kvloom_edge_ignored_fields", "fields", "Fields of requests that are not known and were left out, by name; of many "
    "names, most are `other`.", "field")
NONCONFORMING_CALLS: Final = TABLE.counter(
    "kvloom_edge_nonconforming_calls", "calls", "Demanded tool calls whose arguments do not conform to their tool's "
    "schema, of which a guide has not followed all.")
ORPHANED_REQUESTS: Final = TABLE.counter(
    "kvloom_edge_orphaned_requests", "requests", "Requests that lost their router and found no other.")
OUTPUT_TOKENS: Final = TABLE.counter(
    "kvloom_edge_output_tokens", "tokens", "Tokens of answers that ended, as received from routers.", "model")
PARKED_REQUESTS: Final = TABLE.gauge(
    "kvloom_edge_parked_requests", "requests", "Requests that have lost their router and look for another now.")
REATTACHED_REQUESTS: Final = TABLE.counter(
    "kvloom_edge_reattached_requests", "requests", "Requests that lost their router and were taken over by another.")
REPLAYED_EVENTS: Final = TABLE.counter(
    "kvloom_edge_replayed_events", "events", "Events sent again, or late, to clients that resumed.")
REQUESTS: Final = TABLE.counter(
    "kvloom_edge_requests", "requests", "HTTP requests that were answered, refused ones too.", "route", "status")
RESUMABLE_RESPONSES: Final = TABLE.gauge(
    "kvloom_edge_resumable_responses", "responses", "Responses that can be resumed now.")
RESUME_BYTES: Final = TABLE.gauge(
    "kvloom_edge_resume_bytes", "bytes", "Size of the events held now for resumable responses.")
RESUMED_STREAMS: Final = TABLE.counter(
    "kvloom_edge_resumed_streams", "streams", "Streams taken up again by their client.")
ROUTER_CONNECTED: Final = TABLE.gauge(
    "kvloom_edge_router_connected", "1 for yes, 0 for no", "Whether the link to a router is up now.")
RUNNING_REQUESTS: Final = TABLE.gauge("kvloom_edge_running_requests", "requests", "Generation requests under way now.")
SLOW_CLIENTS: Final = TABLE.counter(
    "kvloom_edge_slow_clients", "streams", "Streams ended because the client read too slowly.")
SSE_EVENTS: Final = TABLE.counter(
    "kvloom_edge_sse_events", "events", "Server-sent events written, counted when their answer ends.")
TAKEN_OVER_RESPONSES: Final = TABLE.counter(
    "kvloom_edge_taken_over_responses", "answers", "Running answers of other edges that continued here after those had "
    "died.")
UNATTENDED_RESPONSES: Final = TABLE.gauge(
    "kvloom_edge_unattended_responses", "responses", "Running responses that can be resumed and that no client reads "
    "now.")
UNCLAIMED_EVENTS: Final = TABLE.counter(
    "kvloom_edge_unclaimed_events", "events", "Events of expired answers that were generated in vain, after their "
    "client had left.")
TENANT_TABLE: Final = TenantTableRecords.of(TABLE)
MEMORY: Final = MemoryRecords.of(TABLE)
