"""Streams that outlive their connection: clients resume them at this edge, and a journal makes them known to others.

response_name.py       what identifies a response: its id, its caller, and an idempotency key
resumable_stream.py    a stream whose events are logged and written to its current reader
idempotent_answers.py  answers that are not streamed, kept for repeats of their request
table.py               all resumable responses of this edge, and the tasks that produce them
commit_gate.py         holds events back until the journal has them: one gate for all streams, a cursor for each
records.py             the records of a response in the journal, and the state that is restored from them
publication.py         how much of one response the journal has, and what has to be written next
remote_responses.py    what the endpoints need of other edges' responses; edge_http/recovery/ implements it
"""
