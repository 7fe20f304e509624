"""The router core: it places, relays and ends requests, as a pure function of events and time to actions.

It has no I/O, no clock and no randomness of its own, so the service, the simulator and the tests run the same code.

core.py                  RouterCore, the entry point: takes an event, returns actions
core_config.py           its settings
events.py                what can happen: requests, shard frames, verdicts, ticks
actions.py               what the core wants done
frames.py                one engine step as it enters and leaves the core
lease_messages.py        leases of limits: what is asked of their owners, and what they answer
expected_output.py       how long answers usually are, by tenant or key
live.py                  clients, live requests, their choices and their attempts
objectives.py            what a caller expects of the speed of its answer, and what became of it
request_end.py           how a request ended, and how often it was moved
priority_classes.py      the classes of requests: which goes first, and what each is guaranteed
rule_settings.py         the keys that rules follow, and what no operator can choose
request_hook.py          where a rule that is off by default meets requests
request_usage.py         what a usage record needs of a request
degradation.py           how an answer was degraded when its request was admitted
held_calls.py            the tool calls in such output, none of which is sent in part
uncleared_output.py      output of a choice that its client must not see yet
action_buffer.py         collects the actions of one event
shard_event_handler.py   handles the events of shards
integrity.py             the invariants of the whole core, asserted by tests and simulations

A package imports only packages above it in this list; all of them use the modules above.

load/                    how much work each shard has, and how fast it prefills
prefix_index/            which shard holds which KV block
fleet/                   the connected shards, their slots, their health, and their fast paths
placement/               which shard a request is placed on, and why
tenancy/                 the limits of keys, tenants and organisations
dispatch/                the queue in the router, and sending attempts to shards
brownout/                answers that are degraded by steps under overload
relay/                   tokens on their path to clients, screening, failover, and the end of requests
admission/               new requests, cancellations and deadlines
health/                  suspecting and probing shards, and moving requests off them
"""
