"""The formats of all APIs have these in common. A format turns an answer's output into the bytes of a response.

moderation.py          what the safety policy says of a text
response_formatter.py  the base of all formats
collected_choice.py    the output of one choice of a response that is not streamed
usage.py               the token counts of a response
error_formats.py       errors in the JSON of each API
limit_headers.py       what callers are told of their limits
json_bytes.py          encoding JSON
body_guide.py          the guide of an answer, and what tools make of it
client_tools.py        tools that a client knows otherwise than the model
decoding.py            decoding the bodies of requests
body_fields.py         which fields of a body count, and what becomes of the others
"""
