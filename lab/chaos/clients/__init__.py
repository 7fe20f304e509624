"""Simulated users: what they ask, the correct answers, and the HTTP and SDK clients that they use.

questions.py    questions, endpoints and client behaviours, drawn from a seed
oracle.py       the correct answers
transcript.py   an expected answer, and the answer that a client received
http_client.py  the client over HTTP, which retries and resumes
sse_reading.py  server-sent events
sdk_client.py   the client over gRPC
"""
