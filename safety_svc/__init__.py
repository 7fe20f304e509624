"""The safety service: it screens prompts and streamed answers against the rules of a policy file.

server.py            the gRPC server and its lifecycle
connection.py        one router's screening stream
screen.py            judges a whole prompt, or an answer while it streams
classify.py          names the categories of all rules that a text breaks
policy.py            loads, validates and compiles the rules of a policy file
rule_plugins.py      rule kinds of other packages
policy_file.py       reloads the policy file when it changes
phrase_scan.py       searches streamed text for the phrases of deny lists
pattern_scan.py      searches streamed text for RE2 patterns
folding.py           maps texts that look the same to the same string
prefilter.py         the strings by which routers recognize text that they need not send
builtin_policy.toml  the policy that is used when none is configured
metrics.py           the Prometheus metrics
__main__.py          the command `python -m safety_svc`
"""

import kvloom_common.transport.grpc_settings as _  # noqa: F401  (before anything imports gRPC)
