"""The HTTP edge: the APIs of OpenAI and Anthropic over HTTP and server-sent events, in front of one or more routers.

__main__.py    `python -m edge_http`: one edge process
server/        the HTTP server: connections, the routing table, start and stop
endpoints/     one handler per path
edge.py        the parts of an edge, which its handlers share
admission.py   which requests are served, and the memory that they have
offered_models.py  the models and routes, and who may use them
metric_table.py   the metrics, one record each
submission.py  one answer from its submission to a router until its end
supervisor.py  calls of the supervisor of this machine
side_call.py   limits of calls that compute no answer
tenant_usage.py   prices and budgets of callers, in a fabric with tenants
orchestrator_link.py  asks the orchestrator for stored objects
fetching.py    fetches files and images from URLs
known_contexts.py  what it has told, for when it is away
cells/         other cells that may have requests, and where they begin soonest
sockets/       OpenAI's Responses API over WebSocket
state/         the paths whose objects the orchestrator stores
formatting/    what the response formats of all APIs have in common
openai/        OpenAI's request and response formats: parsing, checks, prompts, formatters
anthropic/     Anthropic's request and response formats
admin/         /admin/v1, for administrators of tenants
operating/     what operators see and do, for the admin page
openapi/       the description of the API as an OpenAPI document
wire/          bytes on the connection: bodies, headers, JSON, server-sent events
answers/       receives an answer's tokens and turns them into a response
resume/        streams that outlive their connection
recovery/      streams that outlive their edge: the journal in Redis, claims, takeover
tracing.py     spans of requests, for an OpenTelemetry collector
metrics.py     counters and histograms of the edge
"""

import kvloom_common.transport.grpc_settings as _  # noqa: F401  (before anything imports gRPC)
