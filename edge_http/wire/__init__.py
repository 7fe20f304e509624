"""Reading HTTP requests and writing responses.

headers.py          the headers of requests and responses
request_headers.py  the record of what the headers of a request ask for, read once
request_callers.py  who sends a request: its credential, or else its address
request_record.py   what is noted of a request, for its log lines and for the headers of every response
cors.py             which web pages of other origins may read responses
unknown_fields.py   what becomes of fields that are not known, and how the operator learns of them
body.py             reads a JSON body within its limits
image_content.py    checks images by the heads of their files
large_body.py       writes a response body of many megabytes in pieces
fair_yield.py       processes at most one long body per iteration of the event loop
json_response.py    JSON responses and errors
keep_alive.py       comments in streams that have nothing to say, so that proxies do not cut them
sse.py              writes server-sent events
message_request.py  a message of a WebSocket as a request, and its events as messages
socket_frames.py    what a WebSocket sends
open_sockets.py     the WebSockets of an edge
"""
