"""Knows which shard holds which KV block.

prefix_index.py   PrefixIndex: stored and placed blocks of each shard, bounded work per event
event_order.py    puts numbered KV event batches in order, and decides when a snapshot is needed
block_runs.py     the map from block hash to shards, in runs of neighbouring blocks
run_walk.py       the look-up of a prompt's leading blocks in that map
shard_bits.py     shards as bits of an int
"""
