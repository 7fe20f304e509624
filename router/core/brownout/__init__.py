"""Brownout: under overload answers are degraded by declared steps before requests are refused
(docs/operate/brownout.md).

burn_rate.py    how fast a model uses up its error budget, in two windows
controller.py   which step each model is on, as a pure function of observations and time
ladder.py       the steps, and what they do to a request
brownout.py     the place of all that in the router core
"""
