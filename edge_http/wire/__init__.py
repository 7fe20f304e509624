"""Reading HTTP requests and writing responses.

headers.py          the headers of requests and responses
request_callers.py  who sends a request: its credential, or else its address
request_record.py   what is logged of a request
client_address.py   the address of a client, also behind reverse proxies
body.py             reads a JSON body within its limits
byte_budget.py      the memory of bodies and answers, with a share for each caller
keyed_counts.py     counts of what callers or addresses hold
large_body.py       writes a response body of many megabytes in pieces
fair_yield.py       processes at most one long body per iteration of the event loop
json_response.py    JSON responses and errors
sse.py              writes server-sent events
"""
