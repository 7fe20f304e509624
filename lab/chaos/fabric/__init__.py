"""The fabric under test and the faults that strike it.

cluster.py     the processes, their supervisor, and the proxies in between
proxy.py       a TCP proxy that can stall and reset its connections
faults.py      the faults and their times, from a seed
injector.py    applies the faults
model_faults.py  models that are unloaded or put to sleep, and come back
surroundings.py  full disk, no free descriptors, a hostile neighbour, and the table of faults of their kind
redis_faults.py  bad records, a full Redis, another server at its address
clocks.py      wall clocks that jump
quiescence.py  checks that the fabric is idle and complete at the end
"""
