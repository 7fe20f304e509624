"""Deterministic simulation testing: the real router core among simulated shards, clients, links and clocks.

command.py      `kvloom-lab dst`
campaign.py     many seeds in parallel processes
run_seed.py     one seed: periods with and without faults
scenario.py     what a seed determines in advance
world.py        all processes of one simulation
environment.py  what they share: time, randomness, counters, history
timeline.py     virtual time
virtual_loop.py  an event loop in virtual time, for coroutines of the product
nodes/          routers, shards, clients and the safety service
traffic.py      the clients' requests
tenancy/        tenants with limits and budgets
faults.py       the faults that strike by themselves
model_changes.py    models that are loaded and unloaded
unloading.py    how the answers of a model are let end
adapter_changes.py  adapters that are loaded, unloaded and replaced
rollout_changes.py  rollouts that begin, and what befalls them
rollouts/       new versions that get a growing share of the requests
told.py         which version a request is told
script.py       the answers of simulated sequences
witness.py      the record of a router, reconstructed from outside
observed.py     the requests, choices and shards in that record
checker.py      the interface of a checker
checkers/       the checkers, one for each invariant
views.py        what checkers and nodes may see of one another
trace.py        the history as text
replay.py       the events of a live router, decided again
"""
