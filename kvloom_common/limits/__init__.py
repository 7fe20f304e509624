"""Bounds on what a process holds, and a share of it for each caller and address.

scoped_cache.py     values that belong to scopes and expire
byte_budget.py      the memory of one kind of content, with a share for each caller
fair_threads.py     threads whose owners take turns
client_address.py   the address of a client, also behind reverse proxies
address_limit.py    counts of what different keys hold at a time, and of the connections that each address has open
connection_sweep.py  closes connections of addresses that have too many, as gRPC cannot
memory_watch.py     measures a process's memory and applies the policy
"""
