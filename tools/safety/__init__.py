"""`kvloom safety`: what a policy would do, before it is in force (docs/operate/safety.md).

command.py  the command
"""
