"""Reading HTTP requests and writing responses.

headers.py        the headers of requests and responses
body.py           reads a JSON body within its limits
fair_yield.py     processes at most one long body per iteration of the event loop
json_response.py  JSON responses and errors
sse.py            writes server-sent events
"""
