"""Computes with torch's operators where compiled kernels cannot: on a GPU, in float32, or without numba.

linear.py         linear layers whose rows do not depend on the batch
int8_linear.py    linear layers with int8 weights
attention.py      causal attention over the block-based KV cache
invariance.py     measures whether attention depends on the batch
"""
