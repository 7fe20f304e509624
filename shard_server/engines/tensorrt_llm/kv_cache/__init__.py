"""TensorRT-LLM's KV events, translated to kvloom's.

kv_records.py  the events as they arrive, in a compact form
kv_events.py   the translation to block hashes that routers compute
kv_roots.py    which model and tenant a chain of blocks belongs to
"""
