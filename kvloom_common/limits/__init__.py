"""Bounds on what a process holds, and a share of it for each caller and address.

keyed_counts.py     counts of what callers or addresses hold
scoped_cache.py     values that belong to scopes and expire
byte_budget.py      the memory of one kind of content, with a share for each caller
fair_threads.py     threads whose owners take turns
client_address.py   the address of a client, also behind reverse proxies
address_limit.py    the number of connections of each address
connection_sweep.py  closes connections of addresses that have too many, as gRPC cannot
memory_policy.py    when a process holds too much memory, and when it returns some
memory_watch.py     measures a process's memory and applies the policy
"""
