"""OpenAI's Responses API over WebSocket: GET /v1/responses with an upgrade.

connection.py  one WebSocket: its messages, its limits and its end
messages.py    the messages of a client, and what is wrong with them
lane.py        the requests of one `stream_id`, one after the other
steering.py    what a client adds to a response while it is generated
lineage.py     what is known of responses that are not stored, as long as their connection lasts
"""
