"""`kvloom safety`: what a policy would do, before it is in force (docs/operate/safety.md).

command.py  the command
report.py   counts what a policy does with a log, and compares it with what happened
"""
