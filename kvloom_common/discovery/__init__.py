"""The registry in Redis in which processes announce themselves, and how shards are found without it.

records.py       the records of processes, and which of two of one name may have it
registry.py      announce, withdraw, list, watch
named_shards.py  the shards that listen at given names, asked of DNS and of themselves
process_finder.py  the processes of one role that may be used, the configured one first
router_finder.py  the routers: a fixed list, or those of the registry
announcer.py     keeps one process announced
redis_client.py  a Redis client whose commands can be cancelled
"""
