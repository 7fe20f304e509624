"""The connected shards and what is known about each.

fleet.py            Fleet, Shard, and the descriptions of their state for clients and observers
departure.py        when a shard with notice has to be empty, and the order in which its requests leave
shard_adapters.py   the adapters of one shard, and how long a request waits for one that is not loaded
slot_pool.py        numbers for sequences on a stream
fast_path.py        sequences whose tokens are forwarded without further checks
shard_health.py     the evidence about one shard, and its circuit breaker
"""
