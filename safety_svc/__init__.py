"""The safety service: it screens prompts and streamed answers against the rules of a policy file.

server.py            the gRPC server and its lifecycle
connection.py        one router's screening stream
screen.py            judges a whole prompt, or an answer while it streams
watched_answers.py   whole answers, for guardrails and models that only watch
classify.py          names the categories of all rules that a text breaks
policy.py            loads, validates and compiles the rules of a policy file
rule_fields.py       the rules as they are written there
rule_modes.py        which rules hold for a request, and how
rule_plugins.py      rule kinds of other packages
pii.py               the rule kind that finds personal data
masks.py             the placeholders of what rules hide
policy_file.py       reloads the policy file when it changes
phrase_set.py        the phrases that are found in text which is folded in one way
phrase_scan.py       searches streamed text for the phrases of deny lists
pattern_scan.py      searches streamed text for RE2 patterns
folding.py           maps texts that look the same to the same string
look_alikes.py       maps texts that look alike, by Unicode's table, to the same string
prefilter.py         the strings by which routers recognize text that they need not send
builtin_policy.toml  the policy that is used when none is configured
guardrails.py        asks services of others, and models of the fabric, about prompts
injections.py        looks for prompt injections by the embeddings of prompts
judge_formats.py     how guard models are asked, and how they answer
audit.py             reports what was found
whatif.py            what a policy does with recorded texts
metrics.py           the Prometheus metrics
__main__.py          the command `python -m safety_svc`
"""

import kvloom_common.transport.grpc_settings as _  # noqa: F401  (before anything imports gRPC)
