"""The view that operators have of a fleet, made of the overviews of its routers. Pure.

merge.py       the overviews of several routers as one
time_parts.py  where the time of a request went, and what made it slow
"""
