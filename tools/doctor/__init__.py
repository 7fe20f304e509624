"""`kvloom doctor`: examines whether this machine does what kvloom needs.

command.py  the command, and the report that it prints
checks.py   the checks of an engine, each a sentence
session.py  one engine under examination, and what its steps brought
"""
