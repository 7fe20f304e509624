"""`kvloom simulate`: traces replayed through the real router core against modelled shards, in virtual time.

command.py       the command
workload.py      the input and the output of a simulation: calls and outcomes
world.py         one simulation
router.py        a router of it
fleet/           the model of a fleet of shards
traces/          recorded calls, and their file formats
decisions.py     a router's decision file as a trace and a fleet
lease_owners.py  the owners of tenants' limits: Redis' rates and slots and control's budgets, as the real ones decide
bound.py         a bound that no router can beat by much
idle_waits.py    counts requests that waited beside an idle shard
pool.py          a bound of the mean TTFT that has KV memory and decoding
runs.py          simulations as values that can be sent to another process
rows.py          the figures of the printed table
capacity.py      finds the highest load that a fleet sustains
parallel.py      runs jobs in parallel processes
statistics.py    the figures of a simulation
calibration.py   how well predictions came true
table.py         the printed table
plot.py          plots
"""
