"""LoRA adapters of an engine: which are registered, which are loaded, and which sequences wait for one.

slots.py   which adapter is loaded, evicted and given to waiting sequences next; pure
host.py    the registered adapters of one engine: reads and loads their files in a thread
"""
