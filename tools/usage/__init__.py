"""`kvloom usage`: what was used, and whether what was metered is what was delivered.

command.py     the commands
reconcile.py   compares what was metered with independent witnesses; pure
"""
