"""The paths that the admin page asks, besides those for tenants' administration: fleet, requests, usage, rollouts.

routes.py      one record for each path
access.py      who may use them
overview.py    the fleet and requests, as they are now or as a stream of events
shards.py      drains
rollouts.py    rollouts of models, by the supervisor of this machine
objects.py     the types of their answers
"""
