"""Benches for operators: what an engine or a fabric reaches on one's own machine. Studies of kvloom are in `lab/`.

load.py      `kvloom bench load`: a running fabric under load, as its clients see it
streams.py   streams as their clients see them
engine/      the embedded engine by itself
"""
