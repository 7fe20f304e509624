"""The registry in Redis in which processes announce themselves.

registry.py      the records of processes: announce, withdraw, list, watch
announcer.py     keeps one process announced
redis_client.py  a Redis client whose commands can be cancelled
"""
