"""When a placed request is sent to its shard.

dispatch_queue.py    which requests wait in the router, and when each one is sent
backlog.py           whether a shard gets more of what waits for it, and when it will
parking.py           when requests that are not urgent are placed although more urgent ones wait
replacement.py       other shards for requests that wait for one
idle_bound.py        how long a request may wait beside a shard that has nothing to do
openings.py          when each shard with a queue takes more
waiting_queues.py    the queues themselves: by class, then by the service that tenants have had
ttft_order.py        which of a tenant's requests goes first when some have a TTFT objective
flow_order.py        which flow of a queue is next
counter_order.py     names in the order of counters that only grow
service_counters.py  what each class and tenant has been served, in tokens
attempt_sender.py    sends attempts, prefill chunks and probes, and frees what they reserved
prefill_chunks.py    how a long prompt is split
prefix_copies.py     copies of a prefix that many share, on shards that have nothing to do
prefill_handoffs.py  prompts that one shard computes for the answer of another
fair_shares.py       which sequences give way to other tenants
class_shares.py      what is left to each class, and which sequences give way to a more urgent one
block_shares.py      what each tenant holds of a shard's KV blocks
overload.py          which requests are refused or dropped because they would wait too long
starts.py            how soon requests begin that would arrive now
refusals.py          the other reasons for a refusal, and all error messages
"""
