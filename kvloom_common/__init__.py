"""The code that the services share and the SDK does not need (see ARCHITECTURE.md). It imports the SDK, and
no service.

config/          the configuration file as one typed tree
models/          the models of a fabric: their configuration, cards and catalogue
plugins.py       parts of a fabric that other packages bring, as entry points
private_file.py  files that only this user can read, and the one place where files are replaced
access/          who may use the fabric from outside: API keys, tenants, TLS for clients
tenancy/         what is known of tenants, their keys, limits and prices
limits/          bounds on what a process holds, and a share of it for each caller
delivery_log.py   what a process has delivered, for a comparison with what was metered
finish_reasons.py  the names of finish reasons in logs, metrics, records and traces
webhook_events.py  the events that webhooks can tell of
addresses.py     host:port, also of IPv6
backend.py       the command of the services behind edges and routers, and how they end
callers.py       who sends a request, and so who is isolated from whom
class_rank.py    how urgent a request is, as a shard is told
kv_share.py      a guaranteed share of the KV blocks of a shard
replay/          events kept of a response, so that its client can resume it
conversation/    conversations with tools: prompts, guides and parsers for them
json_schema/     JSON Schemas as guides can follow them
parsers/         a model's output becomes text, reasoning and tool calls
text/            tokenizers, chat templates, detokenizing, block hashes
transport/       the server side of streams between processes
audit/           the log of what the safety policy has found
receipts/        signed receipts of answers: their content, their checks, their keys
trust/           the secret that the processes of a fabric share, and what proves that they know it
database/        the SQL database of a service
discovery/       the registry in Redis in which shards and routers announce themselves
overview/        what operators see of a fleet, from the overviews of its routers
tracing/         traces of requests, over OTLP
metrics/         what the Prometheus metrics of all processes have in common, and where they are scraped
process/         what every service process needs: logs, metrics, signals and timers
"""
