"""Treats shards that hang, are slow or fail.

health_watch.py       suspects shards, probes them, and accepts them again
departing_shards.py   empties shards that have notice that they end
migrator.py           moves running requests off a shard
"""
