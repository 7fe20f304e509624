"""`kvloom receipts`: saves, checks and re-executes receipts of answers (docs/how-to/receipts.md).

command.py     the commands
collect.py     asks a fabric for answers with receipts
verify.py      checks receipts, and has some of them computed again
rerun.py       computes an answer again, on an engine of this machine
"""
