"""From a shard's token to the client, and the end of every request.

relay.py             translates one step from a shard's slots to the clients' slots
deferred_frames.py   defers the KV events and load reports that come with plain token frames
screening.py         the open questions to the safety service
verdicts.py          acts on its verdicts, and on its absence
lifecycle.py         releases withheld output, retries after failures, ends choices and requests
"""
