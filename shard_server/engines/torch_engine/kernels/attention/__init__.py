"""Attention as compiled kernels.

attend.py          causal attention over KV blocks: the softmax, and what surrounds the products
vectors.py         its products in vector registers
amx.py             its products on AMX tiles
scratch.py         the memory that a thread works in
"""
