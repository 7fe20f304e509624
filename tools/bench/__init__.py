"""Benches for operators: what an engine or a fabric reaches on one's own machine. Studies of kvloom are in `lab/`.

engine/   the embedded engine by itself
"""
