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
receipts/            `kvloom receipts`: saves receipts of answers, and computes the answers again
doctor/              `kvloom doctor`: checks an engine on this machine
simulate/            `kvloom simulate`: traces through the real router and modelled shards
usage/               `kvloom usage`: what was used, and whether that is what was delivered
bench/               `kvloom bench`: what this machine reaches
stable_hash.py       a hash that is the same in every process
interpreter.py       the Python that runs
process_counters.py  CPU time, context switches and memory of processes
"""
