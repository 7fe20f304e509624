"""Receipts of this router's answers (docs/receipts.md).

writer.py   makes and signs a receipt from a complete answer
"""
