"""The model of a fleet of shards: speed, prefix cache, queue and continuous batching.

fleet.py           the options of a fleet, and its shards
models_option.py   a fleet of several models, as the options of the command describe it
scaling.py         a fleet whose number of shards changes
shard.py           a shard: continuous batching with chunked prefill
sequence.py        a sequence on a shard
engine_order.py    the waiting queue and the order of prefills
kv_cache.py        the prefix cache
peer_fetch.py      fetching KV blocks from other shards
profile.py         the profile of a shard: a roofline of one step
step_time.py       the duration of steps by the profile
shard_frames.py    converts the results of a shard to frames for the router core
recorded_fleet.py  a fleet from a decision file
"""
