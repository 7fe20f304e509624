"""The models of a running fabric, which come and go.

changes.py   loads, unloads, puts to sleep and wakes models
adapters.py  loads and unloads adapters of models
history.py   what has happened to the models
"""
