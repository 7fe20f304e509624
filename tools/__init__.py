"""The `kvloom` command and everything behind it: running, examining, simulating and measuring a fabric.

cli/                 the command
options.py           flags that several commands share
fabric_trust.py      the fabric's secret, as commands and the supervisor use it
failures.py          how a command fails
fleet/               what commands see of all machines of a fabric
supervisor/          runs the processes of a fabric
models/              finds, registers and prepares models
colocated.py         an edge with a router inside
many_shards.py       several simulated shards in one process
audit/               `kvloom audit`: the log of what the safety policy has found
safety/              `kvloom safety`: what a policy would do with recorded requests
receipts/            `kvloom receipts`: saves receipts of answers, and computes the answers again
doctor/              `kvloom doctor`: checks an engine on this machine
plan/                `kvloom plan`: how many shards a load needs
whatif/              `kvloom whatif`: a router's decisions under other limits, prices, policy or fleet
simulate/            `kvloom simulate`: traces through the real router and modelled shards
usage/               `kvloom usage`: what was used, and whether that is what was delivered
scaler/              `kvloom scaler`: how many shards each model needs, for KEDA
gateway/             `kvloom epp`: places the requests of an Envoy on engines of others
bench/               `kvloom bench`: what this machine reaches
stable_hash.py       a hash that is the same in every process
interpreter.py       the Python that runs
"""
