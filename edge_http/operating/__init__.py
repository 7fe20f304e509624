"""The paths that the admin page asks, besides those for tenants' administration: fleet, requests, usage, rollouts.

routes.py      one record for each path
access.py      who may use them
overview.py    the fleet and requests, as they are now or as a stream of events
rollouts.py    rollouts of models, and shards that are drained
objects.py     the types of their answers
"""
