"""Answers while they are generated: they receive the router's updates and produce what the client gets.

answer.py             the base class: the sink of all choices, the end of the answer, and its usage
collected_answer.py   an answer that is not streamed
streamed_answer.py    an answer that is streamed as server-sent events
recorded_answer.py    a streamed answer whose progress is recorded, so that another edge can continue it
"""
