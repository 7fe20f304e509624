"""A router keeps what its core was given, so that it can be given to another one (`kvloom incident`). This is off by
default. No prompt, no token and no answer is kept: lengths and block hashes stand for them.

plain_events.py    events as JSON, without their content, and back
checkpoint.py      the state of a core, without content
recorded_core.py   a core that logs its events and decisions
bundle.py          reads a log as a run that can be repeated
"""
