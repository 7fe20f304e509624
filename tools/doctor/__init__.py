"""`kvloom doctor`: checks that an engine works on this machine.

command.py  the command
checks.py   the checks
session.py  records the steps of the engine under test
"""
