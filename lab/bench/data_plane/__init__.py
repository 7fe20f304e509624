"""`kvloom-lab bench data-plane`: the cost of the fabric itself, around simulated engines.

command.py            the command and its table
workloads.py          what clients ask, and the engine's pace
run.py                runs workloads against a fabric and reduces the figures
client.py             starts the load clients
load.py               a load client, a process of its own
turns.py              two variants of one workload, measured alternately
peer_comparison.py    other gateways, measured alternately with ours
peer_systems.py       their processes
peer_table.py         their table
"""
