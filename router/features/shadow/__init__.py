"""Shadow traffic: a share of a model's answers is also given to a candidate, without being shown to anyone.

sampling.py   which answers are sampled, and the requests that are made of them
pair.py       one model and its candidate: what waits, what is under way, and what was measured
traffic.py    all pairs of a router: follows sampled answers, and deals with the candidates' output
metrics.py    what is exported

Nothing here has a task: all of it happens when a step, an end or a timer comes.
"""
