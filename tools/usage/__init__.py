"""`kvloom usage`: what was used, and whether what was metered is what was delivered.

command.py     the commands
table.py       usage as a table, CSV or JSON
reconcile.py   compares what was metered with independent witnesses; pure
"""
