"""The registry in Redis in which shards and routers announce themselves.

registry.py      the records of shards and routers: announce, withdraw, list, watch
announcer.py     keeps one process announced
redis_client.py  a Redis client whose commands can be cancelled
"""
