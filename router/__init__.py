"""The router process: admits requests, places them on shards, screens answers and relays tokens to clients.

All decisions are made in `router/core`, which does no I/O. The rest is the shell around it: it turns what peers send
into the core's events and carries out the core's actions.

__main__.py           `python -m router`
process.py            builds a listening router from the configuration
metric_table.py       the metrics, one record each
assembly.py           puts the parts of one router together
records.py            what is written down of requests: metrics, placements, usage
observer.py           keeps what the driver reports
server.py             one router from its start through its drain to its end
listener.py           one way to reach a router: gRPC and a local socket
core_settings.py      the core's settings, from the configuration
placement_plugins.py  placement policies of other packages
core_driver.py        feeds events to the core and carries out its actions
core/                 the sans-I/O core: admission, dispatch, placement, relay, health
router_servicer.py    the RPCs of kvloom.v1.RouterService
caller_scope.py       what one caller may name: its own requests and cached prompts
continuation_tickets.py  how clients outside the fabric prove that their answer has begun at another router
side_call_desk.py     charges calls that compute no answer to limits
request_validator.py  checks requests and tokenizes them, by the way that each has come
prompt_checks.py      checks prompts: their size, their tokens, their text for the safety service
request_builder.py    makes the core's request of what is wanted and of its prompt, for all ways
model_choice.py       which model takes a request that names a route
conversation_intake.py  checks the messages and tools of a conversation
parsed_output.py      the output of a `Generate`'s choices, taken apart into text, reasoning and tool calls
partial_choices.py    checks the choices of a request that resumes an answer of a lost router
convert.py            conversions between protobuf messages and the core's types
answers/              `Generate` and `Resume`: one request and its streamed answer
rpc/                  what stands in front of every RPC: API keys, limits, access log
tenancy/              leases of shared limits, from Redis and the control service
metering/             usage records of tenants, until the control service has them
overview/             what operators see of a router: shards, requests, samples
features/             what is off by default: shadow traffic, result cache, receipts, rollouts
links/                the connections to clients, shards and the safety service
decisions/            the record of placements: `Plan`, `Explain` and the decision log's file
incidents/            what the core was given, so that it can be given to another one; off by default
usage_records.py      usage records, kept so that tokens lost on the way can be credited
metrics.py            Prometheus metrics and one log line per request
"""

import kvloom_common.transport.grpc_settings as _  # noqa: F401  (It must run before anything imports gRPC.)
