"""`kvloom plan`: how many shards a load needs, on paper and in the simulator.

demand.py    a load as averages per request, stated or measured from a trace
estimate.py  the shards that each resource of a fleet needs for a load. Pure
search.py    the smallest fleet of the simulator that meets the objective
command.py   the command
"""
