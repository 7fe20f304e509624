"""The log of what the safety policy has found, which can be trusted and erased (docs/operate/audit.md).

log.py   appends records, each of which holds the hash of the one before, and reads and verifies them
keys.py  the keys of excerpts, by tenant and day; whoever destroys a key has erased the excerpts
"""
