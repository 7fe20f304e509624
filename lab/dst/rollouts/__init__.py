"""Rollouts in the simulated world: the product's own course, judgement, announcement and shares, in virtual time.

world.py       what a world with rollouts has beside the rest
supervisor.py  the process that rolls versions out, with the machine's shards
versions.py    the two versions of a model, as a rollout loads and unloads them
metering.py    what the routers have counted
registry.py    the record of a rollout, and who can read and write it
edge.py        a process that tells requests their version
sessions.py    which edge, session and version each request has
"""
