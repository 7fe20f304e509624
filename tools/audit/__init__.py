"""`kvloom audit`: verifies, shows and erases what the safety policy has found (docs/operate/audit.md).

command.py  the commands
abuse.py    counts findings by tenant, user and rule, and how that has changed
"""
