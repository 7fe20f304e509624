"""Receipts: what a router signs of an answer, so that anyone with the model can compute it again
(docs/how-to/receipts.md).

receipt.py    the content, its canonical form, and its digests
checks.py     what can be checked of a receipt without computing anything
key_files.py  where the keys are
keys.py       the fabric's key, and the published ones
"""
