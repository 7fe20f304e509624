"""The models of a running fabric, which come and go.

changes.py     loads, unloads, puts to sleep and wakes models
idle_watch.py  notices that the shards of a model have nothing to do any more
adapters.py    loads and unloads adapters of models
history.py     what has happened to the models
"""
