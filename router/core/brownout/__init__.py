"""Brownout: under overload answers are degraded by declared steps before requests are refused
(docs/operate/brownout.md).

controller.py   which step each model is on, as a pure function of observations and time
brownout.py     the place of all that in the router core
"""
