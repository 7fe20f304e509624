"""How requests enter the core, and how they leave it before their answer is complete.

arrivals.py                 admits, queues or refuses new requests
requests_awaiting_lease.py  requests that wait for leases of their limits
cancellation.py             ends what a client cancelled, or left behind
deadlines.py                a heap of the deadlines of live requests
outage.py                   requests that no shard can run wait for one to return, then fail
"""
