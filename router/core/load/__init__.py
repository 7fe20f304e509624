"""How much work each shard has, and how long its prefill takes.

load_ledger.py    reservations of this router's attempts, and the load that other routers cause
speed_model.py    the duration of a prefill, learned per shard by least squares
"""
