"""Rollouts: a new version of a model gets a growing share of the sessions, and is taken back if it serves worse.

plan.py          what an operator asks for
judge.py         whether the new version serves worse, as far as is known. Pure
measurements.py  what routers have counted for the two versions
announcement.py  tells edges and routers the share
rollout.py       one rollout, from the load of the new version to the end of one of the two
state.py         how far a rollout is
rollouts.py      those of a machine, which run in tasks of their own
commands.py      begins, follows and takes back the rollouts of this machine
"""
