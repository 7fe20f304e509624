"""Edges that share a Redis: each publishes its resumable responses there, and continues those of an edge that has died.

edge_membership.py    joins the edges that share a Redis, and leaves them
journal.py            what the edges store in Redis: their addresses, and their responses' records and progress
publisher.py          writes the progress of this edge's responses to the journal
response_locator.py   finds the edge that holds a response
peer_proxy.py         forwards a request to that edge
claims.py             decides which edge may continue a response, and which response an idempotency key names
response_recovery.py  continues or replays a response whose edge has died
takeover.py           the requests and the stream that continue it
"""
