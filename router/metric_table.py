"""The metrics of a router."""

from __future__ import annotations

from typing import Final

from kvloom_common.limits.memory_watch import MemoryRecords
from kvloom_common.metrics.series import LATENCY_SECONDS, TOKEN_SECONDS
from kvloom_common.metrics.table import MetricTable
from kvloom_common.metrics.tenant_table import TenantTableRecords

# A row has two lines, of which the formatter makes six.
# fmt: off
TABLE: Final = MetricTable("router")
ANSWERS_INEXACT: Final = TABLE.counter(
    "kvloom_router_answers_inexact", "answers", "Answers that continued on a shard of another variant, or whose engine "
    "does not repeat its results, so that their tokens may differ.")
ATTEMPTS: Final = TABLE.counter(
    "kvloom_router_attempts", "attempts", "Dispatches to shards, counted when their request ends.", "model")
BROWNOUT_REQUESTS: Final = TABLE.counter(
    "kvloom_router_brownout_requests", "requests", "Requests on which the brownout ladder had this effect when they "
    "arrived.", "model", "effect")
BROWNOUT_STEP: Final = TABLE.gauge(
    "kvloom_router_brownout_step", "steps", "The step of the brownout ladder on which the model is now, 0 for none; "
    "the highest of the models that are counted together as other.", "model")
CACHED_INPUT_TOKENS: Final = TABLE.counter(
    "kvloom_router_cached_input_tokens", "tokens", "Prompt tokens of requests that ended, which a shard found in its "
    "cache.", "model")
CLIENTS_CONNECTED: Final = TABLE.gauge(
    "kvloom_router_clients_connected", "clients", "Edges and gRPC clients with open calls now.")
DECISIONS_DROPPED: Final = TABLE.counter(
    "kvloom_router_decisions_dropped", "placements", "Placements that are missing from the decision log's file.")
DECISIONS_REMEMBERED: Final = TABLE.gauge(
    "kvloom_router_decisions_remembered", "requests", "Requests whose placement `kvloom explain` can explain now.")
DRAINING: Final = TABLE.gauge(
    "kvloom_router_draining", "1 for yes, 0 for no", "Whether the router drains, that is, takes no new requests.")
EVICTED_ANSWERS: Final = TABLE.counter(
    "kvloom_router_evicted_answers", "answers", "Answers whose responses were forgotten to keep others'.")
EXPIRED_ANSWERS: Final = TABLE.counter(
    "kvloom_router_expired_answers", "answers", "Answers cancelled because no client came back.")
LIMIT_ACCOUNTS: Final = TABLE.gauge(
    "kvloom_router_limit_accounts", "accounts", "Keys, tenants and organisations whose limits are in use now.")
LIMIT_CONTROL_UP: Final = TABLE.gauge(
    "kvloom_router_limit_control_up", "1 for yes, 0 for no", "Whether control answered the last question about "
    "budgets.")
LIMIT_DECISIONS: Final = TABLE.counter(
    "kvloom_router_limit_decisions", "decisions", "What limits did to requests, by the limit: held, refused, capped, "
    "or in shadow mode would_refuse, would_cap.", "kind", "outcome")
LIMIT_LOCAL_LEASES: Final = TABLE.gauge(
    "kvloom_router_limit_local_leases", "limits", "Limits per minute of which this router uses its own share now, "
    "since Redis cannot be asked.")
LIMIT_REDIS_UP: Final = TABLE.gauge(
    "kvloom_router_limit_redis_up", "1 for yes, 0 for no", "Whether Redis answered the last question about limits.")
OBJECTIVES: Final = TABLE.counter(
    "kvloom_router_objectives", "objectives", "Objectives of requests that ended, by what they limit (deadline, ttft, "
    "tpot) and whether they were met or missed.", "kind", "priority_class", "outcome")
OBJECTIVES_IMPOSSIBLE: Final = TABLE.counter(
    "kvloom_router_objectives_impossible", "requests", "Requests that were refused on arrival because their objectives "
    "could not be met: because of the load, or because of the speed of even an idle shard.", "cause", "priority_class")
PLACEMENT_REGRET_SECONDS: Final = TABLE.histogram(
    "kvloom_router_placement_regret_seconds", "seconds", "How much sooner another shard was predicted to give the "
    "first token than the one that was picked, for one in 32 placements.", "model", buckets=LATENCY_SECONDS)
PREDICTION_ERROR_SECONDS: Final = TABLE.histogram(
    "kvloom_router_prediction_error_seconds", "seconds", "How far off the prediction was that placed a request, for "
    "one in 32 requests: by what was predicted, and whether it came early or late.",
    "model", "term", "direction", buckets=LATENCY_SECONDS)
PREFILL_LEGS_BEGUN: Final = TABLE.counter(
    "kvloom_router_prefill_legs_begun", "legs", "Prompts that were sent to a prefill shard for an answer of another "
    "shard.", "model")
PREFILL_LEGS_ENDED: Final = TABLE.counter(
    "kvloom_router_prefill_legs_ended", "legs", "Such prompts by outcome: used, when the answer was sent to its shard "
    "with the KV, or why the KV was lost.", "model", "outcome")
PREFILL_SECONDS: Final = TABLE.histogram(
    "kvloom_router_prefill_seconds", "seconds", "From the begin of a request's prefill at its first shard to the first "
    "token, observed at its end, where the two can be told.", "model", "priority_class", buckets=LATENCY_SECONDS)
QUEUE_TIME_SECONDS: Final = TABLE.histogram(
    "kvloom_router_queue_time_seconds", "seconds", "From a request's arrival at the router to its first dispatch, "
    "observed at its end.", "model", "priority_class", buckets=LATENCY_SECONDS)
REPLAYED_RESPONSES: Final = TABLE.counter(
    "kvloom_router_replayed_responses", "responses", "Responses that were there before their reader came.")
REQUEST_DURATION_SECONDS: Final = TABLE.histogram(
    "kvloom_router_request_duration_seconds", "seconds", "From a request's arrival at the router to its end, observed "
    "at its end.", "model", "priority_class", buckets=LATENCY_SECONDS)
REQUESTS: Final = TABLE.counter(
    "kvloom_router_requests", "requests", "Requests that were admitted and have ended, by how and why.",
    "model", "outcome", "error_type")
REQUESTS_DISRUPTED: Final = TABLE.counter(
    "kvloom_router_requests_disrupted", "requests", "Requests that ended and were rejected or evicted, with the error, "
    "or had been preempted, migrated or failed over at least once.", "priority_class", "disruption", "error_type")
REQUESTS_INVALID: Final = TABLE.counter(
    "kvloom_router_requests_invalid", "requests", "Requests that were refused before they were admitted, by reason.",
    "error_type")
REQUESTS_LIVE: Final = TABLE.gauge(
    "kvloom_router_requests_live", "requests", "Requests that have been admitted and have not ended yet.")
REQUESTS_MOVED: Final = TABLE.counter(
    "kvloom_router_requests_moved", "requests", "Requests taken off a shard that was suspected, handed over its work "
    "or had notice that it ends.", "reason")
REQUESTS_QUEUED: Final = TABLE.gauge(
    "kvloom_router_requests_queued", "requests", "Requests that wait in the router for a shard now.")
REQUESTS_UNSERVED: Final = TABLE.counter(
    "kvloom_router_requests_unserved", "requests", "Requests that ended with an error before they were sent to a "
    "shard: rejected (never admitted), or evicted from the queue.", "model", "end")
RESULT_CACHE_ANSWERS: Final = TABLE.gauge("kvloom_router_result_cache_answers", "answers", "Answers that are kept now.")
RESULT_CACHE_BYTES: Final = TABLE.gauge(
    "kvloom_router_result_cache_bytes", "bytes", "What the kept answers take in memory.")
RESULT_CACHE_EVICTIONS: Final = TABLE.counter(
    "kvloom_router_result_cache_evictions", "answers", "Answers that were dropped before their time because others "
    "needed the room.")
RESULT_CACHE_REQUESTS: Final = TABLE.counter(
    "kvloom_router_result_cache_requests", "requests", "Requests for which the result cache was asked, by whether it "
    "had their answer.", "outcome")
RESUMABLE_ANSWERS: Final = TABLE.gauge("kvloom_router_resumable_answers", "answers", "Answers that can be resumed now.")
RESUME_BYTES: Final = TABLE.gauge(
    "kvloom_router_resume_bytes", "bytes", "Size of the responses held now for resumable answers.")
RESUMED_STREAMS: Final = TABLE.counter(
    "kvloom_router_resumed_streams", "streams", "Generate streams taken up again by their client.")
SAFETY_CONNECTED: Final = TABLE.gauge(
    "kvloom_router_safety_connected", "1 for yes, 0 for no", "Whether the safety service can be reached now.")
SEQUENCES_FAILED_OVER: Final = TABLE.counter(
    "kvloom_router_sequences_failed_over", "sequences", "Sequences that continued after their shard or its engine had "
    "failed, counted when their request ends.")
SEQUENCES_PREEMPTED: Final = TABLE.counter(
    "kvloom_router_sequences_preempted", "sequences", "Running sequences of tenants above their share that had to wait "
    "so that other tenants were served.")
SHADOW_DURATION_SECONDS: Final = TABLE.histogram(
    "kvloom_router_shadow_duration_seconds", "seconds", "From the sending of a request to the candidate to its end.",
    "model", "candidate", buckets=LATENCY_SECONDS)
SHADOW_FAILED: Final = TABLE.counter(
    "kvloom_router_shadow_failed", "requests", "Requests that failed at the candidate.",
    "model", "candidate", "error_type")
SHADOW_GAP_SQUARED: Final = TABLE.counter(
    "kvloom_router_shadow_gap_squared", "nats squared", "Sum over scored answers of the squared likelihood gap.",
    "model", "candidate")
SHADOW_GENERATED_ANSWERS: Final = TABLE.counter(
    "kvloom_router_shadow_generated_answers", "answers", "Answers that the candidate has generated and nobody has "
    "seen, by how they ended.", "model", "candidate", "outcome")
SHADOW_GENERATED_TOKENS: Final = TABLE.counter(
    "kvloom_router_shadow_generated_tokens", "tokens", "Tokens of the candidate's answers, and of the model's answers "
    "to the same prompts.", "model", "candidate", "by")
SHADOW_SCORED_ANSWERS: Final = TABLE.counter(
    "kvloom_router_shadow_scored_answers", "answers", "Answers that the candidate has scored.", "model", "candidate")
SHADOW_SCORED_TOKENS: Final = TABLE.counter(
    "kvloom_router_shadow_scored_tokens", "tokens", "Tokens of scored answers.", "model", "candidate")
SHADOW_SKIPPED: Final = TABLE.counter(
    "kvloom_router_shadow_skipped", "answers", "Sampled answers that were not compared, by reason.",
    "model", "candidate", "reason")
SHADOW_SURPRISAL_NATS: Final = TABLE.counter(
    "kvloom_router_shadow_surprisal_nats", "nats", "Sum of -log p of scored tokens, under the model or the candidate.",
    "model", "candidate", "under")
SHADOW_SURPRISAL_TOKEN_PRODUCTS: Final = TABLE.counter(
    "kvloom_router_shadow_surprisal_token_products", "nats times tokens", "Sum over scored answers of -log p of all "
    "tokens times their number.", "model", "candidate", "under")
SHADOW_TOKENS_SQUARED: Final = TABLE.counter(
    "kvloom_router_shadow_tokens_squared", "tokens squared", "Sum over scored answers of their squared number of "
    "tokens.", "model", "candidate")
SHARD_HEALTH: Final = TABLE.gauge(
    "kvloom_router_shard_health", "shards", "Shards in this state now, by id; those above the limit are counted "
    "together as other.", "shard_id", "state")
SHARD_TRIPS: Final = TABLE.counter(
    "kvloom_router_shard_trips", "suspicions", "Suspicions of shards, by symptom.", "symptom")
SHARDS_READY: Final = TABLE.gauge("kvloom_router_shards_ready", "shards", "Shards that take requests now.", "model")
TIME_PER_OUTPUT_TOKEN_SECONDS: Final = TABLE.histogram(
    "kvloom_router_time_per_output_token_seconds", "seconds", "Mean time between the tokens of a request after the "
    "first, observed once a request, at its end.", "model", "priority_class", buckets=TOKEN_SECONDS)
TIME_TO_FIRST_TOKEN_SECONDS: Final = TABLE.histogram(
    "kvloom_router_time_to_first_token_seconds", "seconds", "From a request's arrival at the router to its first "
    "token, observed at its end.", "model", "priority_class", buckets=LATENCY_SECONDS)
TOKENS: Final = TABLE.counter(
    "kvloom_router_tokens", "tokens", "Tokens of requests that ended: of their prompts (input), and delivered ones "
    "(output).", "model", "token_type")
TOKENS_CREDITED: Final = TABLE.counter(
    "kvloom_router_tokens_credited", "tokens", "Output tokens of requests that ended, which were lost with the "
    "connection to their client.", "model")
UNATTENDED_ANSWERS: Final = TABLE.gauge(
    "kvloom_router_unattended_answers", "answers", "Running answers that can be resumed and that no client reads now.")
UNCLAIMED_RESPONSES: Final = TABLE.counter(
    "kvloom_router_unclaimed_responses", "responses", "Responses of expired answers that were generated in vain, after "
    "their client had left.")
USAGE_RECORDS: Final = TABLE.counter(
    "kvloom_router_usage_records", "records", "Usage records that were made for requests that ended.")
USAGE_RECORDS_DROPPED: Final = TABLE.counter(
    "kvloom_router_usage_records_dropped", "records", "Usage records that are lost, because neither the disk nor "
    "memory had room.")
USAGE_RECORDS_UNSTORED: Final = TABLE.gauge(
    "kvloom_router_usage_records_unstored", "records", "Usage records of this router that the control service does not "
    "have yet.")
USAGE_RECORDS_UNWRITTEN: Final = TABLE.gauge(
    "kvloom_router_usage_records_unwritten", "records", "Usage records that are only in memory now, because the spool "
    "cannot be written.")
USAGE_SPOOL_BYTES: Final = TABLE.gauge(
    "kvloom_router_usage_spool_bytes", "bytes", "Size of the spool of usage records that the control service does not "
    "have yet.")
TENANT_TABLE: Final = TenantTableRecords.of(TABLE)
MEMORY: Final = MemoryRecords.of(TABLE)
