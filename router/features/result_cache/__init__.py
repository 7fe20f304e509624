"""The result cache: answers to deterministic requests, kept for the tenants that have got them
(docs/how-to/result-cache.md).

cache.py          what is looked up for an arriving request, and what is kept of a complete answer
request_key.py    what an answer depends on, as a key
stored_answer.py  an answer as it is kept
pieces.py         the text of its tokens, as a shard would send it
shared.py         the answers that routers share through Redis
"""
