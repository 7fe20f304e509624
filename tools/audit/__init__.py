"""`kvloom audit`: verifies, shows and erases what the safety policy has found (docs/operate/audit.md).

command.py    the commands
reproduce.py  computes an answer again that nobody has kept
"""
