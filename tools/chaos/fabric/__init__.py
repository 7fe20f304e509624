"""The fabric under test and the faults that strike it.

cluster.py     the processes, their supervisor, and the proxies in between
proxy.py       a TCP proxy that can stall and reset its connections
faults.py      the faults and their times, from a seed
injector.py    applies the faults
quiescence.py  checks that the fabric is idle and complete at the end
"""
