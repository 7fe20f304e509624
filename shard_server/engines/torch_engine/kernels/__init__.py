"""Compiled CPU kernels: a whole forward pass in machine code, without the interpreter between its parts.

families.py           which instructions compute, and which of them this CPU has
choice.py             which family a shard computes with
form_choice.py        which form of weights it computes with, measured
probe.py              measures one family, in a process of its own
self_check.py         compares a family with float64 before an engine relies on it
compiled_forward.py   a forward pass as one program
packed_linear.py      linear layers: how weights are packed and multiplied
packed_weights.py     bf16 and int8 weights, packed
packed_groups.py      grouped weights, packed
shared_weights.py     packed weights in files that all shards of a machine map
paged_attention.py    attention, as Python sees it: which thread computes which rows
thread_pool.py        runs programs on torch's threads
program.py            the entry point of compiled code, which runs a program
adapter_rows.py       what an adapter adds to a row
row_kernels.py        norms, rotation and look-ups, row by row
products/             compiled matrix products
attention/            compiled attention
codegen/              what compiled code is made of
"""
