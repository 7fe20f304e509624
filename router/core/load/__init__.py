"""How much work each shard has, and how long its prefill, its decoding and a wait for its KV memory take.

load_ledger.py      reservations of this router's attempts
load_view.py        the load of one shard: what was reserved there, and what other routers cause
cost_order.py       the shards in the order of the least that a request can cost there
speed_model.py      the duration of a prefill, learned per shard by least squares
decode_speed.py     the duration of a decode step, learned per model from load reports
prediction.py       what a placement predicts for its request, and how that turns out
kv_memory.py        how long a sequence waits for KV blocks, and what it costs those that come later
"""
