"""The simulated processes, and the streams between them.

pipe.py          one direction of a stream, with latency, stalls and cuts
block_cache.py   the prefix cache of a shard
shard_stream.py  the stream between a router and a shard
engine.py        the engine of a shard
shard.py         a shard process
registry.py      the registry, where shards announce themselves
fleet_reader.py  a router's end of it: the real decisions about links
safety.py        the safety service and its streams
client.py        the stream between a client and a router
router_node.py   a router process: the real core in a simulated shell
"""
