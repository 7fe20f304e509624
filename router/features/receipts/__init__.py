"""Receipts of this router's answers (docs/how-to/receipts.md).

writer.py   makes and signs a receipt from a complete answer
"""
